//! What a lease says, and whether its holder can still be there.

use std::fmt;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Makes an identity of a host out of its machine ID, which itself is not to be shown around.
const MACHINE_NAMESPACE: Uuid = Uuid::from_u128(0x8a5d_0f7b_53c4_4e0e_9d0a_71d2_5f0c_46b3);
/// The pid namespace that the kernel begins with: whoever is in it is no container, and its machine ID is the host's.
const FIRST_PID_NAMESPACE: u64 = 0xefff_fffc;
/// The longest name kept in a lease, in bytes, so that a lease that is held fits one sector.
const MAX_NAME: usize = 64;
/// The version of the layout.
pub(super) const VERSION: u32 = 1;

/// Who holds an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseHolder {
    /// What for, like the name of a VM.
    pub owner: String,
    /// The host's name, for people.
    pub host: String,
    /// The host over its restarts; absent where that is not known for certain, as in a container.
    pub machine: Option<Uuid>,
    /// The run of the host's kernel.
    pub boot: Uuid,
    /// The pid namespace, as its inode number.
    pub pid_namespace: u64,
    /// The process there.
    pub pid: u32,
    /// When the process began, in clock ticks since the host did.
    pub started: u64,
    /// Since when, in UTC.
    pub since: String,
}

/// The contents of a lease file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lease {
    /// The layout; 1.
    pub version: u32,
    /// Rises whenever the image comes into other hands.
    pub epoch: u64,
    /// Who holds the image; absent while nobody does.
    pub holder: Option<LeaseHolder>,
    /// The overlay in which the image goes on: it must not be written itself.
    pub superseded_by: Option<PathBuf>,
}

impl Lease {
    /// A lease that nobody holds.
    pub(super) fn free(epoch: u64) -> Self {
        Self {
            version: VERSION,
            epoch,
            holder: None,
            superseded_by: None,
        }
    }
}

impl fmt::Display for LeaseHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            owner,
            host,
            pid,
            since,
            ..
        } = self;
        write!(f, "`{owner}` (process {pid} on {host}) since {since}")
    }
}

/// Whether a holder can still be there, seen from one process that has the image's lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is this very process.
    Own,
    /// A process of this host that runs.
    Alive,
    /// It has ended.
    Gone,
    /// On another host; nobody here can know.
    Elsewhere,
}

/// Where a process runs.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) host: String,
    pub(super) machine: Option<Uuid>,
    pub(super) boot: Uuid,
    pub(super) pid_namespace: u64,
    pub(super) pid: u32,
    pub(super) started: u64,
}

impl Place {
    /// Where this process runs.
    pub(super) fn here() -> std::io::Result<Self> {
        let damaged = |what: &str| std::io::Error::other(format!("cannot understand {what}"));
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let boot = boot
            .trim()
            .parse()
            .map_err(|_| damaged("the host's boot ID"))?;
        let namespace = std::fs::read_link("/proc/self/ns/pid")?;
        let namespace = namespace.to_string_lossy();
        let pid_namespace = namespace
            .strip_prefix("pid:[")
            .and_then(|rest| rest.strip_suffix(']')?.parse().ok())
            .ok_or_else(|| damaged("the pid namespace"))?;
        let pid = std::process::id();
        let machine = (pid_namespace == FIRST_PID_NAMESPACE)
            .then(|| std::fs::read_to_string("/etc/machine-id").ok())
            .flatten()
            .filter(|id| id.trim().len() == 32)
            .map(|id| Uuid::new_v5(&MACHINE_NAMESPACE, id.trim().as_bytes()));
        let name = rustix::system::uname();
        Ok(Self {
            host: shorten(&name.nodename().to_string_lossy()),
            machine,
            boot,
            pid_namespace,
            pid,
            started: started(pid).ok_or_else(|| damaged("when this process began"))?,
        })
    }

    /// This process as a holder from now on.
    pub(super) fn holder(&self, owner: &str) -> LeaseHolder {
        LeaseHolder {
            owner: shorten(owner),
            host: self.host.clone(),
            machine: self.machine,
            boot: self.boot,
            pid_namespace: self.pid_namespace,
            pid: self.pid,
            started: self.started,
            since: utc(SystemTime::now()),
        }
    }

    /// Whether a holder can still be there. `started` tells when a process of this namespace began, if there is one.
    ///
    /// | boot | pid namespace | process | host | |
    /// |---|---|---|---|---|
    /// | same | same | this one | | own |
    /// | same | same | another that runs, with the same beginning | | alive |
    /// | same | same | none, or a later one of the same number | | gone |
    /// | same | other | cannot be seen; but the image's lock is ours, and locks reach over the whole host | | gone |
    /// | other | | | known to be the same | gone |
    /// | other | | | other or not known | elsewhere |
    pub(super) fn judge(
        &self,
        holder: &LeaseHolder,
        started: impl Fn(u32) -> Option<u64>,
    ) -> Verdict {
        if holder.boot != self.boot {
            return match (holder.machine, self.machine) {
                (Some(theirs), Some(ours)) if theirs == ours => Verdict::Gone,
                _ => Verdict::Elsewhere,
            };
        }
        if holder.pid_namespace != self.pid_namespace {
            return Verdict::Gone;
        }
        if (holder.pid, holder.started) == (self.pid, self.started) {
            return Verdict::Own;
        }
        match started(holder.pid) {
            Some(began) if began == holder.started => Verdict::Alive,
            _ => Verdict::Gone,
        }
    }
}

/// When a process began, in clock ticks since the host did; `None` where there is no such process.
pub(super) fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name in parentheses, which may hold anything; the beginning is the 22nd.
    let mut rest = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    // A zombie has let go of everything.
    if rest.next()? == "Z" {
        return None;
    }
    rest.nth(18)?.parse().ok()
}

fn shorten(name: &str) -> String {
    let mut end = name.len().min(MAX_NAME);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    let name = name.get(..end).unwrap_or_default();
    name.chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

/// A time as `2026-12-01T02:03:04Z`.
pub(super) fn utc(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
    let (mut days, of_day) = (seconds / 86_400, seconds % 86_400);
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    loop {
        let length = if leap(year) { 366 } else { 365 };
        if days < length {
            break;
        }
        days -= length;
        year += 1;
    }
    let february = if leap(year) { 29 } else { 28 };
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    let day = days + 1;
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}
