//! `block-torture IMAGE SEED [flatten|commit BASE]`: writes, discards and flushes at random until it is killed, beside a job if one is
//! named, and tells on its standard output what has been flushed; the test that kills it compares.
//!
//! The image is a qcow2 without a backing file, or over the qcow2 BASE; it is divided into slots of [`SLOT`] bytes. A write fills a slot with 8-byte copies of an
//! ever growing number, so that the reader of a slot knows which write it sees. After each flush one line says `flushed N`: every
//! slot holds what the writes up to number N left there, or something newer. When the job is over one line says `done`.
#![forbid(unsafe_code)]

use std::io::Write as _;
use std::path::PathBuf;

use drover_block::{
    Backing, Buffers, Cache, Disk, DiskOptions, DiskSpec, Format, IoEngine, Job, JobState, Layer,
    Op,
};

/// Bytes of a slot: smaller than a cluster, and not aligned to one.
const SLOT: u64 = 24 * 1024;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(path), Some(seed)) = (arguments.next(), arguments.next()) else {
        return Err("usage: block-torture IMAGE SEED [flatten|commit BASE]".into());
    };
    let mut random: u64 = seed
        .to_str()
        .and_then(|text| text.parse().ok())
        .ok_or("SEED is not a number")?;
    let job = match arguments.next() {
        None => None,
        Some(job) if job == "flatten" => Some(Job::Flatten),
        Some(job) if job == "commit" => Some(Job::Commit),
        Some(_) => return Err("the job is `flatten` or `commit`".into()),
    };
    let layer = |path| Layer {
        path: PathBuf::from(path),
        format: Format::Qcow2,
        cache: Cache::Direct,
    };
    let spec = DiskSpec {
        top: layer(path),
        backing: Backing::Explicit(arguments.next().map(layer).into_iter().collect()),
        read_only: false,
        discard: true,
    };
    let options = DiskOptions {
        // A job goes on beside the guest, so transfers do as well.
        engine: job.map_or(IoEngine::Inline, |_| IoEngine::asynchronous()),
        commit_below: job == Some(Job::Commit),
        ..DiskOptions::default()
    };
    let mut disk = Disk::open_with(&spec, options)?;
    let mut handle = job.map(|job| disk.begin(job)).transpose()?;
    let slots = disk.size_bytes() / SLOT;
    let mut output = std::io::stdout().lock();
    for number in 1u64.. {
        disk.poll(&mut Vec::new());
        if let Some(job) = handle.take_if(|job| job.state().is_over()) {
            if job.state() != JobState::Done {
                return Err(format!("{job:?}").into());
            }
            writeln!(output, "done")?;
        }
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let slot = (random >> 8) % slots;
        match random % 16 {
            0 => {
                // Told beforehand: from now on the slot may read as zero.
                writeln!(output, "discard {number} {slot}")?;
                disk.execute(&Op::Discard {
                    offset: slot * SLOT,
                    length: SLOT,
                })?;
            }
            1 => {
                disk.execute(&Op::Flush)?;
                writeln!(output, "flushed {number}")?;
            }
            _ => {
                writeln!(output, "write {number} {slot}")?;
                let bytes = number.to_be_bytes().repeat((SLOT / 8) as usize);
                disk.execute(&Op::Write {
                    offset: slot * SLOT,
                    buffers: Buffers::from_vec(bytes),
                })?;
            }
        }
        output.flush()?;
    }
    Ok(())
}
