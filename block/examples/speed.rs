//! `speed FOLDER [PAIRS [CASE]]`: the engine in this process against `qemu-img bench`, alternating, on an overlay in FOLDER.
//!
//! Same image, cache mode and request pattern; per case the median of QEMU's time over ours, with its quartiles. Above 1 ours is
//! faster. Times drift on shared machines, ratios of neighbours less so.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drover_block::{
    Backing, Buffers, Cache, Disk, DiskSpec, Format, IoEngine, Layer, Op, RawSlice, Request,
};
use rustix::event::{PollFd, PollFlags};

type Failure = Box<dyn std::error::Error>;

const SIZE: u64 = 256 << 20;

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    write: bool,
    /// Onto a new overlay, so that every request allocates.
    fresh: bool,
    bytes: u64,
    step: u64,
    count: u64,
    depth: usize,
    /// Through so many layers, of which the lowest has everything.
    layers: usize,
}

const CASES: [Case; 7] = [
    Case {
        name: "4k read, depth 1",
        write: false,
        fresh: false,
        bytes: 4096,
        step: 69_632,
        count: 20_000,
        depth: 1,
        layers: 2,
    },
    Case {
        name: "4k read, depth 32",
        write: false,
        fresh: false,
        bytes: 4096,
        step: 69_632,
        count: 40_000,
        depth: 32,
        layers: 2,
    },
    Case {
        name: "4k overwrite, depth 32",
        write: true,
        fresh: false,
        bytes: 4096,
        step: 69_632,
        count: 20_000,
        depth: 32,
        layers: 2,
    },
    Case {
        name: "4k allocating write, depth 1",
        write: true,
        fresh: true,
        bytes: 4096,
        step: 65_536,
        count: 3_500,
        depth: 1,
        layers: 2,
    },
    Case {
        name: "4k allocating write, depth 32",
        write: true,
        fresh: true,
        bytes: 4096,
        step: 65_536,
        count: 3_500,
        depth: 32,
        layers: 2,
    },
    Case {
        name: "1M read, depth 4",
        write: false,
        fresh: false,
        bytes: 1 << 20,
        step: 1 << 20,
        count: 1000,
        depth: 4,
        layers: 2,
    },
    Case {
        name: "33 layers, 4k read, depth 32",
        write: false,
        fresh: false,
        bytes: 4096,
        step: 69_632,
        count: 20_000,
        depth: 32,
        layers: 33,
    },
];

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments
        .next()
        .ok_or("usage: speed FOLDER [PAIRS [CASE]]")?;
    let pairs: usize = arguments.next().map_or(Ok(10), |text| text.parse())?;
    let wanted = arguments.next().unwrap_or_default();
    let folder = Path::new(&folder);
    let (base, top) = (folder.join("base.qcow2"), folder.join("top.qcow2"));
    make(&base, None)?;
    qemu_io(&base)?;
    make(&top, Some(&base))?;
    qemu_io(&top)?;
    let mut deep = vec![base.clone()];
    for n in 1..33 {
        let path = folder.join(format!("deep-{n}.qcow2"));
        make(&path, deep.first().map(PathBuf::as_path))?;
        deep.insert(0, path);
    }
    let flat = [top.clone(), base.clone()];
    println!(
        "{:32} {:8} {:>6} {:>6} {:>6} {:>10} {:>9}",
        "case", "engine", "median", "q1", "q3", "ours/s", "CPU us"
    );
    for case in CASES.into_iter().filter(|case| case.name.contains(&wanted)) {
        let chain = if case.layers > 2 {
            deep.as_slice()
        } else {
            &flat
        };
        for engine in [IoEngine::Inline, IoEngine::IoUring, IoEngine::Threads] {
            let mut ratios = Vec::new();
            let (mut times, mut cpu) = (Vec::new(), Vec::new());
            for pair in 0..pairs {
                let mut ours = || -> Result<Duration, Failure> {
                    if case.fresh {
                        make(&top, Some(&base))?;
                    }
                    let before = cpu_time();
                    let time = run(chain, case, engine)?;
                    cpu.push((cpu_time() - before).as_secs_f64() / case.count as f64 * 1e6);
                    Ok(time)
                };
                let qemu = || -> Result<Duration, Failure> {
                    if case.fresh {
                        make(&top, Some(&base))?;
                    }
                    qemu_bench(chain.first().unwrap_or(&top), case)
                };
                let (a, b) = if pair % 2 == 0 {
                    let a = ours()?;
                    (a, qemu()?)
                } else {
                    let b = qemu()?;
                    (ours()?, b)
                };
                times.push(a.as_secs_f64());
                ratios.push(b.as_secs_f64() / a.as_secs_f64());
            }
            println!(
                "{:32} {:8} {:6.2} {:6.2} {:6.2} {:10.0} {:9.1}",
                case.name,
                format!("{engine:?}"),
                quantile(&mut ratios, 2),
                quantile(&mut ratios, 1),
                quantile(&mut ratios, 3),
                case.count as f64 / quantile(&mut times, 2),
                quantile(&mut cpu, 2),
            );
        }
        if case.fresh {
            qemu_io(&top)?;
        }
    }
    Ok(())
}

fn quantile(values: &mut [f64], quarter: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values
        .get((values.len() - 1) * quarter / 4)
        .copied()
        .unwrap_or(f64::NAN)
}

/// User and system time of this process.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split(' ')
        .collect();
    let ticks = |n: usize| {
        fields
            .get(n)
            .and_then(|text| text.parse::<u64>().ok())
            .unwrap_or(0)
    };
    Duration::from_millis((ticks(12) + ticks(13)) * 10)
}

fn make(path: &Path, base: Option<&Path>) -> Result<(), Failure> {
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2"]);
    if let Some(base) = base {
        command.args(["-F", "qcow2", "-b"]).arg(base);
    }
    let status = command.arg(path).arg(SIZE.to_string()).status()?;
    if status.success() {
        Ok(())
    } else {
        Err("qemu-img create failed".into())
    }
}

fn qemu_io(path: &Path) -> Result<(), Failure> {
    let write = format!("write -q -P 5 0 {SIZE}");
    let status = Command::new("qemu-io")
        .args(["-f", "qcow2", "-c", &write])
        .arg(path)
        .status()?;
    if status.success() {
        Ok(())
    } else {
        Err("qemu-io failed".into())
    }
}

fn qemu_bench(path: &Path, case: Case) -> Result<Duration, Failure> {
    let mut command = Command::new("qemu-img");
    command.args(["bench", "-f", "qcow2", "-t", "none", "-i", "io_uring"]);
    if case.write {
        command.arg("-w");
    }
    for (flag, value) in [
        ("-c", case.count),
        ("-d", case.depth as u64),
        ("-s", case.bytes),
        ("-S", case.step),
    ] {
        command.arg(flag).arg(value.to_string());
    }
    let output = command.arg(path).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let seconds = text
        .split("Run completed in ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next());
    let seconds =
        seconds.ok_or_else(|| format!("{text}{}", String::from_utf8_lossy(&output.stderr)))?;
    Ok(Duration::from_secs_f64(seconds.parse()?))
}

#[repr(C, align(4096))]
struct Memory([u8; 1 << 20]);

fn run(chain: &[PathBuf], case: Case, engine: IoEngine) -> Result<Duration, Failure> {
    let mut layers = chain.iter().map(|path| Layer {
        path: path.clone(),
        format: Format::Qcow2,
        cache: Cache::Direct,
    });
    let spec = DiskSpec {
        top: layers.next().ok_or("a chain has a top")?,
        backing: Backing::Explicit(layers.collect()),
        read_only: false,
        discard: true,
    };
    let mut disk = Disk::open_with(&spec, engine)?;
    let memory: *mut Memory = Box::leak(Box::new(Memory([7; 1 << 20])));
    let owner: Arc<()> = Arc::new(());
    let mut completions = Vec::new();
    let start = Instant::now();
    let (mut begun, mut over, mut offset) = (0, 0, 0);
    while over < case.count {
        while begun < case.count && ((begun - over) as usize) < case.depth {
            let slices = vec![RawSlice::new(memory.cast(), case.bytes as usize)];
            // SAFETY: the memory is leaked, so it is there for ever, and nobody borrows it.
            let buffers = unsafe { Buffers::from_raw(slices, owner.clone()) };
            let op = if case.write {
                Op::Write { offset, buffers }
            } else {
                Op::Read { offset, buffers }
            };
            disk.submit(Request { tag: begun, op });
            begun += 1;
            offset += case.step;
            if offset + case.bytes > SIZE {
                offset = 0;
            }
        }
        disk.poll(&mut completions);
        if completions.is_empty()
            && let Some(event) = disk.event()
        {
            rustix::event::poll(&mut [PollFd::new(&event, PollFlags::IN)], None)?;
        }
        for completion in completions.drain(..) {
            completion.result?;
            over += 1;
        }
    }
    let time = start.elapsed();
    disk.close()?;
    Ok(time)
}
