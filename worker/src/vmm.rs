//! Starts a worker's VMM and leads it to a running guest through its API.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use drover_api::client::ClientError;
use drover_api::client::blocking::Client;
use drover_api::types::ErrorCode;

use crate::detach;
use crate::error::Error;
use crate::process::{self, Process, ProcessId};
use crate::state::WorkerDir;

/// The program.
pub(crate) const PROGRAM: &str = "drover-vmm";
/// How long it may take until its API answers.
const ANSWER_DEADLINE: Duration = Duration::from_secs(20);
/// How often that is tried.
const ANSWER_INTERVAL: Duration = Duration::from_millis(1);
/// How much of its log is looked at for its last words.
const LAST_WORDS: u64 = 4096;
/// Exit code of bad input.
const EXIT_BAD_INPUT: i32 = 2;

/// Finds drover-vmm: `$DROVER_VMM`, beside the running program, or on the PATH.
///
/// # Errors
/// It is nowhere.
pub fn locate() -> Result<PathBuf, Error> {
    if let Some(path) = std::env::var_os("DROVER_VMM").map(PathBuf::from) {
        return if path.is_file() {
            Ok(path)
        } else {
            Err(Error::Vmm(format!(
                "DROVER_VMM is {}, which is not a file",
                path.display()
            )))
        };
    }
    let beside = std::env::current_exe()
        .ok()
        .and_then(|own| own.parent().map(|folder| folder.join(PROGRAM)));
    let on_path = std::env::var_os("PATH").into_iter().flat_map(|path| {
        std::env::split_paths(&path)
            .map(|folder| folder.join(PROGRAM))
            .collect::<Vec<_>>()
    });
    beside
        .into_iter()
        .chain(on_path)
        .find(|path| path.is_file())
        .ok_or_else(|| {
            Error::Vmm(
                "not found beside drover nor on the PATH: install it, or name it in DROVER_VMM"
                    .to_owned(),
            )
        })
}

/// Starts the VMM of `dir` and waits until its API answers.
pub(crate) fn spawn(program: &Path, dir: &WorkerDir) -> Result<Process, Error> {
    let log = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(dir.log())
        .map_err(Error::io("create", &dir.log()))?;
    let also_log = log.try_clone().map_err(Error::io("open", &dir.log()))?;
    let mut command = Command::new(program);
    command
        .arg("--api-socket")
        .arg(dir.api_socket())
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(also_log);
    detach::in_new_session(&mut command);
    let mut child = command.spawn().map_err(|error| {
        Error::Vmm(format!("{}: cannot be started: {error}", program.display()))
    })?;
    let pid = i32::try_from(child.id()).unwrap_or(0);
    match await_answer(&mut child, pid, dir) {
        Ok(process) => Ok(process),
        Err(error) => {
            // Nothing was given to it yet; both fail only if it has ended by itself.
            let _ = child.kill();
            let _ = child.wait();
            Err(error)
        }
    }
}

fn await_answer(child: &mut Child, pid: i32, dir: &WorkerDir) -> Result<Process, Error> {
    if let Some(id) = ProcessId::of(pid) {
        process::remember(dir, id)?;
    }
    let deadline = Instant::now() + ANSWER_DEADLINE;
    loop {
        if UnixStream::connect(dir.api_socket()).is_ok() {
            return ProcessId::of(pid)
                .and_then(ProcessId::open)
                .ok_or_else(|| Error::Vmm("ended while it was asked for".to_owned()));
        }
        if let Ok(Some(status)) = child.try_wait() {
            return Err(ended(status, dir));
        }
        if Instant::now() >= deadline {
            let reason = format!(
                "does not answer on {} within {} s",
                dir.api_socket().display(),
                ANSWER_DEADLINE.as_secs()
            );
            return Err(Error::Vmm(reason));
        }
        thread::sleep(ANSWER_INTERVAL);
    }
}

fn ended(status: ExitStatus, dir: &WorkerDir) -> Error {
    let message =
        last_words(&dir.log()).unwrap_or_else(|| format!("ended with {status} and said nothing"));
    Error::Refused {
        message,
        bad_input: status.code() == Some(EXIT_BAD_INPUT),
    }
}

/// The last line of a log.
pub(crate) fn last_words(path: &Path) -> Option<String> {
    let mut file = File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LAST_WORDS)))
        .ok()?;
    let mut end = Vec::new();
    file.take(LAST_WORDS).read_to_end(&mut end).ok()?;
    let text = String::from_utf8_lossy(&end);
    let line = text
        .lines()
        .rev()
        .map(str::trim)
        .find(|line| !line.is_empty())?;
    Some(line.strip_prefix("drover-vmm: ").unwrap_or(line).to_owned())
}

/// A client of a worker's API.
pub(crate) fn client(dir: &WorkerDir) -> Result<Client, Error> {
    Client::new(dir.api_socket()).map_err(|error| Error::Vmm(error.to_string()))
}

/// A client's error in the words of this crate. `in_field` turns a field of the VM into one of the definition.
pub(crate) fn refused(error: ClientError, in_field: impl FnOnce(&str, &str) -> Error) -> Error {
    let bad_input = |code| {
        matches!(
            code,
            ErrorCode::Malformed | ErrorCode::Invalid | ErrorCode::Unavailable
        )
    };
    match error {
        ClientError::Refused(error) => match &error.field {
            Some(field) => in_field(field, &error.message),
            None => Error::Refused {
                bad_input: bad_input(error.code),
                message: error.message,
            },
        },
        other => Error::Refused {
            message: other.to_string(),
            bad_input: false,
        },
    }
}
