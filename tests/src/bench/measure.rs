//! What a VMM's process costs beside its guest, read from outside and the same way for every VMM.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::failure::{Context as _, Failure, Result};

/// The process's own memory: its proportional set size less the mappings that are guest RAM, in bytes.
///
/// Guest RAM is told by its size: a writable mapping that is at least half as large as the guest.
///
/// # Errors
///
/// The process is gone, or has no mapping that could be the guest's RAM.
pub fn own_memory_bytes(process: u32, guest_bytes: u64) -> Result<u64> {
    let path = format!("/proc/{process}/smaps");
    let text = fs::read_to_string(&path).context(&path)?;
    own_memory(&text, guest_bytes)
        .ok_or_else(|| Failure::Broken(format!("{path}: no mapping of the guest's RAM")))
}

fn own_memory(smaps: &str, guest_bytes: u64) -> Option<u64> {
    let mut own = 0;
    let mut found = false;
    let mut guest = false;
    for line in smaps.lines() {
        let (key, value) = line.split_once(' ')?;
        if let Some((start, end)) = key.split_once('-').filter(|_| !key.ends_with(':')) {
            let start = u64::from_str_radix(start, 16).ok()?;
            let end = u64::from_str_radix(end, 16).ok()?;
            guest = value.starts_with("rw") && end - start >= guest_bytes / 2;
            found |= guest;
        } else if key == "Pss:" && !guest {
            own += value.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024;
        }
    }
    found.then_some(own)
}

/// CPU time of a process.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuTime {
    /// In the guest.
    pub guest: Duration,
    /// In the VMM and in the kernel for it.
    pub own: Duration,
}

/// Reads how much CPU time a process has used, by the scheduler's ticks.
///
/// # Errors
///
/// The process is gone.
pub fn cpu_time(process: u32) -> Result<CpuTime> {
    let path = format!("/proc/{process}/stat");
    let text = fs::read_to_string(&path).context(&path)?;
    parse_cpu_time(&text).ok_or_else(|| Failure::Broken(format!("{path}: {text}")))
}

fn parse_cpu_time(stat: &str) -> Option<CpuTime> {
    // The name in parentheses may hold anything; fields are counted from behind it (proc_pid_stat(5)).
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let (user, system, guest) = (ticks(14)?, ticks(15)?, ticks(43)?);
    let time = |ticks: u64| Duration::from_millis(ticks * 10);
    Some(CpuTime {
        guest: time(guest),
        own: time((user + system).saturating_sub(guest)),
    })
}

const TRACING: &str = "/sys/kernel/tracing";

/// Counts returns from the guest to user space with the kernel's own tracepoint, for all processes.
pub struct ExitCounter(());

impl ExitCounter {
    const EVENT: &str = "events/kvm/kvm_userspace_exit";

    /// Starts counting from zero.
    ///
    /// # Errors
    ///
    /// The kernel has no such tracepoint, or this user may not use it.
    pub fn start() -> Result<Self> {
        if !Path::new(TRACING).join("events").exists() {
            crate::fixtures::command::succeed("mount", &["-t", "tracefs", "tracefs", TRACING])?;
        }
        let trigger = Path::new(TRACING).join(Self::EVENT).join("trigger");
        fs::write(&trigger, "hist:keys=common_pid,reason")
            .context(&trigger.display().to_string())?;
        Ok(Self(()))
    }

    /// The number of exits so far.
    ///
    /// # Errors
    ///
    /// The kernel's answer cannot be read.
    pub fn count(&self) -> Result<u64> {
        let path = Path::new(TRACING).join(Self::EVENT).join("hist");
        let text = fs::read_to_string(&path).context(&path.display().to_string())?;
        Ok(hits(&text))
    }
}

impl Drop for ExitCounter {
    fn drop(&mut self) {
        let trigger = Path::new(TRACING).join(Self::EVENT).join("trigger");
        // The counter would only go on counting.
        let _ = fs::write(trigger, "!hist:keys=common_pid,reason");
    }
}

/// Adds up `hitcount:` of a histogram.
fn hits(histogram: &str) -> u64 {
    histogram
        .lines()
        .filter_map(|line| {
            line.split_once("hitcount:")?
                .1
                .split_whitespace()
                .next()?
                .parse::<u64>()
                .ok()
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_ram_is_left_out_of_the_process_own_memory() {
        let smaps = "55d0c0000000-55d0c0100000 r-xp 00000000 08:01 1 /bin/x\nSize: 1024 kB\nPss: 100 kB\n\
                     7f0000000000-7f0010000000 rw-p 00000000 00:00 0 \nSize: 262144 kB\nPss: 9000 kB\nVmFlags: rd wr\n\
                     7f0020000000-7f0020010000 rw-p 00000000 00:00 0 \nPss: 7 kB\n";
        assert_eq!(own_memory(smaps, 256 << 20), Some(107 * 1024));
        assert_eq!(own_memory(smaps, 4 << 30), None);
    }

    #[test]
    fn cpu_time_is_read_whatever_the_process_is_called() {
        let mut fields = vec!["S".to_owned()];
        fields.extend((4..=52).map(|number| (number * 10).to_string()));
        let time = parse_cpu_time(&format!("7 (a) b)) {}", fields.join(" ")));
        let time = time.unwrap_or_default();
        assert_eq!(time.guest, Duration::from_millis(4300));
        assert_eq!(time.own, Duration::from_millis(0));
    }

    #[test]
    fn hit_counts_are_added_up() {
        assert_eq!(
            hits(
                "# x\n{ common_pid: 5, reason: 2 } hitcount:   12\n{ } hitcount: 3\n\nTotals:\n    Hits: 15\n"
            ),
            15
        );
    }
}
