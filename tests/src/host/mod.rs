//! The emulated KVM host: a whole machine with SVM and nested paging, run by QEMU's interpreter.
//!
//! One virtual CPU each: with two, QEMU's interpreter and a kernel that patches its own code race. Two hosts
//! side by side use two cores.
//!
//! ```text
//! run folder      share/job        what PID 1 of the host runs
//!                 share/programs/  copied into the host's memory before it starts
//!                 share/…          what the job leaves
//!                 console.log      the host's whole serial console
//!                 scratch.img      /scratch of the host (removed at the end)
//! host's console  LAB-UP …  LAB-TICK …  LAB-JOB-EXIT=n  LAB-DOWN …
//! ```
//!
//! A host that is silent for longer than [`SILENCE`] or ends without having said how its job ended is
//! *lost*: a failure of the lab, not of the job.

pub mod shards;

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::site::Lab;

/// The host says that it lives every 15 s, so this long without a byte means that it does not.
pub const SILENCE: Duration = Duration::from_secs(150);

/// How a host ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Ended {
    /// Its job ended with this exit status.
    Job(i32),
    /// The job was still running when its time was over.
    TimedOut,
    /// The host itself was lost; the text says how.
    Lost(String),
}

/// One emulated host to be run.
pub struct Host<'a> {
    /// The lab's files.
    pub lab: &'a Lab,
    /// The run folder; created, and its contents kept.
    pub folder: PathBuf,
    /// Programs copied into the host's memory at `/run/lab`.
    pub programs: Vec<PathBuf>,
    /// A shell script, run with `/run/lab` as its working folder.
    pub job: String,
    /// Memory of the host, in MiB.
    pub memory_mib: u32,
    /// How long the job may take, boot included.
    pub timeout: Duration,
    /// Repeat on this terminal the job's lines that begin so; all of them if empty.
    pub echo: &'static str,
}

/// Size of the host's `/scratch`, a sparse file here.
const SCRATCH_BYTES: u64 = 16 << 30;

impl Host<'_> {
    /// The folder that the host sees as `/host`.
    #[must_use]
    pub fn share(&self) -> PathBuf {
        self.folder.join("share")
    }

    /// Boots the host, runs its job and waits for its end.
    ///
    /// # Errors
    ///
    /// The run folder cannot be written, or QEMU cannot be started.
    pub fn run(&self) -> io::Result<Ended> {
        self.prepare()?;
        let mut child = self.command()?.spawn()?;
        let ended = self.watch(&mut child);
        // However it went, nothing of it stays: the process by the id we have, and the big file.
        let _ = child.kill();
        child.wait()?;
        fs::remove_file(self.scratch())?;
        ended
    }

    fn scratch(&self) -> PathBuf {
        self.folder.join("scratch.img")
    }

    fn prepare(&self) -> io::Result<()> {
        let programs = self.share().join("programs");
        fs::create_dir_all(&programs)?;
        for program in &self.programs {
            let name = program.file_name().unwrap_or(program.as_os_str());
            fs::copy(program, programs.join(name))?;
        }
        let job = format!(
            "#!/bin/bash\nmkdir -p /run/lab && cp /host/programs/* /run/lab/ && cd /run/lab || exit 125\n\
             export PATH=/run/lab:$PATH\n{}\n",
            self.job
        );
        write_script(&self.share().join("job"), &job)?;
        let scratch = self.scratch();
        File::create(&scratch)?.set_len(SCRATCH_BYTES)?;
        let sbin = Path::new("/usr/sbin/mkfs.ext4");
        let program = if sbin.exists() {
            sbin
        } else {
            Path::new("mkfs.ext4")
        };
        let made = Command::new(program)
            .args([
                "-q",
                "-F",
                "-O",
                "^has_journal",
                "-E",
                "lazy_itable_init=1,nodiscard",
            ])
            .arg(&scratch)
            .stdin(Stdio::null())
            .status()?;
        if made.success() {
            Ok(())
        } else {
            Err(io::Error::other(format!("mkfs.ext4: {made}")))
        }
    }

    fn command(&self) -> io::Result<Command> {
        let errors = File::create(self.folder.join("qemu.log"))?;
        let mut command = Command::new(self.lab.tools.join("qemu-system-x86_64"));
        command
            .args([
                "-accel",
                "tcg,thread=multi",
                "-M",
                "q35",
                "-cpu",
                "EPYC,+svm,+npt",
                "-smp",
                "1",
            ])
            .args(["-m", &self.memory_mib.to_string()])
            .args([
                "-nographic",
                "-nodefaults",
                "-no-reboot",
                "-serial",
                "stdio",
            ])
            .arg("-kernel")
            .arg(&self.lab.l1_kernel)
            .arg("-initrd")
            .arg(&self.lab.l1_initrd)
            .args(["-append", "console=ttyS0 panic=-1 mitigations=off quiet"])
            .arg("-drive")
            .arg(drive(&self.lab.l1_root, "snapshot=on"))
            .arg("-drive")
            .arg(drive(&self.lab.images_disk, "readonly=on"))
            .arg("-drive")
            .arg(drive(&self.scratch(), "cache=unsafe,discard=unmap"))
            .arg("-virtfs")
            .arg(format!(
                "local,path={},mount_tag=host,security_model=none",
                self.share().display()
            ))
            // The writes to the root go to a file here that QEMU has already unlinked.
            .env("TMPDIR", &self.folder)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors);
        Ok(command)
    }

    /// Follows the console to the end.
    fn watch(&self, child: &mut Child) -> io::Result<Ended> {
        let mut log = File::create(self.folder.join("console.log"))?;
        let Some(mut console) = child.stdout.take() else {
            return Err(io::Error::other("QEMU has no output"));
        };
        let (send, receive) = mpsc::channel();
        thread::spawn(move || {
            let mut buffer = [0_u8; 4096];
            while let Ok(count) = console.read(&mut buffer) {
                if count == 0 || send.send(buffer[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        let deadline = Instant::now() + self.timeout;
        let mut text = Vec::new();
        let mut echoed = 0;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match receive.recv_timeout(left.min(SILENCE)) {
                Ok(bytes) => {
                    io::Write::write_all(&mut log, &bytes)?;
                    text.extend_from_slice(&bytes);
                    echoed = echo(&text, echoed, self.echo)?;
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(judge(&text)),
                Err(RecvTimeoutError::Timeout) if Instant::now() >= deadline => {
                    return Ok(match judge(&text) {
                        Ended::Lost(_) => Ended::TimedOut,
                        ended => ended,
                    });
                }
                Err(RecvTimeoutError::Timeout) => {
                    return Ok(match judge(&text) {
                        Ended::Lost(_) => {
                            Ended::Lost(format!("silent for {} s", SILENCE.as_secs()))
                        }
                        ended => ended,
                    });
                }
            }
        }
    }
}

/// A disk of the host. A comma in a file name is written twice (QEMU's option syntax).
fn drive(path: &Path, options: &str) -> String {
    let file = path.display().to_string().replace(',', ",,");
    format!("file={file},format=raw,if=virtio,{options}")
}

/// Repeats the lines of the job that are complete, without the host's own; returns how far it got.
fn echo(console: &[u8], from: usize, prefix: &str) -> io::Result<usize> {
    let Some(end) = console[from..].iter().rposition(|&byte| byte == b'\n') else {
        return Ok(from);
    };
    let end = from + end + 1;
    let up = console[..end]
        .windows(UP.len())
        .position(|window| window == UP.as_bytes());
    let over = console[..from]
        .windows(EXIT.len())
        .any(|window| window == EXIT.as_bytes());
    if let Some(up) = up.filter(|_| !over) {
        let text = String::from_utf8_lossy(&console[from.max(up)..end]);
        let mut output = io::stdout().lock();
        for line in text.lines().take_while(|line| !line.starts_with(EXIT)) {
            if line.starts_with(prefix) && !line.starts_with("LAB-") {
                io::Write::write_all(&mut output, format!("{line}\n").as_bytes())?;
            }
        }
    }
    Ok(end)
}

/// What the host says when it begins and ends its job.
const UP: &str = "LAB-UP";
const EXIT: &str = "LAB-JOB-EXIT=";

/// Reads from a console how the job ended.
fn judge(console: &[u8]) -> Ended {
    let text = String::from_utf8_lossy(console);
    let status = text.lines().rev().find_map(|line| {
        let value = line.trim().strip_prefix(EXIT)?;
        value.parse().ok()
    });
    match status {
        Some(status) => Ended::Job(status),
        None if text.contains(UP) => Ended::Lost("it ended in the middle of its job".into()),
        None => Ended::Lost("it did not come up".into()),
    }
}

fn write_script(path: &Path, text: &str) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_never_said_how_its_job_ended_is_lost_and_no_failed_job() {
        assert!(matches!(judge(b"boot\r\nOops\r\n"), Ended::Lost(_)));
        assert!(matches!(judge(b"LAB-UP 4.1\r\nhalf a li"), Ended::Lost(_)));
        assert_eq!(
            judge(b"LAB-UP 4.1\r\nLAB-JOB-EXIT=3\r\nLAB-DOWN 9\r\n"),
            Ended::Job(3)
        );
    }
}
