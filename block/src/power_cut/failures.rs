//! Hosts that fail in the middle of things.

use super::scene::{Random, SECTOR, Scene};
use crate::io::tape;
use crate::{Backing, Buffers, Disk, DiskSpec, Format, IoError, Op, SharedBuffer, image};

#[test]
fn a_request_that_fails_leaves_the_image_sound_and_the_rest_readable() {
    for errno in [libc::ENOSPC, libc::EIO] {
        for nth in 0..30 {
            let scene = Scene::plain(nth % 2 == 0, nth % 3 == 0);
            let tape = tape::insert();
            let mut disk = match nth % 2 {
                0 => Disk::open(&scene.spec).unwrap(),
                _ => Disk::open_shuffled(&scene.spec, nth as u64).unwrap(),
            };
            let mut random = Random(nth as u64 + 1);
            tape.borrow_mut().fail = Some((nth, errno));
            let mut model: Vec<Option<u8>> =
                vec![Some(if nth % 3 == 0 { 0xaa } else { 0 }); scene.size / SECTOR];
            let mut failures = 0;
            for n in 0..40u8 {
                let first = random.below(180) as usize;
                let sectors = first..first + 8;
                let op = match n % 5 {
                    4 => Op::Flush,
                    3 => Op::WriteZeroes {
                        offset: (first * SECTOR) as u64,
                        length: 4096,
                        unmap: true,
                    },
                    _ => Op::Write {
                        offset: (first * SECTOR) as u64,
                        buffers: Buffers::from_vec(vec![n + 1; 4096]),
                    },
                };
                match (disk.execute(&op), &op) {
                    (Ok(()), Op::Flush) => {}
                    (Ok(()), Op::Write { .. }) => model[sectors].fill(Some(n + 1)),
                    (Ok(()), _) => model[sectors].fill(Some(0)),
                    (Err(error), _) => {
                        failures += 1;
                        let expected = match errno {
                            libc::ENOSPC => matches!(error, IoError::NoSpace | IoError::Stopped(_)),
                            _ => matches!(error, IoError::Host { .. } | IoError::Stopped(_)),
                        };
                        assert!(expected, "{error}");
                        // A request that failed may have done its work in part.
                        model[sectors].fill(None);
                    }
                }
                let buffer = SharedBuffer::zeroed(scene.size);
                disk.execute(&Op::Read {
                    offset: 0,
                    buffers: buffer.buffers(),
                })
                .unwrap();
                let seen = buffer.take().unwrap();
                for (sector, expected) in seen.chunks(SECTOR).zip(&model) {
                    let good =
                        expected.is_none_or(|value| sector.iter().all(|byte| *byte == value));
                    assert!(
                        good,
                        "after {failures} failures: {} for {expected:?}",
                        sector[0]
                    );
                }
            }
            drop(disk);
            tape::eject();
            let report = image::check(&scene.spec.top.path, Format::Qcow2).unwrap();
            assert_eq!(report.corruptions, 0, "failure {nth}: {report:?}");
        }
    }
}

#[test]
fn a_flush_that_failed_once_never_succeeds_again() {
    let scene = Scene::plain(false, true);
    let Backing::Explicit(layers) = &scene.spec.backing else {
        unreachable!("made above")
    };
    let raw = DiskSpec {
        top: layers[0].clone(),
        backing: Backing::Explicit(vec![]),
        ..scene.spec.clone()
    };
    for spec in [raw, scene.spec.clone()] {
        let tape = tape::insert();
        let mut disk = Disk::open(&spec).unwrap();
        let write = || Op::Write {
            offset: 0,
            buffers: Buffers::from_vec(vec![1; 4096]),
        };
        disk.execute(&write()).unwrap();
        disk.execute(&Op::Flush).unwrap();
        disk.execute(&write()).unwrap();
        // The next change of the file is the fdatasync.
        tape.borrow_mut().fail = Some((0, libc::EIO));
        assert!(disk.execute(&Op::Flush).is_err());
        assert!(tape.borrow().fail.is_none());
        assert!(
            disk.execute(&Op::Flush).is_err(),
            "the second attempt proves nothing"
        );
        assert!(disk.close().is_err());
        tape::eject();
    }
}
