//! Our side: the engine driven as a VMM drives it, by its event, in a process of its own, since QEMU's is one too: on a machine that is
//! shared, a process that has just begun is served better than one that has run for long.

use std::time::{Duration, Instant};

use drover_block::{
    Backing, Buffers, Cache, Disk, DiskSpec, Format, IoEngine, Layer, Op, Request, SharedBuffer,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::{ClockId, clock_gettime};

use super::images::Chain;
use super::{Load, Run};
use crate::failure::{Context as _, Failure, Result};
use crate::fixtures::command::succeed;

fn spec(chain: &Chain) -> DiskSpec {
    let mut layers = chain.layers.iter().map(|path| Layer {
        path: path.clone(),
        format: Format::Qcow2,
        cache: Cache::Direct,
    });
    let top = layers.next().unwrap_or_else(|| Layer {
        path: chain.top().to_owned(),
        format: Format::Qcow2,
        cache: Cache::Direct,
    });
    DiskSpec {
        top,
        backing: Backing::Explicit(layers.collect()),
        read_only: false,
        discard: true,
    }
}

/// CPU time of this process, all threads, those that are gone too.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// How long it takes to open a chain.
pub(super) fn open(chain: &Chain, engine: IoEngine) -> Result<Duration> {
    let spec = spec(chain);
    let started = Instant::now();
    let disk = Disk::open_with(&spec, engine).context("open the chain")?;
    let time = started.elapsed();
    disk.close().context("close the chain")?;
    Ok(time)
}

/// Runs a load on a chain, in this program started anew.
pub(super) fn run(chain: &Chain, load: Load, engine: IoEngine) -> Result<Run> {
    let threads = engine == IoEngine::Threads;
    let task = serde_json::to_string(&(chain, load, threads))?;
    let program = std::env::current_exe().context("this program")?;
    let answer = succeed(program, &["block-load", &task])?;
    Ok(serde_json::from_str(&answer)?)
}

/// What the program does that [`run`] starts: the load of a task, and prints how it went.
///
/// # Errors
///
/// The task is none, or a request fails.
pub fn run_here(task: &str) -> Result {
    let (chain, load, threads): (Chain, Load, bool) = serde_json::from_str(task)?;
    let engine = if threads {
        IoEngine::Threads
    } else {
        IoEngine::IoUring
    };
    println!(
        "{}",
        serde_json::to_string(&measured(&chain, load, engine)?)?
    );
    Ok(())
}

fn measured(chain: &Chain, load: Load, engine: IoEngine) -> Result<Run> {
    let mut disk = Disk::open_with(&spec(chain), engine).context("open the chain")?;
    let length = usize::try_from(load.bytes).unwrap_or(usize::MAX);
    let memory: Vec<Buffers> = (0..load.depth)
        .map(|_| SharedBuffer::aligned(length, 7).buffers())
        .collect();
    let (cpu, started) = (cpu_time(), Instant::now());
    drive(&mut disk, load, chain.size, &memory)?;
    let run = Run {
        time: started.elapsed(),
        cpu: cpu_time().saturating_sub(cpu),
    };
    disk.close().context("close the chain")?;
    Ok(run)
}

/// Keeps `depth` requests under way until all are over. Slot `n` of the memory belongs to the request with tag `n`.
fn drive(disk: &mut Disk, load: Load, size: u64, memory: &[Buffers]) -> Result {
    let mut idle: Vec<u64> = (0..load.depth).collect();
    let mut completions = Vec::new();
    let (mut begun, mut over, mut offset) = (0, 0, 0);
    while over < load.count {
        let round = match load.flush_every {
            0 => load.count,
            every => load.count.min((over / every + 1) * every),
        };
        while begun < round
            && let Some(tag) = idle.pop()
        {
            let buffers = memory
                .get(usize::try_from(tag).unwrap_or(usize::MAX))
                .map(Buffers::share)
                .ok_or_else(|| Failure::Broken(format!("no memory for tag {tag}")))?;
            let op = if load.write {
                Op::Write { offset, buffers }
            } else {
                Op::Read { offset, buffers }
            };
            disk.submit(Request { tag, op });
            begun += 1;
            // As `qemu-img bench` goes round.
            offset = (offset + load.step) % (size - load.step);
        }
        disk.poll(&mut completions);
        if completions.is_empty()
            && let Some(event) = disk.event()
        {
            poll(&mut [PollFd::new(&event, PollFlags::IN)], None)
                .context("wait for the disk's event")?;
        }
        for completion in completions.drain(..) {
            completion.result.context("a request")?;
            idle.push(completion.tag);
            over += 1;
        }
        if load.flush_every > 0 && over == round && over < load.count {
            disk.execute(&Op::Flush).context("a flush")?;
        }
    }
    Ok(())
}
