//! What a disk counts, and how that is told to Prometheus (text format 0.0.4).
//!
//! Written by the thread that has the disk, read by any. Each number is right by itself; together they are no snapshot.

use std::fmt::Write as _;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FileType, Mode, OFlags};

use crate::budget::CacheCounts;
use crate::disk::Op;
use crate::error::{ErrorClass, IoError};

/// Upper ends of the buckets of a latency histogram, in nanoseconds; a last bucket has no end.
const LATENCIES: [u64; 19] = [
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    200_000_000,
    500_000_000,
    1_000_000_000,
    2_000_000_000,
    5_000_000_000,
    10_000_000_000,
];

/// What a request does, without the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// [`Op::Read`].
    Read,
    /// [`Op::Write`].
    Write,
    /// [`Op::Flush`].
    Flush,
    /// [`Op::Discard`].
    Discard,
    /// [`Op::WriteZeroes`].
    WriteZeroes,
}

impl RequestKind {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Read,
        Self::Write,
        Self::Flush,
        Self::Discard,
        Self::WriteZeroes,
    ];

    /// Its name as a label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::WriteZeroes => "write_zeroes",
        }
    }

    fn of(op: &Op) -> (Self, u64) {
        match op {
            Op::Read { buffers, .. } => (Self::Read, buffers.len() as u64),
            Op::Write { buffers, .. } => (Self::Write, buffers.len() as u64),
            Op::Flush => (Self::Flush, 0),
            Op::Discard { length, .. } => (Self::Discard, *length),
            Op::WriteZeroes { length, .. } => (Self::WriteZeroes, *length),
        }
    }
}

const CLASSES: [(ErrorClass, &str); 3] = [
    (ErrorClass::Guest, "guest"),
    (ErrorClass::NoSpace, "no_space"),
    (ErrorClass::Host, "host"),
];

/// A counter with one writer: no instruction that locks the bus.
#[derive(Debug, Default)]
struct Counter(AtomicU64);

impl Counter {
    fn add(&self, more: u64) {
        let value = self.0.load(Ordering::Relaxed).wrapping_add(more);
        self.0.store(value, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What is counted of one kind of requests.
#[derive(Debug, Default)]
struct KindCounters {
    bytes: Counter,
    errors: [Counter; CLASSES.len()],
    latency_nanos: Counter,
    /// By the bucket that the latency falls in; the last is for longer ones.
    latencies: [Counter; LATENCIES.len() + 1],
}

/// What a kind of requests came to, since the disk was first opened with these statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KindTotals {
    /// Requests that are over, failed ones included.
    pub operations: u64,
    /// Bytes of those that succeeded.
    pub bytes: u64,
    /// Requests that failed: by the guest's fault, for lack of space, by the host's or the image's fault.
    pub errors: [u64; 3],
    /// Nanoseconds from the beginning of each request to its end, added up; waits for a limit do not count.
    pub latency_nanos: u64,
}

/// What is counted elsewhere, and about which file.
#[derive(Debug, Default)]
struct Sources {
    counts: Option<Arc<CacheCounts>>,
    /// Of disks that had these statistics before.
    earlier_hits: u64,
    earlier_misses: u64,
    /// The top image, opened as a path only: that keeps no lock alive.
    top: Option<OwnedFd>,
}

/// Counters of one disk. They go on when a disk is opened again with the same ones
/// ([`DiskOptions::statistics`](crate::DiskOptions::statistics)).
#[derive(Debug, Default)]
pub struct DiskStatistics {
    kinds: [KindCounters; RequestKind::ALL.len()],
    throttled: Counter,
    throttled_nanos: Counter,
    sources: Mutex<Sources>,
}

impl DiskStatistics {
    fn sources(&self) -> MutexGuard<'_, Sources> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on these are the statistics of a disk whose top image is `top`.
    pub(crate) fn attach(&self, counts: &Arc<CacheCounts>, top: BorrowedFd<'_>) {
        let path = format!("/proc/self/fd/{}", top.as_raw_fd());
        let is_file = rustix::fs::fstat(top)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
        let top = is_file
            .then(|| rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok());
        let mut sources = self.sources();
        let earlier = sources.counts.replace(Arc::clone(counts));
        if let Some(earlier) = earlier {
            sources.earlier_hits = sources.earlier_hits.wrapping_add(earlier.hits());
            sources.earlier_misses = sources.earlier_misses.wrapping_add(earlier.misses());
        }
        sources.top = top.flatten();
    }

    pub(crate) fn count(&self, op: &Op, nanos: u64, result: &Result<(), IoError>) {
        let (kind, bytes) = RequestKind::of(op);
        let Some(counters) = self.kinds.get(kind as usize) else {
            return;
        };
        match result {
            Ok(()) => counters.bytes.add(bytes),
            Err(error) => {
                let class = error.class();
                let of = CLASSES.iter().zip(&counters.errors);
                for (_, counter) in of.filter(|((of, _), _)| *of == class) {
                    counter.add(1);
                }
            }
        }
        counters.latency_nanos.add(nanos);
        let bucket = LATENCIES.partition_point(|end| *end < nanos);
        if let Some(bucket) = counters.latencies.get(bucket) {
            bucket.add(1);
        }
    }

    pub(crate) fn count_wait(&self, nanos: u64) {
        self.throttled.add(1);
        self.throttled_nanos.add(nanos);
    }

    /// What requests of a kind came to.
    #[must_use]
    pub fn totals(&self, kind: RequestKind) -> KindTotals {
        let Some(counters) = self.kinds.get(kind as usize) else {
            return KindTotals::default();
        };
        let mut errors = [0; CLASSES.len()];
        for (to, from) in errors.iter_mut().zip(&counters.errors) {
            *to = from.get();
        }
        KindTotals {
            operations: counters.latencies.iter().map(Counter::get).sum(),
            bytes: counters.bytes.get(),
            errors,
            latency_nanos: counters.latency_nanos.get(),
        }
    }

    /// Requests that had to wait for a limit and have begun, and the nanoseconds that they waited, added up.
    #[must_use]
    pub fn throttled(&self) -> (u64, u64) {
        (self.throttled.get(), self.throttled_nanos.get())
    }

    /// How often tables were found in memory, and how often they had to be read.
    #[must_use]
    pub fn cache_hits_and_misses(&self) -> (u64, u64) {
        let sources = self.sources();
        let now = sources.counts.as_ref();
        let (hits, misses) = now.map_or((0, 0), |counts| (counts.hits(), counts.misses()));
        (
            sources.earlier_hits.wrapping_add(hits),
            sources.earlier_misses.wrapping_add(misses),
        )
    }

    /// Bytes that the top image takes on the host; `None` for a block device, or where the disk was not opened with these statistics.
    #[must_use]
    pub fn allocated_bytes(&self) -> Option<u64> {
        const UNIT: u64 = 512;
        let sources = self.sources();
        let stat = rustix::fs::fstat(sources.top.as_ref()?).ok()?;
        u64::try_from(stat.st_blocks).ok()?.checked_mul(UNIT)
    }
}

/// Renders statistics of several disks, each with labels like `device="root"` (without braces, already escaped).
pub fn render_prometheus(text: &mut String, disks: &[(&str, &DiskStatistics)]) {
    let mut render = Render { text, disks };
    render.kinds(
        "operations_total",
        "counter",
        "Requests that are over.",
        |t| t.operations.to_string(),
    );
    render.kinds(
        "bytes_total",
        "counter",
        "Bytes of requests that succeeded.",
        |t| t.bytes.to_string(),
    );
    render.errors();
    render.latencies();
    render.plain(
        "throttled_total",
        "counter",
        "Requests that waited for a limit.",
        |d| Some(d.throttled().0.to_string()),
    );
    render.plain(
        "throttled_seconds_total",
        "counter",
        "Time that requests waited for a limit.",
        |d| Some(seconds(d.throttled().1)),
    );
    render.plain(
        "cache_hits_total",
        "counter",
        "Look-ups of a table that was in memory.",
        |d| Some(d.cache_hits_and_misses().0.to_string()),
    );
    render.plain(
        "cache_misses_total",
        "counter",
        "Look-ups of a table that had to be read.",
        |d| Some(d.cache_hits_and_misses().1.to_string()),
    );
    render.plain(
        "allocated_bytes",
        "gauge",
        "Bytes that the top image takes on the host.",
        |d| Some(d.allocated_bytes()?.to_string()),
    );
}

/// Nanoseconds as a decimal number of seconds.
fn seconds(nanos: u64) -> String {
    const NANOS: u64 = 1_000_000_000;
    let text = format!("{}.{:09}", nanos / NANOS, nanos % NANOS);
    let text = text.trim_end_matches('0');
    text.strip_suffix('.').unwrap_or(text).to_owned()
}

/// A text in the making. Writing to a string cannot fail.
struct Render<'a> {
    text: &'a mut String,
    disks: &'a [(&'a str, &'a DiskStatistics)],
}

impl Render<'_> {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(
            self.text,
            "# HELP drover_disk_{name} {help}\n# TYPE drover_disk_{name} {kind}"
        );
    }

    fn plain(
        &mut self,
        name: &str,
        kind: &str,
        help: &str,
        value: impl Fn(&DiskStatistics) -> Option<String>,
    ) {
        self.family(name, kind, help);
        for (labels, disk) in self.disks {
            if let Some(value) = value(disk) {
                let _ = writeln!(self.text, "drover_disk_{name}{{{labels}}} {value}");
            }
        }
    }

    fn kinds(&mut self, name: &str, kind: &str, help: &str, value: impl Fn(&KindTotals) -> String) {
        self.family(name, kind, help);
        for (labels, disk) in self.disks {
            for kind in RequestKind::ALL {
                let (of, value) = (kind.name(), value(&disk.totals(kind)));
                let _ = writeln!(
                    self.text,
                    "drover_disk_{name}{{{labels},kind=\"{of}\"}} {value}"
                );
            }
        }
    }

    fn errors(&mut self) {
        self.family(
            "errors_total",
            "counter",
            "Requests that failed, by whose fault.",
        );
        for (labels, disk) in self.disks {
            for kind in RequestKind::ALL {
                let of = kind.name();
                for ((_, class), value) in CLASSES.iter().zip(disk.totals(kind).errors) {
                    let _ = writeln!(
                        self.text,
                        "drover_disk_errors_total{{{labels},kind=\"{of}\",class=\"{class}\"}} {value}"
                    );
                }
            }
        }
    }

    fn latencies(&mut self) {
        self.family(
            "latency_seconds",
            "histogram",
            "Time from a request's beginning to its end.",
        );
        for (labels, disk) in self.disks {
            for (kind, counters) in RequestKind::ALL.iter().zip(&disk.kinds) {
                let of = format!("{labels},kind=\"{}\"", kind.name());
                let ends = LATENCIES.iter().map(|end| seconds(*end));
                let ends = ends.chain(std::iter::once("+Inf".to_owned()));
                let mut below = 0;
                for (end, counter) in ends.zip(&counters.latencies) {
                    below += counter.get();
                    let _ = writeln!(
                        self.text,
                        "drover_disk_latency_seconds_bucket{{{of},le=\"{end}\"}} {below}"
                    );
                }
                let sum = seconds(counters.latency_nanos.get());
                let _ = writeln!(
                    self.text,
                    "drover_disk_latency_seconds_sum{{{of}}} {sum}\ndrover_disk_latency_seconds_count{{{of}}} {below}"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffers::Buffers;

    fn sample(text: &str, name: &str) -> f64 {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {text}"))
            .parse()
            .unwrap()
    }

    #[test]
    fn latencies_fall_into_the_bucket_that_ends_at_or_after_them() {
        let statistics = DiskStatistics::default();
        let read = Op::Read {
            offset: 0,
            buffers: Buffers::from_vec(vec![0; 512]),
        };
        for nanos in [0, 10_000, 10_001, 3_000_000, 99_000_000_000] {
            statistics.count(&read, nanos, &Ok(()));
        }
        let mut text = String::new();
        render_prometheus(&mut text, &[("device=\"a\"", &statistics)]);
        let bucket = |end: &str| {
            let name = format!(
                "drover_disk_latency_seconds_bucket{{device=\"a\",kind=\"read\",le=\"{end}\"}}"
            );
            sample(&text, &name)
        };
        assert_eq!(bucket("0.00001"), 2.0);
        assert_eq!(bucket("0.00002"), 3.0);
        assert_eq!(bucket("0.002"), 3.0);
        assert_eq!(bucket("0.005"), 4.0);
        assert_eq!(bucket("10"), 4.0);
        assert_eq!(bucket("+Inf"), 5.0);
        let count = "drover_disk_latency_seconds_count{device=\"a\",kind=\"read\"}";
        assert_eq!(sample(&text, count), 5.0);
        let sum = sample(
            &text,
            "drover_disk_latency_seconds_sum{device=\"a\",kind=\"read\"}",
        );
        assert!((sum - 99.003_020_001).abs() < 1e-9, "{sum}");
    }

    #[test]
    fn failures_are_told_apart_and_move_no_bytes() {
        let statistics = DiskStatistics::default();
        let discard = Op::Discard {
            offset: 0,
            length: 4096,
        };
        statistics.count(&discard, 1, &Err(IoError::NoSpace));
        statistics.count(&discard, 1, &Err(IoError::ReadOnly));
        statistics.count(&discard, 1, &Err(IoError::Stopped("x")));
        statistics.count(&discard, 1, &Ok(()));
        let totals = statistics.totals(RequestKind::Discard);
        assert_eq!(totals.operations, 4);
        assert_eq!(totals.errors, [1, 1, 1]);
        assert_eq!(totals.bytes, 4096);
    }

    #[test]
    fn each_family_is_named_once_and_holds_all_disks() {
        let (one, two) = (DiskStatistics::default(), DiskStatistics::default());
        let mut text = String::new();
        render_prometheus(&mut text, &[("device=\"a\"", &one), ("device=\"b\"", &two)]);
        let mut seen = std::collections::BTreeSet::new();
        let mut family = "";
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                family = rest.split(' ').next().unwrap();
                assert!(seen.insert(family), "{family} comes twice");
            } else if !line.starts_with('#') {
                assert!(line.starts_with(family), "{line} is not of {family}");
                line.rsplit(' ').next().unwrap().parse::<f64>().unwrap();
            }
        }
        assert_eq!(text.matches("throttled_total{").count(), 2);
    }
}
