//! `bench block`: the image engine against `qemu-img bench`, and behind vhost-user against QEMU's storage daemon,
//! on the same images, in one run.
//!
//! ```text
//! row   = case x place (tmpfs, disk) x engine (ring, threads) x depth (1, 32)
//! pair  = ours, QEMU   or   QEMU, ours      (they take turns in going first)
//! ratio = QEMU's time / ours, the median over the pairs; above 1 ours is faster
//! ```
//!
//! Both sides open the chain without the host's page cache, keep the tables of the whole image, write or read the same bytes at
//! the same offsets, and count from the first request to the end of the last. QEMU moves its bytes by io_uring beside our ring
//! and by its threads beside ours. Times are reported and fail nothing: what may not get worse is counted in block's own tests.

mod images;
mod ours;
mod qemu;
mod served;

use std::path::{Path, PathBuf};
use std::time::Duration;

use drover_block::IoEngine;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::bench::statistics::{Ratio, median, ratio_of_pairs, rounded};
use crate::failure::{Context as _, Result};
use images::{Chain, Shape};
pub use ours::run_here;

/// Size of the disks.
const SIZE: u64 = 256 << 20;
/// The longest that an image of 2 TiB may take to open.
const OPEN_MS: f64 = 2.0;
/// The most CPU time of a request at depth 1 whose mapping is known.
const CPU_US: f64 = 3.0;

/// What to run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Fewer pairs of shorter runs, for a first look.
    pub quick: bool,
    /// Pairs of each row; 10, or 3 if quick.
    pub pairs: Option<usize>,
    /// Only rows whose label contains one of these; all if there are none.
    pub wanted: Vec<String>,
}

impl Options {
    fn pairs(&self) -> usize {
        self.pairs.unwrap_or(if self.quick { 3 } else { 10 })
    }

    fn wants(&self, label: &str) -> bool {
        self.wanted.is_empty() || self.wanted.iter().any(|part| label.contains(part.as_str()))
    }
}

/// The requests of a run.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Load {
    write: bool,
    bytes: u64,
    /// From the beginning of one request to that of the next.
    step: u64,
    count: u64,
    depth: u64,
    /// Requests after which everything is made durable; 0 for never.
    flush_every: u64,
}

/// A load on an image, and what is hoped for.
struct Case {
    name: &'static str,
    shape: Shape,
    write: bool,
    bytes: u64,
    step: u64,
    flush_every: u64,
    /// Requests at depth 1 and at depth 32.
    counts: [u64; 2],
    /// The least ratio wanted: at depth 1 on tmpfs, at depth 1 on disk, at depth 32.
    goals: [Option<f64>; 3],
    /// Whether every mapping is in the cache, so that the CPU time of a request has a limit.
    mapped: bool,
}

/// A step that comes by every cluster and every place in it.
const STRIDE: u64 = 65_536 + 4096;

const CASES: [Case; 7] = [
    Case {
        name: "overlay 4k read",
        shape: Shape::HalfInTop,
        write: false,
        bytes: 4096,
        step: STRIDE,
        flush_every: 0,
        counts: [20_000, 60_000],
        goals: [Some(3.0), Some(1.1), Some(1.2)],
        mapped: true,
    },
    Case {
        name: "overwrite 4k",
        shape: Shape::AllInTop,
        write: true,
        bytes: 4096,
        step: STRIDE,
        flush_every: 0,
        counts: [20_000, 40_000],
        goals: [None, None, None],
        mapped: true,
    },
    Case {
        name: "allocating write 4k",
        shape: Shape::Fresh,
        write: true,
        bytes: 4096,
        step: 65_536,
        flush_every: 0,
        counts: [3_500, 3_500],
        goals: [Some(1.2), Some(1.2), Some(1.2)],
        mapped: false,
    },
    Case {
        name: "allocating write 4k, flush every 64",
        shape: Shape::Fresh,
        write: true,
        bytes: 4096,
        step: 65_536,
        flush_every: 64,
        counts: [3_500, 3_500],
        goals: [None, None, None],
        mapped: false,
    },
    Case {
        name: "33-layer read 4k",
        shape: Shape::Deep,
        write: false,
        bytes: 4096,
        step: STRIDE,
        flush_every: 0,
        counts: [10_000, 20_000],
        goals: [None, None, Some(3.0)],
        mapped: false,
    },
    Case {
        name: "sequential read 1M",
        shape: Shape::AllInTop,
        write: false,
        bytes: 1 << 20,
        step: 1 << 20,
        flush_every: 0,
        counts: [1_000, 1_500],
        goals: [Some(1.0), Some(1.0), Some(1.0)],
        mapped: false,
    },
    Case {
        name: "sequential write 1M",
        shape: Shape::AllInTop,
        write: true,
        bytes: 1 << 20,
        step: 1 << 20,
        flush_every: 0,
        counts: [500, 500],
        goals: [Some(1.0), Some(1.0), Some(1.0)],
        mapped: false,
    },
];

/// Where the images are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Tmpfs,
    Disk,
}

impl Place {
    const ALL: [Self; 2] = [Self::Tmpfs, Self::Disk];

    fn name(self) -> &'static str {
        match self {
            Self::Tmpfs => "tmpfs",
            Self::Disk => "disk",
        }
    }
}

/// One run of a side.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Run {
    time: Duration,
    /// CPU time, user and system, of everything the run did.
    cpu: Duration,
}

/// One line of the report.
struct Row {
    case: String,
    place: &'static str,
    engine: &'static str,
    depth: u64,
    ratio: Ratio,
    goal: Option<f64>,
    more: Value,
}

impl Row {
    /// A row without a goal, from the runs of both sides.
    fn of_runs(
        case: &str,
        place: Place,
        engine: &'static str,
        depth: u64,
        requests: f64,
        (ours, theirs): (&[Run], &[Run]),
        mut more: Value,
    ) -> Self {
        let times =
            |runs: &[Run]| -> Vec<f64> { runs.iter().map(|run| run.time.as_secs_f64()).collect() };
        let cpu = |runs: &[Run]| {
            let each: Vec<f64> = runs
                .iter()
                .map(|run| run.cpu.as_secs_f64() * 1e6 / requests)
                .collect();
            rounded(median(&each))
        };
        let (our_times, their_times) = (times(ours), times(theirs));
        let rates = [&our_times, &their_times].map(|times| (requests / median(times)).round());
        more["ours_per_second"] = json!(rates[0]);
        more["qemu_per_second"] = json!(rates[1]);
        more["rates"] = json!(format!("{}/{}", rates[0], rates[1]));
        more["cpu_us"] = json!(cpu(ours));
        more["qemu_cpu_us"] = json!(cpu(theirs));
        Self {
            case: case.to_owned(),
            place: place.name(),
            engine,
            depth,
            ratio: ratio_of_pairs(&their_times, &our_times),
            goal: None,
            more,
        }
    }

    fn json(&self) -> Value {
        let mut row = json!({
            "case": self.case,
            "place": self.place,
            "engine": self.engine,
            "depth": self.depth,
            "ratio": rounded(self.ratio.value),
            "low": rounded(self.ratio.low),
            "high": rounded(self.ratio.high),
        });
        if let Some(goal) = self.goal {
            row["goal"] = json!(goal);
            row["reached"] = json!(self.ratio.value >= goal);
        }
        for (key, value) in self.more.as_object().into_iter().flatten() {
            row[key] = value.clone();
        }
        row
    }

    fn print(&self) {
        let verdict = match self.goal {
            None => String::new(),
            Some(goal) if self.ratio.low >= goal => format!("goal {goal}: reached"),
            Some(goal) if self.ratio.value >= goal => {
                format!("goal {goal}: reached, within its interval")
            }
            Some(goal) if self.ratio.high >= goal => {
                format!("goal {goal}: missed, within its interval")
            }
            Some(goal) => format!("goal {goal}: MISSED"),
        };
        let number = |key: &str| self.more[key].as_f64();
        let cpu = match (number("cpu_us"), number("qemu_cpu_us")) {
            (Some(ours), Some(theirs)) => format!("{ours:.1}/{theirs:.1} us"),
            _ => String::new(),
        };
        println!(
            "{:36} {:5} {:7} {:>5} {:6.2} ({:.2}-{:.2}) {:>17} {:>16} {verdict}",
            self.case,
            self.place,
            self.engine,
            self.depth,
            self.ratio.value,
            self.ratio.low,
            self.ratio.high,
            self.more["rates"].as_str().unwrap_or_default(),
            cpu,
        );
    }
}

/// Runs the benchmark in `folder` (a disk) and in `/dev/shm`; returns the rows as JSON. `drover` is the program of that name.
///
/// # Errors
///
/// QEMU's tools are missing, an image cannot be made, or a request fails.
pub fn run(folder: &Path, drover: &Path, options: &Options) -> Result<Value> {
    println!(
        "{:36} {:5} {:7} {:>5} {:^20} {:>17} {:>16}",
        "case", "place", "engine", "depth", "QEMU/ours", "requests/s", "CPU a request"
    );
    let mut rows = Vec::new();
    for place in Place::ALL {
        let room = Room::new(place, folder)?;
        rows.extend(in_place(place, &room.0, options)?);
        rows.extend(served::in_place(place, &room.0, drover, options)?);
    }
    Ok(Value::Array(rows.iter().map(Row::json).collect()))
}

/// A folder for images that goes with them.
struct Room(PathBuf);

impl Room {
    fn new(place: Place, folder: &Path) -> Result<Self> {
        let path = match place {
            Place::Tmpfs => PathBuf::from(format!("/dev/shm/drover-bench-{}", std::process::id())),
            Place::Disk => folder.join("block"),
        };
        std::fs::create_dir_all(&path).context(&path.display().to_string())?;
        Ok(Self(path))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // It holds nothing but images made here; what cannot be removed is seen by whoever looks.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn in_place(place: Place, room: &Path, options: &Options) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for case in &CASES {
        let mut chain = None;
        for (depth, count) in [1, 32].into_iter().zip(case.counts) {
            for engine in [IoEngine::IoUring, IoEngine::Threads] {
                if !options.wants(&label(case.name, place, engine, depth)) {
                    continue;
                }
                let chain = match &mut chain {
                    Some(chain) => chain,
                    none => none.insert(Chain::make(room, case.shape)?),
                };
                let load = Load {
                    write: case.write,
                    bytes: case.bytes,
                    step: case.step,
                    count: if options.quick { count / 4 } else { count },
                    depth,
                    flush_every: case.flush_every,
                };
                let row = measure(case, chain, place, engine, load, options.pairs())?;
                row.print();
                rows.push(row);
            }
        }
    }
    for engine in [IoEngine::IoUring, IoEngine::Threads] {
        if options.wants(&label(OPEN, place, engine, 1)) {
            let row = opening(room, place, engine, options.pairs())?;
            row.print();
            rows.push(row);
        }
    }
    Ok(rows)
}

fn engine_name(engine: IoEngine) -> &'static str {
    match engine {
        IoEngine::Inline => "inline",
        IoEngine::IoUring => "ring",
        IoEngine::Threads => "threads",
    }
}

fn label(case: &str, place: Place, engine: IoEngine, depth: u64) -> String {
    format!(
        "{case}, {}, {}, depth {depth}",
        place.name(),
        engine_name(engine)
    )
}

fn measure(
    case: &Case,
    chain: &Chain,
    place: Place,
    engine: IoEngine,
    load: Load,
    pairs: usize,
) -> Result<Row> {
    let ours = || -> Result<Run> {
        chain.renew()?;
        ours::run(chain, load, engine)
    };
    let theirs = || -> Result<Run> {
        chain.renew()?;
        qemu::run(chain, load, engine)
    };
    // What it takes QEMU to start and open the chain is none of its requests' CPU time.
    let start = qemu::run(chain, Load { count: 1, ..load }, engine)?.cpu;
    let (ours_runs, mut their_runs) = pairs_of(pairs, ours, theirs)?;
    for run in &mut their_runs {
        run.cpu = run.cpu.saturating_sub(start);
    }
    let mut row = Row::of_runs(
        case.name,
        place,
        engine_name(engine),
        load.depth,
        count(load.count),
        (&ours_runs, &their_runs),
        json!({"pairs": pairs}),
    );
    row.goal = case.goals[match (load.depth, place) {
        (1, Place::Tmpfs) => 0,
        (1, Place::Disk) => 1,
        _ => 2,
    }];
    if case.mapped && load.depth == 1 && !load.write {
        row.more["cpu_us_goal"] = json!(CPU_US);
        row.more["cpu_us_reached"] = json!(row.more["cpu_us"].as_f64() <= Some(CPU_US));
    }
    Ok(row)
}

/// What both sides gave, pair by pair; they take turns in going first.
fn pairs_of<T>(
    pairs: usize,
    mut ours: impl FnMut() -> Result<T>,
    mut theirs: impl FnMut() -> Result<T>,
) -> Result<(Vec<T>, Vec<T>)> {
    let (mut our_runs, mut their_runs) = (Vec::new(), Vec::new());
    for pair in 0..pairs {
        if pair % 2 == 0 {
            our_runs.push(ours()?);
            their_runs.push(theirs()?);
        } else {
            their_runs.push(theirs()?);
            our_runs.push(ours()?);
        }
    }
    Ok((our_runs, their_runs))
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a count of requests is far below 2^52"
)]
fn count(requests: u64) -> f64 {
    requests as f64
}

const OPEN: &str = "open 2 TiB";

/// Opening a big image with some of its tables in use, against QEMU's `blockdev-add` in a process that runs already.
fn opening(room: &Path, place: Place, engine: IoEngine, pairs: usize) -> Result<Row> {
    let chain = Chain::make(room, Shape::Huge)?;
    let mut daemon = qemu::Daemon::start()?;
    // An opening takes so little that more of them cost nothing; the first brings the image into the cache.
    let pairs = pairs * 5;
    let (ours_times, their_times) = pairs_of(
        pairs + 1,
        || ours::open(&chain, engine),
        || daemon.open(&chain, engine),
    )?;
    let seconds = |times: &[Duration]| -> Vec<f64> {
        times.iter().skip(1).map(Duration::as_secs_f64).collect()
    };
    let (ours_times, their_times) = (seconds(&ours_times), seconds(&their_times));
    let ms = median(&ours_times) * 1e3;
    let qemu_ms = median(&their_times) * 1e3;
    Ok(Row {
        case: OPEN.to_owned(),
        place: place.name(),
        engine: engine_name(engine),
        depth: 1,
        ratio: ratio_of_pairs(&their_times, &ours_times),
        goal: None,
        more: json!({
            "ours_ms": rounded(ms),
            "qemu_ms": rounded(qemu_ms),
            "ours_ms_goal": OPEN_MS,
            "ours_ms_reached": ms < OPEN_MS,
            "rates": format!("{ms:.2}/{qemu_ms:.2} ms"),
            "pairs": pairs,
        }),
    })
}
