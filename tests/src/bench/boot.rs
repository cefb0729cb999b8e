//! `bench boot`: Drover, QEMU microvm and QEMU q35 boot the same kernel and initramfs, one after the other, in
//! rounds; each has one disk, one network card and its console on standard output.

use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::bench::measure::{ExitCounter, cpu_time, own_memory_bytes};
use crate::bench::statistics::{Ratio, median, ratio, rounded};
use crate::bench::{Limit, add_limits};
use crate::failure::{Context as _, Failure, Result};
use crate::fixtures::guest::{COMMAND_LINE, INIT_MARKER, SHELL_MARKER, SmallGuest};
use crate::fixtures::net::Tap;
use crate::fixtures::peer::{MachineType, PeerConfig};
use crate::site::Site;

const MEMORY_MIB: u32 = 256;
const TAP: &str = "bench0";
/// The most of its own memory that Drover may take with one disk and one card.
pub const OWN_MEMORY_MIB: f64 = 6.0;
/// The most exits to user space of Drover's boot: nearly all are the kernel's walk over PCI configuration ports.
pub const EXITS: u32 = 3000;
const LIMIT: Duration = Duration::from_secs(120);

/// Who boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contestant {
    Drover,
    Microvm,
    Q35,
}

impl Contestant {
    const ALL: [Self; 3] = [Self::Drover, Self::Microvm, Self::Q35];

    fn name(self) -> &'static str {
        match self {
            Self::Drover => "drover",
            Self::Microvm => "microvm",
            Self::Q35 => "q35",
        }
    }
}

/// One boot.
#[derive(Clone, Copy, Debug)]
struct Boot {
    /// Process start to the first line of init, in seconds.
    to_init: f64,
    /// The VMM's own CPU time until the guest's shell, in seconds.
    own_cpu: f64,
    /// The VMM's own memory at the guest's shell, in bytes.
    own_memory: u64,
}

/// What belongs to all boots.
struct Arena<'a> {
    site: &'a Site,
    folder: &'a Path,
    guest: SmallGuest,
    _tap: Tap,
}

/// Runs the benchmark and returns its report.
///
/// # Errors
///
/// A guest does not boot, or a measurement cannot be made.
pub fn run(site: &Site, folder: &Path, rounds: usize) -> Result<Value> {
    let arena = Arena::new(site, folder)?;
    // The boots whose exits are counted come first: they also bring every file into the page cache.
    let mut exits = serde_json::Map::new();
    for contestant in Contestant::ALL {
        exits.insert(
            contestant.name().to_owned(),
            json!(arena.exits(contestant)?),
        );
    }
    let mut boots: [Vec<Boot>; 3] = [Vec::new(), Vec::new(), Vec::new()];
    for round in 0..rounds {
        for turn in 0..Contestant::ALL.len() {
            // Each is first, second and third equally often.
            let index = (turn + round) % Contestant::ALL.len();
            let contestant = Contestant::ALL[index];
            let boot = arena.boot(contestant).context(contestant.name())?;
            println!(
                "round {} {:8} init {:6.3} s, own CPU {:5.2} s, own memory {:5.1} MiB",
                round + 1,
                contestant.name(),
                boot.to_init,
                boot.own_cpu,
                mib(boot.own_memory)
            );
            boots[index].push(boot);
        }
    }
    let times = |index: usize| {
        boots[index]
            .iter()
            .map(|boot| boot.to_init)
            .collect::<Vec<_>>()
    };
    let (drover, microvm, q35) = (times(0), times(1), times(2));
    let of = |value: &dyn Fn(&Boot) -> f64| -> Value {
        let medians = Contestant::ALL
            .iter()
            .zip(&boots)
            .map(|(contestant, boots)| {
                let values: Vec<f64> = boots.iter().map(value).collect();
                (
                    contestant.name().to_owned(),
                    json!(rounded(median(&values))),
                )
            });
        Value::Object(medians.collect())
    };
    let (vs_q35, vs_microvm) = (ratio(&drover, &q35), ratio(&drover, &microvm));
    let interval = |ratio: Ratio| json!([rounded(ratio.low), rounded(ratio.high)]);
    let memory = of(&|boot| mib(boot.own_memory));
    let cpu = of(&|boot| boot.own_cpu);
    let exits_of_ours = exits["drover"].as_f64().unwrap_or(f64::NAN);
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let limits = [
        Limit {
            name: "boot_vs_q35",
            value: rounded(vs_q35.value),
            at_most: 0.70,
        },
        Limit {
            name: "boot_vs_microvm",
            value: rounded(vs_microvm.value),
            at_most: 0.95,
        },
        Limit {
            name: "own_memory_mib",
            value: number(&memory["drover"]),
            at_most: OWN_MEMORY_MIB,
        },
        Limit {
            name: "exits_to_userspace",
            value: exits_of_ours,
            at_most: f64::from(EXITS),
        },
        Limit {
            name: "own_cpu_vs_microvm",
            value: rounded(number(&cpu["drover"]) / number(&cpu["microvm"])),
            at_most: 0.75,
        },
    ];
    let mut report = json!({
        "rounds": rounds,
        "ratio": {
            "boot_vs_q35": rounded(vs_q35.value),
            "boot_vs_q35_interval": interval(vs_q35),
            "boot_vs_microvm": rounded(vs_microvm.value),
            "boot_vs_microvm_interval": interval(vs_microvm),
        },
        "own_memory_mib": memory["drover"],
        "medians": {
            "seconds_to_init": of(&|boot| boot.to_init),
            "own_cpu_seconds": cpu,
            "own_memory_mib": memory,
        },
        "exits_to_userspace": exits,
        "emulated": site.emulated(),
    });
    add_limits(&mut report, &limits);
    Ok(report)
}

/// What one boot of Drover costs: exits to user space, and its own memory in MiB.
///
/// # Errors
///
/// The guest does not boot, or a measurement cannot be made.
pub fn costs(site: &Site, folder: &Path) -> Result<(u64, f64)> {
    let arena = Arena::new(site, folder)?;
    let exits = arena.exits(Contestant::Drover)?;
    let boot = arena.boot(Contestant::Drover)?;
    Ok((exits, mib(boot.own_memory)))
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a process's size is far below 2^52"
)]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// A VMM that is ended with the value.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Ended already is as good; nothing else can be done about it here.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl<'a> Arena<'a> {
    fn new(site: &'a Site, folder: &'a Path) -> Result<Self> {
        let arena = Self {
            site,
            folder,
            guest: SmallGuest::plain(&site.images),
            _tap: Tap::create(TAP, "10.79.0.1/24", 1500, 1)?,
        };
        fs::File::create(arena.disk())?.set_len(64 << 20)?;
        Ok(arena)
    }

    fn disk(&self) -> std::path::PathBuf {
        self.folder.join("bench.raw")
    }

    fn command(&self, contestant: Contestant) -> Result<Command> {
        let machine = match contestant {
            Contestant::Drover => return self.drover(),
            Contestant::Microvm => MachineType::Microvm,
            Contestant::Q35 => MachineType::Q35,
        };
        let disk = self.disk();
        let config = PeerConfig {
            machine,
            kernel: &self.guest.kernel,
            initrd: &self.guest.initrd,
            cmdline: COMMAND_LINE,
            cpus: 1,
            memory_mib: MEMORY_MIB,
            disk: Some((&disk, "raw")),
            tap: Some(TAP),
        };
        Ok(config.command())
    }

    fn drover(&self) -> Result<Command> {
        let definition = json!({
            "name": "bench",
            "memory": {"size": format!("{MEMORY_MIB}MiB")},
            "boot": {"kernel": self.guest.kernel, "initrd": self.guest.initrd, "cmdline": COMMAND_LINE},
            "disks": [{"id": "disk0", "path": self.disk(), "format": "raw"}],
            "nets": [{"id": "net0", "tap": {"name": TAP}}],
            "serial": {"mode": "stdio"},
        });
        let file = self.folder.join("bench.yaml");
        fs::write(&file, definition.to_string()).context("write bench.yaml")?;
        let mut command = Command::new(self.site.program("drover-vmm"));
        command
            .arg("--config")
            .arg(file)
            .arg("--api-socket")
            .arg(self.folder.join("bench-api.sock"));
        Ok(command)
    }

    /// Starts a VMM and reads its console until a text; returns the process and the time that took.
    fn start(&self, contestant: Contestant, texts: &[&str]) -> Result<(Running, Vec<Duration>)> {
        let mut command = self.command(contestant)?;
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        let started = Instant::now();
        let mut running = Running(command.spawn().context("start the VMM")?);
        let mut console = running
            .0
            .stdout
            .take()
            .ok_or_else(|| Failure::Broken("the VMM has no output".into()))?;
        let (send, receive) = std::sync::mpsc::channel();
        thread::spawn(move || {
            let mut buffer = [0_u8; 4096];
            while let Ok(count) = console.read(&mut buffer) {
                if count == 0
                    || send
                        .send((started.elapsed(), buffer[..count].to_vec()))
                        .is_err()
                {
                    break;
                }
            }
        });
        let mut heard = Vec::new();
        let mut times = Vec::new();
        for text in texts {
            let mut at = started.elapsed();
            while !heard
                .windows(text.len())
                .any(|window| window == text.as_bytes())
            {
                let left = LIMIT.saturating_sub(started.elapsed());
                let (time, bytes) = receive.recv_timeout(left).map_err(|_| {
                    Failure::Broken(format!(
                        "no {text:?}; heard: {}",
                        String::from_utf8_lossy(&heard)
                    ))
                })?;
                at = time;
                heard.extend_from_slice(&bytes);
            }
            times.push(at);
        }
        Ok((running, times))
    }

    fn boot(&self, contestant: Contestant) -> Result<Boot> {
        let (running, times) = self.start(contestant, &[INIT_MARKER, SHELL_MARKER])?;
        let to_init = times.first().map_or(f64::NAN, Duration::as_secs_f64);
        // The guest is idle now; what the VMM still had to do is done.
        thread::sleep(Duration::from_millis(300));
        let process = running.0.id();
        let own_memory = own_memory_bytes(process, u64::from(MEMORY_MIB) << 20)?;
        let own_cpu = cpu_time(process)?.own.as_secs_f64();
        Ok(Boot {
            to_init,
            own_cpu,
            own_memory,
        })
    }

    /// Exits to user space of one boot up to the shell. Counting costs time: never in a timed round.
    fn exits(&self, contestant: Contestant) -> Result<u64> {
        let counter = ExitCounter::start()?;
        let (_running, _) = self.start(contestant, &[SHELL_MARKER])?;
        counter.count()
    }
}
