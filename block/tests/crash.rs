//! A writer killed in the middle: the image is sound but for leaks, and what was flushed is there.

mod common;

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Folder, TestDisk, check, contents, qemu_img, spec, text};
use drover_block::Format;

const SLOT: usize = 24 * 1024;

/// What happened to a slot, in order: the write's number, or 0 for a discard.
type History = HashMap<u64, Vec<u64>>;

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
        let mut writer = Command::new(env!("CARGO_BIN_EXE_block-torture"))
            .args([text(&top), &(round as u64 * 7919 + 1).to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(writer.stdout.take().unwrap());
        let pid = rustix::process::Pid::from_child(&writer);
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(700 + 130 * round as u64));
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        });
        let mut histories = History::new();
        let mut flushed = History::new();
        let mut flushes = 0;
        for line in output.lines() {
            let line = line.unwrap();
            let words: Vec<&str> = line.split(' ').collect();
            match words.as_slice() {
                ["flushed", _] => {
                    flushes += 1;
                    // Of what came before, only the last thing done to a slot counts now.
                    flushed = histories
                        .iter()
                        .map(|(slot, done)| (*slot, done.last().copied().into_iter().collect()))
                        .collect();
                    histories.clone_from(&flushed);
                }
                ["write", number, slot] => {
                    histories
                        .entry(slot.parse().unwrap())
                        .or_default()
                        .push(number.parse().unwrap());
                }
                ["discard", _, slot] => histories.entry(slot.parse().unwrap()).or_default().push(0),
                // The line in which it died.
                _ => {}
            }
        }
        killer.join().unwrap();
        assert!(!writer.wait().unwrap().success(), "it was killed");
        assert!(
            flushes > 3,
            "{flushes} flushes are too few to test anything"
        );
        let (leaks, corruptions) = check(&top);
        assert_eq!(corruptions, 0, "{options}: {leaks} leaks");
        let seen = contents("qcow2", &top);
        for (slot, done) in &flushed {
            let start = *slot as usize * SLOT;
            let possible = &histories[slot];
            assert_eq!(done.first(), possible.first());
            for (n, word) in seen[start..start + SLOT].chunks_exact(8).enumerate() {
                let word = u64::from_be_bytes(word.try_into().unwrap());
                // A discard may leave what was there; parts of a slot may be newer than others.
                let discarded = possible.contains(&0);
                let known = possible.contains(&word) || discarded;
                assert!(
                    known,
                    "{options}: slot {slot} byte {}: {word} is none of {possible:?}",
                    n * 8
                );
            }
        }
        // It goes on where it was, and its leaks do no harm.
        let mut disk = TestDisk::open(&spec(&top, Format::Qcow2, &[]));
        disk.fill(0, 12 << 20, 0x5a);
        disk.close();
        assert_eq!(check(&top).1, 0);
        assert!(contents("qcow2", &top).iter().all(|byte| *byte == 0x5a));
    }
}
