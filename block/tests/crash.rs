//! A writer killed in the middle: the image is sound but for leaks, and what was flushed is there.

mod common;

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Folder, TestDisk, check, contents, layer, qemu_img, spec, text};
use drover_block::{Disk, ErrorKind, Format};

const SLOT: usize = 24 * 1024;

/// What happened to a slot, in order: the write's number, or 0 for a discard.
type History = HashMap<u64, Vec<u64>>;

/// What a killed writer is known to have done.
struct Story {
    /// By slot: what the last flush made durable.
    flushed: History,
    /// By slot: that, and everything since.
    histories: History,
    flushes: u32,
    /// Its job was over.
    done: bool,
}

/// Lets a writer loose on an image and kills it.
fn kill(arguments: &[&str], after: Duration) -> Story {
    let mut writer = Command::new(env!("CARGO_BIN_EXE_block-torture"))
        .args(arguments)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(writer.stdout.take().unwrap());
    let pid = rustix::process::Pid::from_child(&writer);
    let killer = std::thread::spawn(move || {
        std::thread::sleep(after);
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    });
    let mut story = Story {
        flushed: History::new(),
        histories: History::new(),
        flushes: 0,
        done: false,
    };
    let histories = &mut story.histories;
    for line in output.lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        match words.as_slice() {
            ["flushed", _] => {
                story.flushes += 1;
                // Of what came before, only the last thing done to a slot counts now.
                story.flushed = histories
                    .iter()
                    .map(|(slot, done)| (*slot, done.last().copied().into_iter().collect()))
                    .collect();
                histories.clone_from(&story.flushed);
            }
            ["write", number, slot] => {
                histories
                    .entry(slot.parse().unwrap())
                    .or_default()
                    .push(number.parse().unwrap());
            }
            ["discard", _, slot] => histories.entry(slot.parse().unwrap()).or_default().push(0),
            ["done"] => story.done = true,
            // The line in which it died.
            _ => {}
        }
    }
    killer.join().unwrap();
    assert!(!writer.wait().unwrap().success(), "it was killed");
    // A ring lets go of its files, and their locks, a moment after its process is gone.
    let top = spec(Path::new(arguments[0]), Format::Qcow2, &[]);
    let patience = Instant::now() + Duration::from_secs(20);
    while let Err(error) = Disk::open(&top)
        && matches!(error.kind, ErrorKind::Locked(_))
    {
        assert!(Instant::now() < patience, "{error}");
        std::thread::sleep(Duration::from_millis(5));
    }
    story
}

impl Story {
    /// Asserts that a disk which reads like this keeps what was flushed.
    #[track_caller]
    fn check(&self, seen: &[u8], what: &str) {
        for (slot, done) in &self.flushed {
            let start = *slot as usize * SLOT;
            let possible = &self.histories[slot];
            assert_eq!(done.first(), possible.first());
            for (n, word) in seen[start..start + SLOT].chunks_exact(8).enumerate() {
                let word = u64::from_be_bytes(word.try_into().unwrap());
                // A discard may leave what was there; parts of a slot may be newer than others.
                let discarded = possible.contains(&0);
                let known = possible.contains(&word) || discarded;
                assert!(
                    known,
                    "{what}: slot {slot} byte {}: {word} is none of {possible:?}",
                    n * 8
                );
            }
        }
    }
}

#[test]
fn a_killed_writer_leaves_leaks_at_most_and_everything_flushed() {
    for (round, options) in [
        "cluster_size=64k",
        "cluster_size=4k",
        "cluster_size=512,refcount_bits=64",
        "compat=0.10",
    ]
    .into_iter()
    .enumerate()
    {
        let folder = Folder::on_disk();
        let top = folder.path("top.qcow2");
        qemu_img(&[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            options,
            text(&top),
            "12M",
        ]);
        let seed = (round as u64 * 7919 + 1).to_string();
        let after = Duration::from_millis(700 + 130 * round as u64);
        let story = kill(&[text(&top), &seed], after);
        assert!(
            story.flushes > 3,
            "{} flushes are too few to test anything",
            story.flushes
        );
        let (leaks, corruptions) = check(&top);
        assert_eq!(corruptions, 0, "{options}: {leaks} leaks");
        story.check(&contents("qcow2", &top), options);
        // It goes on where it was, and its leaks do no harm.
        let mut disk = TestDisk::open(&spec(&top, Format::Qcow2, &[]));
        disk.fill(0, 12 << 20, 0x5a);
        disk.close();
        assert_eq!(check(&top).1, 0);
        assert!(contents("qcow2", &top).iter().all(|byte| *byte == 0x5a));
    }
}

/// Kills a job beside a writer again and again until it comes to its end.
fn killed_until_done(job: &str) {
    let folder = Folder::on_disk();
    let (base, top) = (folder.path("base.qcow2"), folder.path("top.qcow2"));
    let below = layer(&base, Format::Qcow2);
    let small = "cluster_size=4k";
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        small,
        text(&base),
        "16M",
    ]);
    let mut disk = TestDisk::open(&spec(&base, Format::Qcow2, &[]));
    disk.fill(0, 9 << 20, 0x11);
    disk.close();
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "qcow2",
        "-b",
        text(&base),
        text(&top),
        "16M",
    ]);
    let both = spec(&top, Format::Qcow2, &[below]);
    let mut disk = TestDisk::open(&both);
    disk.fill(5 << 20, 11 << 20, 0x22);
    disk.close();
    let mut rounds = 0;
    let mut flushes = 0;
    loop {
        rounds += 1;
        // So short at first that no host gets to the end, and longer every time, as fdatasync is slow on some.
        let after = Duration::from_millis(2 * rounds * rounds);
        let seed = (rounds * 104_729).to_string();
        let story = kill(&[text(&top), &seed, job, text(&base)], after);
        flushes += story.flushes;
        for image in [&top, &base] {
            assert_eq!(check(image).1, 0, "{job}, round {rounds}");
        }
        let seen = contents("qcow2", &top);
        story.check(&seen, &format!("{job}, round {rounds}"));
        if story.done {
            // Its end is durable.
            let after = match job {
                "flatten" => top.clone(),
                _ => base.clone(),
            };
            if job == "flatten" {
                std::fs::remove_file(&base).unwrap();
            }
            assert!(contents("qcow2", &after) == seen);
            break;
        }
    }
    assert!(
        rounds > 1 && flushes > 1,
        "{rounds} rounds and {flushes} flushes are too few to test anything"
    );
}

#[test]
fn a_killed_flatten_is_done_again_until_it_comes_to_its_end() {
    killed_until_done("flatten");
}

#[test]
fn a_killed_commit_is_done_again_until_it_comes_to_its_end() {
    killed_until_done("commit");
}
