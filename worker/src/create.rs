//! Makes a worker: files, VMM, network, guest. A failure on the way undoes what came before it.
//!
//! ```text
//! plan ──▶ overlay + seed ──▶ listed ──▶ VMM answers ──▶ VM built (tap made) ──▶ tap on bridge ──▶ started ──▶ joined
//! └─ nothing to undo ─┘      └────────────── undone: process ended, folder removed ──────────────┘          └ kept ┘
//! ```
//!
//! A worker whose guest runs but does not join is kept, so that one can look why.

use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use drover_api::definition::DefinitionError;

use crate::delete::undo;
use crate::error::Error;
use crate::milestone::{Milestone, Watcher};
use crate::netlink;
use crate::plan::{Definition, Plan};
use crate::process::Process;
use crate::provision::provision;
use crate::state::{Record, StateDir, WorkerDir};
use crate::timeline::{Observer, Reached, Step, Timeline};
use crate::vmm;

/// How often a silent console is asked whether its VMM still lives.
const CONSOLE_INTERVAL: Duration = Duration::from_millis(200);

/// How far a worker is to get before `create` returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// Its files are durable; no process is started.
    Provisioned,
    /// Its processors run.
    Started,
    /// It has joined its cluster; without one, all its commands have run.
    Joined {
        /// How long that may take from the beginning.
        timeout: Duration,
    },
}

/// What was made.
#[derive(Debug)]
pub struct Created {
    /// The worker.
    pub record: Record,
    /// What happened when.
    pub timeline: Vec<Reached>,
    /// Its VMM's process id, if it was started.
    pub pid: Option<i32>,
}

/// Makes the worker `name`.
///
/// # Errors
/// Before the guest runs: nothing is left behind. After that: [`Error::Wait`], and the worker is kept.
pub fn create(
    state: &StateDir,
    name: &str,
    definition: &Definition,
    goal: Goal,
    observer: &mut dyn Observer,
) -> Result<Created, Error> {
    let mut timeline = Timeline::new(observer);
    let plan = Plan::new(state, name, definition)?;
    // Found before anything is made, so that its absence leaves nothing to undo.
    let program = match goal {
        Goal::Provisioned => None,
        Goal::Started | Goal::Joined { .. } => Some(vmm::locate()?),
    };
    let locked = provision(state, &plan, &mut timeline)?;
    let process = match program
        .map(|program| start(&program, definition, &plan, &mut timeline))
        .transpose()
    {
        Ok(process) => process,
        Err(error) => {
            undo(state, &plan.dir, &plan.record, &locked)?;
            return Err(error);
        }
    };
    // From here on it may be deleted by others.
    drop(locked);
    if let (Goal::Joined { timeout }, Some(process)) = (goal, &process) {
        follow(&plan.record, &plan.dir, process, timeout, &mut timeline)?;
    }
    Ok(Created {
        pid: process.map(|process| process.id().pid),
        timeline: timeline.finish(),
        record: plan.record,
    })
}

fn start(
    program: &Path,
    definition: &Definition,
    plan: &Plan,
    timeline: &mut Timeline<'_>,
) -> Result<Process, Error> {
    let process = vmm::spawn(program, &plan.dir)?;
    let client = vmm::client(&plan.dir)?;
    let refused = |error| {
        vmm::refused(error, |field, reason| {
            definition.refused_by_vmm(field, reason)
        })
    };
    client.create(&plan.vm).map_err(refused)?;
    timeline.reach(Step::Vmm);
    if let (Some(tap), Some(bridge)) = (&plan.record.tap, &plan.record.bridge) {
        netlink::attach(tap, bridge, plan.mtu).map_err(|source| Error::Network {
            what: format!("cannot put {tap} on {bridge}"),
            source,
        })?;
        timeline.reach(Step::Tap);
    }
    client.start().map_err(refused)?;
    timeline.reach(Step::Started);
    Ok(process)
}

/// Follows the console until the guest has done what it was made for.
fn follow(
    record: &Record,
    dir: &WorkerDir,
    process: &Process,
    timeout: Duration,
    timeline: &mut Timeline<'_>,
) -> Result<(), Error> {
    let stop = |reason: String| {
        Err(Error::Wait {
            name: record.name.clone(),
            reason,
        })
    };
    let goal = if record.joins {
        "joined"
    } else {
        "was configured"
    };
    let connected = UnixStream::connect(dir.console_socket()).and_then(|console| {
        console.set_read_timeout(Some(CONSOLE_INTERVAL))?;
        Ok(console)
    });
    let mut console = match connected {
        Ok(console) => console,
        Err(error) => return stop(format!("its console cannot be read: {error}")),
    };
    let mut watcher = Watcher::new(&record.instance_id);
    let mut buffer = [0; 4096];
    loop {
        let length = match console.read(&mut buffer) {
            Ok(length) => length,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                if process.wait(Duration::ZERO) {
                    0
                } else if timeline.elapsed() > timeout {
                    return stop(format!("has not {goal} within {} s", timeout.as_secs()));
                } else {
                    continue;
                }
            }
            Err(error) => return stop(format!("its console cannot be read: {error}")),
        };
        if length == 0 {
            let said = vmm::last_words(&dir.log())
                .map(|line| format!(" ({line})"))
                .unwrap_or_default();
            return stop(format!("its VMM ended before it {goal}{said}"));
        }
        let bytes = buffer.get(..length).unwrap_or_default();
        timeline.console(bytes);
        let now = Instant::now();
        for milestone in watcher.feed(bytes) {
            match milestone {
                Milestone::Kernel => timeline.reach_at(Step::Kernel, now),
                Milestone::CloudInit => timeline.reach_at(Step::CloudInit, now),
                Milestone::Configured => {
                    timeline.reach_at(Step::Configured, now);
                    return Ok(());
                }
                Milestone::Joined { status: 0 } => {
                    timeline.reach_at(Step::Joined, now);
                    return Ok(());
                }
                Milestone::Joined { status } => {
                    return stop(format!("its join command failed with status {status}"));
                }
            }
        }
        if timeline.elapsed() > timeout {
            return stop(format!("has not {goal} within {} s", timeout.as_secs()));
        }
    }
}

/// Starts the VMM of a worker that does not run, on the disk it has.
///
/// # Errors
/// There is no such worker, it runs already, or its VMM refuses; the worker is kept as it was.
pub fn restart(state: &StateDir, name: &str) -> Result<i32, Error> {
    let dir = state.worker(name)?;
    let record = dir.record(state)?;
    let Some(_locked) = state.lock(&dir)? else {
        return Err(Error::NotFound {
            name: name.to_owned(),
            state: state.path().to_path_buf(),
        });
    };
    if let Some(process) = crate::process::find(&dir) {
        return Ok(process.id().pid);
    }
    let vm = crate::plan::read_vm_yaml(&dir.vm_config())?;
    let program = vmm::locate()?;
    let source = dir.vm_config().display().to_string();
    let refused = |error| {
        vmm::refused(error, |field, reason| {
            DefinitionError::new(field, reason)
                .with_source(&source)
                .into()
        })
    };
    let process = vmm::spawn(&program, &dir)?;
    let client = vmm::client(&dir)?;
    let mtu = vm.nets.first().and_then(|net| net.mtu);
    let result = client.create(&vm).map_err(refused).and_then(|_| {
        if let (Some(tap), Some(bridge)) = (&record.tap, &record.bridge) {
            netlink::attach(tap, bridge, mtu).map_err(|source| Error::Network {
                what: format!("cannot put {tap} on {bridge}"),
                source,
            })?;
        }
        client.start().map_err(refused)
    });
    match result {
        Ok(_) => Ok(process.id().pid),
        Err(error) => {
            process.kill()?;
            Err(error)
        }
    }
}
