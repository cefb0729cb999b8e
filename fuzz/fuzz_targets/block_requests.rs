//! Whatever a guest asks of a sound disk, it reads what it wrote, and the image stays sound.
#![no_main]

use drover_block::image::{self, Compat, CreateOptions};
use drover_block::{
    Backing, Buffers, Cache, Disk, DiskSpec, Format, IoError, Layer, Op, SharedBuffer,
};
use libfuzzer_sys::fuzz_target;

const SIZE: u64 = 192 * 1024 + 512;

fuzz_target!(|input: &[u8]| {
    let Some((options, requests)) = input.split_first_chunk::<2>() else {
        return;
    };
    let path = std::env::temp_dir().join(format!("fuzz-requests-{}.qcow2", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let v2 = options[0] & 0x80 != 0;
    let create = CreateOptions {
        cluster_size: 512 << (options[0] % 4),
        refcount_bits: if v2 { 16 } else { 1 << (options[1] % 7) },
        compat: if v2 { Compat::V2 } else { Compat::V3 },
        ..CreateOptions::new(SIZE)
    };
    image::create_qcow2(&path, &create).expect("the folder for temporary files takes an image");
    let spec = DiskSpec {
        top: Layer {
            path: path.clone(),
            format: Format::Qcow2,
            cache: Cache::Buffered,
        },
        backing: Backing::Explicit(Vec::new()),
        read_only: false,
        discard: true,
    };
    let mut disk = Disk::open(&spec).expect("a new image opens");
    let mut model = vec![0u8; usize::try_from(SIZE).expect("it fits")];
    for request in requests.chunks_exact(6).take(96) {
        let offset = u64::from(u32::from_le_bytes([
            request[1],
            request[2],
            request[3] & 3,
            0,
        ]));
        let length = u64::from(u16::from_le_bytes([request[4], request[5]])) % 20_000;
        let inside = offset + length <= SIZE;
        let range = || offset as usize..(offset + length) as usize;
        let shared = SharedBuffer::zeroed(length as usize);
        let op = match request[0] % 6 {
            0 => Op::Read {
                offset,
                buffers: shared.buffers(),
            },
            1 | 2 => Op::Write {
                offset,
                buffers: Buffers::from_vec(vec![request[0]; length as usize]),
            },
            3 => Op::Discard { offset, length },
            4 => Op::WriteZeroes {
                offset,
                length,
                unmap: request[0] & 8 != 0,
            },
            _ => Op::Flush,
        };
        let result = disk.execute(&op);
        match op {
            Op::Flush => assert_eq!(result, Ok(())),
            _ if !inside => assert!(
                matches!(result, Err(IoError::OutOfRange { .. })),
                "{result:?}"
            ),
            Op::Read { buffers, .. } => {
                drop(buffers);
                assert_eq!(result, Ok(()));
                assert!(shared.take().expect("the request is over") == model[range()]);
            }
            Op::Write { .. } => {
                assert_eq!(result, Ok(()));
                model[range()].fill(request[0]);
            }
            Op::WriteZeroes { .. } => {
                assert_eq!(result, Ok(()));
                model[range()].fill(0);
            }
            Op::Discard { .. } => {
                assert_eq!(result, Ok(()));
                let seen = SharedBuffer::zeroed(length as usize);
                disk.execute(&Op::Read {
                    offset,
                    buffers: seen.buffers(),
                })
                .expect("the disk reads");
                let seen = seen.take().expect("the request is over");
                assert!(
                    seen.iter()
                        .zip(&model[range()])
                        .all(|(new, old)| *new == 0 || new == old)
                );
                model[range()].copy_from_slice(&seen);
            }
        }
    }
    disk.close().expect("the disk closes");
    let report = image::check(&path, Format::Qcow2).expect("the image is there");
    assert!(report.is_clean(), "{report:?}");
});
