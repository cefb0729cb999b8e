//! `drover image bench`: how fast an image is.

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use drover_api::definition::ByteSize;
use drover_block::image::{self, BenchOptions, BenchReport, Pattern};
use drover_block::{Backing, Cache, IoEngine};

use super::image_chain::{Chain, Watch, failure};
use crate::args::{OutputMode, size};
use crate::failure::Failure;
use crate::output;

/// A disk and what to do with it.
#[derive(Debug, Args)]
pub(crate) struct Bench {
    #[command(flatten)]
    pub(crate) chain: Chain,
    /// Write instead of reading; this destroys what is on the disk.
    #[arg(long)]
    pub(crate) write: bool,
    /// The byte to write.
    #[arg(long, value_name = "BYTE", default_value_t = 0, requires = "write")]
    pub(crate) pattern: u8,
    /// Requests in all.
    #[arg(long, value_name = "N", default_value_t = 75_000)]
    pub(crate) count: u64,
    /// Requests at a time, at most 1024.
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub(crate) depth: usize,
    /// Bytes of a request.
    #[arg(long, value_parser = size, value_name = "SIZE", default_value = "4KiB")]
    pub(crate) size: ByteSize,
    /// Where to begin.
    #[arg(long, value_parser = size, value_name = "SIZE", default_value = "0")]
    pub(crate) offset: ByteSize,
    /// How far one request lies from the next [default: the size of one].
    #[arg(long, value_parser = size, value_name = "SIZE", conflicts_with = "random")]
    pub(crate) step: Option<ByteSize>,
    /// Anywhere on the disk instead of one after the other.
    #[arg(long)]
    pub(crate) random: bool,
    /// Flush after so many writes.
    #[arg(long, value_name = "N", requires = "write")]
    pub(crate) flush_interval: Option<u64>,
    /// What moves the bytes [default: io_uring where the host allows it, else threads].
    #[arg(long, value_enum)]
    pub(crate) io: Option<Mover>,
    /// How the image is cached; what lies below it always goes through the page cache.
    #[arg(long, value_enum, default_value_t = Caching::Direct)]
    pub(crate) cache: Caching,
}

/// What moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mover {
    /// An io_uring.
    Uring,
    /// A pool of threads.
    Threads,
    /// System calls one after another; the depth is 1 then.
    Inline,
}

/// How an image is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Caching {
    /// Past the host's page cache.
    Direct,
    /// Through the host's page cache.
    Buffered,
}

pub(crate) fn bench(args: &Bench, mode: OutputMode) -> Result<ExitCode, Failure> {
    let mut spec = args.chain.spec()?;
    spec.top.cache = match args.cache {
        Caching::Direct => Cache::Direct,
        Caching::Buffered => Cache::Buffered,
    };
    if let Backing::FromHeader { cache } = &mut spec.backing {
        *cache = Cache::Buffered;
    }
    let engine = match args.io {
        None => IoEngine::asynchronous(),
        Some(Mover::Uring) => IoEngine::IoUring,
        Some(Mover::Threads) => IoEngine::Threads,
        Some(Mover::Inline) => IoEngine::Inline,
    };
    let options = BenchOptions {
        write: args.write.then_some(args.pattern),
        count: args.count,
        depth: args.depth,
        size: args.size.0,
        offset: args.offset.0,
        pattern: match args.random {
            // Any number will do; the same one makes runs comparable.
            true => Pattern::Random(0x5eed),
            false => Pattern::Step(args.step.map_or(args.size.0, |step| step.0)),
        },
        flush_interval: args.flush_interval,
    };
    // A bar would cost what is measured.
    let mut watch = Watch::new(OutputMode::Json, None);
    let report = image::bench(&spec, engine, &options, &mut watch).map_err(failure)?;
    output::print(mode, &report, |report: &BenchReport| {
        output::fields(&[
            ("requests", report.requests.to_string()),
            ("flushes", report.flushes.to_string()),
            ("took", format!("{:.3} s", report.seconds)),
            ("requests/s", format!("{:.0}", report.requests_per_second)),
            (
                "throughput",
                format!("{}/s", output::bytes(report.bytes_per_second as u64)),
            ),
            ("median", format!("{:.1} µs", report.median_us)),
            ("99 of 100", format!("{:.1} µs", report.p99_us)),
            ("longest", format!("{:.1} µs", report.longest_us)),
        ])
    })?;
    Ok(ExitCode::SUCCESS)
}
