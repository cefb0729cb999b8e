//! The helper inside small guests: writes, reads and transfers known data. Linked statically, so that the guest
//! needs no libraries.
//!
//! ```text
//! lab-guest write PATH BYTES SEED     the stream of SEED to a file or a disk, flushed; prints its checksum
//! lab-guest sum PATH BYTES            the checksum of what is there
//! lab-guest send ADDRESS BYTES SEED   the stream over TCP
//! lab-guest receive PORT BYTES        the checksum of what comes over TCP
//! lab-guest journal PATH              numbers, each flushed and only then printed, without end
//! ```

#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom, Write};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;

use drover_tests::pattern::{Checksum, Pattern};

const PIECE: usize = 1 << 18;
/// One record of the journal: the number, repeated over a block.
const RECORD: usize = 4096;

fn write_stream(mut output: impl Write, bytes: u64, seed: u64) -> io::Result<String> {
    let mut pattern = Pattern::new(seed);
    let mut checksum = Checksum::default();
    let mut buffer = vec![0_u8; PIECE];
    let mut left = bytes;
    while left > 0 {
        let count = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
        pattern.fill(&mut buffer[..count]);
        checksum.update(&buffer[..count]);
        output.write_all(&buffer[..count])?;
        left = left.saturating_sub(count as u64);
    }
    output.flush()?;
    Ok(checksum.finish())
}

fn sum_stream(input: impl Read, bytes: u64) -> io::Result<String> {
    let mut checksum = Checksum::default();
    let mut buffer = vec![0_u8; PIECE];
    let mut input = input.take(bytes);
    loop {
        let count = input.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        checksum.update(&buffer[..count]);
    }
    if input.limit() > 0 {
        return Err(io::Error::other(format!(
            "{} bytes are missing at the end",
            input.limit()
        )));
    }
    Ok(checksum.finish())
}

fn journal(path: &str) -> io::Result<String> {
    let mut file = File::options().write(true).open(path)?;
    for number in 1_u64.. {
        let record: Vec<u8> = number
            .to_le_bytes()
            .iter()
            .copied()
            .cycle()
            .take(RECORD)
            .collect();
        // Records wander over the disk, so that each also needs new metadata of the image.
        let slot = number.wrapping_mul(17) % 4096;
        file.seek(SeekFrom::Start(slot * 65536))?;
        file.write_all(&record)?;
        file.sync_data()?;
        println!("FLUSHED {number} {slot}");
    }
    Ok(String::new())
}

fn number(text: &str) -> io::Result<u64> {
    text.parse()
        .map_err(|error| io::Error::other(format!("{text}: {error}")))
}

fn run(arguments: &[&str]) -> io::Result<String> {
    match *arguments {
        ["write", path, bytes, seed] => {
            let file = File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .open(path)?;
            let sum = write_stream(&file, number(bytes)?, number(seed)?)?;
            file.sync_all()?;
            Ok(sum)
        }
        ["sum", path, bytes] => sum_stream(File::open(path)?, number(bytes)?),
        ["send", address, bytes, seed] => {
            write_stream(TcpStream::connect(address)?, number(bytes)?, number(seed)?)
        }
        ["receive", port, bytes] => {
            let listener = TcpListener::bind(format!("0.0.0.0:{port}"))?;
            println!("LISTENING");
            sum_stream(listener.accept()?.0, number(bytes)?)
        }
        ["journal", path] => journal(path),
        _ => Err(io::Error::other(
            "usage: lab-guest write|sum|send|receive|journal …",
        )),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(sum) => {
            println!("{sum}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("lab-guest: {error}");
            ExitCode::FAILURE
        }
    }
}
