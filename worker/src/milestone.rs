//! What a guest reports about its own progress, as lines on its first serial port that cannot be taken for anything else:
//!
//! ```text
//! drover worker-07-5f0c…: cloud-init
//! drover worker-07-5f0c…: joined status=0
//! ```

/// A point in a guest's first boot that the host can see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Milestone {
    /// The kernel speaks.
    Kernel,
    /// cloud-init found the seed and began.
    CloudInit,
    /// All commands ran; there was no cluster to join.
    Configured,
    /// The join command ended.
    Joined {
        /// Its exit status.
        status: u8,
    },
}

/// What the kernel's first line on a console holds.
const KERNEL: &str = "Linux version ";

impl Milestone {
    fn word(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::CloudInit => "cloud-init",
            Self::Configured => "configured",
            Self::Joined { .. } => "joined",
        }
    }

    fn prefix(instance_id: &str) -> String {
        format!("drover {instance_id}: ")
    }

    /// The line that the guest writes for a milestone without a status.
    pub(crate) fn line(self, instance_id: &str) -> String {
        format!("{}{}", Self::prefix(instance_id), self.word())
    }

    /// The line that the guest writes after its join command, with `status` as the shell is to expand it.
    pub(crate) fn joined_line(instance_id: &str, status: &str) -> String {
        format!(
            "{}{} status={status}",
            Self::prefix(instance_id),
            Self::Joined { status: 0 }.word()
        )
    }

    /// What `line` reports about `instance_id`, if anything.
    #[must_use]
    pub fn of_line(line: &str, instance_id: &str) -> Option<Self> {
        if line.contains(KERNEL) {
            return Some(Self::Kernel);
        }
        // Anything may stand before it: a kernel message that had begun, a prompt.
        let (_, rest) = line.split_once(&Self::prefix(instance_id))?;
        let rest = rest.trim_end();
        if let Some(status) = rest.strip_prefix("joined status=") {
            return status.parse().ok().map(|status| Self::Joined { status });
        }
        [Self::CloudInit, Self::Configured]
            .into_iter()
            .find(|milestone| rest == milestone.word())
    }
}

/// Cuts a console's bytes into lines and finds the milestones of one worker.
pub struct Watcher {
    instance_id: String,
    line: Vec<u8>,
}

/// A guest can write a line without end; this much of it is looked at.
const LINE_MAX: usize = 4096;

impl Watcher {
    /// Watches for what `instance_id` reports.
    #[must_use]
    pub fn new(instance_id: &str) -> Self {
        Self {
            instance_id: instance_id.to_owned(),
            line: Vec::new(),
        }
    }

    /// Takes the next bytes of the console and gives the milestones in them.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<Milestone> {
        let mut found = Vec::new();
        for byte in bytes {
            if *byte == b'\n' {
                let line = String::from_utf8_lossy(&self.line);
                found.extend(Milestone::of_line(&line, &self.instance_id));
                self.line.clear();
            } else if self.line.len() < LINE_MAX {
                self.line.push(*byte);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milestones_are_found_however_the_bytes_arrive() {
        let console = "\u{1b}[0m[    0.000000] Linux version 6.12\r\n[ 9.1] usb: \ndrover w-1: cloud-init\r\nfoo\n\
            drover w-2: joined status=0\ndrover w-1: joined status=300\n\ndrover w-1: joined status=7\r\n";
        let expected = [
            Milestone::Kernel,
            Milestone::CloudInit,
            Milestone::Joined { status: 7 },
        ];
        for size in [1, 3, 1000] {
            let mut watcher = Watcher::new("w-1");
            let found: Vec<_> = console
                .as_bytes()
                .chunks(size)
                .flat_map(|part| watcher.feed(part))
                .collect();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_line_without_end_takes_no_memory_without_end() {
        let mut watcher = Watcher::new("w-1");
        watcher.feed(&vec![b'x'; 1 << 20]);
        assert!(watcher.line.capacity() <= 2 * LINE_MAX);
    }
}
