//! How fast a disk is: so many requests of one kind, so many at a time, and what each took.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use serde::Serialize;

use super::job::Monitor;
use crate::error::{Error, ErrorKind};
use crate::{Disk, DiskOptions, DiskSpec, Op, Request, SharedBuffer};

/// In which order a bench goes over the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// One request so many bytes after the other, from the start again at the end.
    Step(u64),
    /// Anywhere, in an order that this number chooses.
    Random(u64),
}

/// What a bench does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BenchOptions {
    /// Write, and with what; else read.
    pub write: Option<u8>,
    /// Requests in all.
    pub count: u64,
    /// Requests under way at a time, 1 to 1024.
    pub depth: usize,
    /// Bytes of a request, 512 bytes to 16 MiB, a multiple of 512.
    pub size: u64,
    /// The first byte.
    pub offset: u64,
    /// In which order.
    pub pattern: Pattern,
    /// A flush after so many writes.
    pub flush_interval: Option<u64>,
}

/// What a bench measured. Times of a request are from its start to its end, with the time it waited for others.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BenchReport {
    /// Requests, without flushes.
    pub requests: u64,
    /// Flushes.
    pub flushes: u64,
    /// How long all took together.
    pub seconds: f64,
    /// Requests a second.
    pub requests_per_second: f64,
    /// Bytes a second.
    pub bytes_per_second: f64,
    /// Half of the requests took no longer, in microseconds.
    pub median_us: f64,
    /// 99 of 100 took no longer, in microseconds.
    pub p99_us: f64,
    /// The longest, in microseconds.
    pub longest_us: f64,
}

/// Tags above those of slots belong to flushes.
const FLUSH: u64 = 1 << 32;
/// How many times of requests are kept; of more, every so many.
const TIMES: u64 = 1 << 20;

/// Measures a disk. Writes destroy what is on it.
///
/// # Errors
/// The disk cannot be opened, an option is out of range, a request failed, or the monitor stopped it.
pub fn bench(
    spec: &DiskSpec,
    disk_options: impl Into<DiskOptions>,
    options: &BenchOptions,
    monitor: &mut dyn Monitor,
) -> Result<BenchReport, Error> {
    let path = &spec.top.path;
    let spec = DiskSpec {
        read_only: options.write.is_none(),
        ..spec.clone()
    };
    let mut disk = Disk::open_with(&spec, disk_options)?;
    let range = disk.size_bytes().saturating_sub(options.offset);
    let bad = |reason: String| Err(Error::new(path, ErrorKind::Size(reason)));
    if !(512..=16 << 20).contains(&options.size) || !options.size.is_multiple_of(512) {
        return bad(format!(
            "requests of {} bytes: a multiple of 512 up to 16 MiB is needed",
            options.size
        ));
    }
    if !(1..=1024).contains(&options.depth) || options.count == 0 {
        return bad("1 to 1024 requests at a time, and at least one in all, are needed".into());
    }
    if range < options.size || !options.offset.is_multiple_of(512) {
        return bad(format!(
            "a request of {} bytes at {} does not fit the disk",
            options.size, options.offset
        ));
    }
    let value = options.write.unwrap_or(0);
    let buffers: Vec<SharedBuffer> = (0..options.depth)
        .map(|_| SharedBuffer::from_vec(vec![value; options.size as usize]))
        .collect();
    let mut run = Run {
        disk: &mut disk,
        options,
        range,
        buffers,
        begun: vec![Instant::now(); options.depth],
        free: (0..options.depth).collect(),
        started: 0,
        flushes: 0,
        place: match options.pattern {
            Pattern::Step(_) => 0,
            Pattern::Random(seed) => seed | 1,
        },
        times: Vec::new(),
    };
    let start = Instant::now();
    run.all(monitor).map_err(|kind| Error::new(path, kind))?;
    let seconds = start.elapsed().as_secs_f64();
    let (mut times, flushes) = (run.times, run.flushes);
    times.sort_unstable();
    let time = |share: f64| {
        let at = ((times.len() - 1) as f64 * share) as usize;
        times.get(at).map_or(0.0, |time| time.as_secs_f64() * 1e6)
    };
    let report = BenchReport {
        requests: options.count,
        flushes,
        seconds,
        requests_per_second: options.count as f64 / seconds,
        bytes_per_second: (options.count * options.size) as f64 / seconds,
        median_us: time(0.5),
        p99_us: time(0.99),
        longest_us: time(1.0),
    };
    disk.close()?;
    Ok(report)
}

struct Run<'a> {
    disk: &'a mut Disk,
    options: &'a BenchOptions,
    /// Bytes of the disk that requests may touch.
    range: u64,
    buffers: Vec<SharedBuffer>,
    begun: Vec<Instant>,
    /// Slots without a request.
    free: Vec<usize>,
    started: u64,
    flushes: u64,
    /// The next offset, or the state of the random numbers.
    place: u64,
    times: Vec<Duration>,
}

impl Run<'_> {
    fn all(&mut self, monitor: &mut dyn Monitor) -> Result<(), ErrorKind> {
        let count = self.options.count;
        let mut done = 0;
        let mut completions = Vec::new();
        while done < count || self.disk.in_flight() > 0 {
            while self.started < count
                && let Some(slot) = self.free.pop()
            {
                self.start(slot);
            }
            self.disk.poll(&mut completions);
            if completions.is_empty() {
                self.wait()?;
            }
            for completion in completions.drain(..) {
                completion.result?;
                if completion.tag == FLUSH {
                    continue;
                }
                let slot = completion.tag as usize;
                if done.is_multiple_of(count / TIMES + 1) || done + 1 == count {
                    self.times.push(self.begun[slot].elapsed());
                }
                done += 1;
                self.free.push(slot);
            }
            if monitor.progress(done, count).is_break() {
                return Err(ErrorKind::Cancelled);
            }
        }
        Ok(())
    }

    fn start(&mut self, slot: usize) {
        let offset = self.next_offset();
        let buffers = self.buffers[slot].buffers();
        let op = match self.options.write {
            Some(_) => Op::Write { offset, buffers },
            None => Op::Read { offset, buffers },
        };
        self.begun[slot] = Instant::now();
        self.disk.submit(Request {
            tag: slot as u64,
            op,
        });
        self.started += 1;
        let due = |every: u64| every > 0 && self.started.is_multiple_of(every);
        if self.options.write.is_some() && self.options.flush_interval.is_some_and(due) {
            self.flushes += 1;
            self.disk.submit(Request {
                tag: FLUSH,
                op: Op::Flush,
            });
        }
    }

    fn next_offset(&mut self) -> u64 {
        let size = self.options.size;
        let at = match self.options.pattern {
            Pattern::Step(step) => {
                let at = self.place;
                self.place += step;
                if self.place + size > self.range {
                    self.place = 0;
                }
                at
            }
            Pattern::Random(_) => {
                // xorshift64*: any spread will do.
                self.place ^= self.place >> 12;
                self.place ^= self.place << 25;
                self.place ^= self.place >> 27;
                let places = self.range / size;
                (self.place.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % places * size
            }
        };
        self.options.offset + at
    }

    /// Sleeps until the disk has something to say.
    fn wait(&self) -> Result<(), ErrorKind> {
        let Some(event) = self.disk.event() else {
            return Ok(());
        };
        let mut poll = [PollFd::new(&event, PollFlags::IN)];
        let patience = Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        match rustix::event::poll(&mut poll, Some(&patience)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(ErrorKind::Io {
                doing: "wait for",
                source: errno.into(),
            }),
        }
    }
}
