//! An image is hostile: whatever its bytes, it is refused or served, without a panic, a hang or memory without bound; and after
//! writing to it, header and file still belong together.
#![no_main]

use std::path::PathBuf;

use drover_block::{
    Backing, Buffers, Cache, Disk, DiskSpec, Format, Layer, Op, SharedBuffer, image,
};
use libfuzzer_sys::fuzz_target;

/// A sound image with a little of everything, as bytes.
fn template() -> &'static [u8] {
    static TEMPLATE: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    TEMPLATE.get_or_init(|| {
        let path = std::env::temp_dir().join(format!("fuzz-template-{}.qcow2", std::process::id()));
        let options = image::CreateOptions {
            cluster_size: 512,
            ..image::CreateOptions::new(256 * 1024)
        };
        image::create_qcow2(&path, &options)
            .expect("the folder for temporary files takes an image");
        let mut disk = Disk::open(&spec(path.clone(), false)).expect("a new image opens");
        for offset in (0..64 * 1024).step_by(4096) {
            let write = Op::Write {
                offset,
                buffers: Buffers::from_vec(vec![0x5a; 3000]),
            };
            disk.execute(&write).expect("a new image takes writes");
        }
        disk.execute(&Op::WriteZeroes {
            offset: 8192,
            length: 8192,
            unmap: false,
        })
        .expect("a new image takes zeros");
        disk.close().expect("a new image closes");
        let bytes = std::fs::read(&path).expect("the image is there");
        std::fs::remove_file(path).expect("the image is ours");
        bytes
    })
}

fn spec(path: PathBuf, read_only: bool) -> DiskSpec {
    DiskSpec {
        top: Layer {
            path,
            format: Format::Qcow2,
            cache: Cache::Buffered,
        },
        backing: Backing::Explicit(Vec::new()),
        read_only,
        discard: true,
    }
}

fuzz_target!(|input: &[u8]| {
    // The first byte says how many patches of eight bytes follow; requests follow those.
    let Some((patches, rest)) = input.split_first() else {
        return;
    };
    let (patches, requests) = rest.split_at(rest.len().min(usize::from(*patches % 16) * 8));
    let mut bytes = template().to_vec();
    for patch in patches.chunks_exact(8) {
        let at = usize::from(u16::from_le_bytes([patch[0], patch[1]]));
        // Most of the header's fields are in the first 128 bytes; let half of the patches go there.
        let at = if patch[2] & 1 == 0 {
            at % 128
        } else {
            at % bytes.len()
        };
        let value = &patch[3..];
        let end = (at + value.len()).min(bytes.len());
        let length = end - at;
        bytes[at..end].copy_from_slice(&value[..length]);
    }
    let path = std::env::temp_dir().join(format!("fuzz-image-{}.qcow2", std::process::id()));
    std::fs::write(&path, &bytes).expect("the folder for temporary files takes an image");
    let _ = image::info(&path, Format::Qcow2);
    let _ = image::check(&path, Format::Qcow2);
    let Ok(mut disk) = Disk::open(&spec(
        path.clone(),
        requests.first().is_some_and(|b| b & 1 == 1),
    )) else {
        return;
    };
    for request in requests.chunks_exact(4).take(64) {
        let size = disk.size_bytes().max(1);
        let offset = (u64::from(u16::from_le_bytes([request[1], request[2]])) * 512) % size;
        let length = (usize::from(request[3]) * 67)
            .min(usize::try_from(size - offset).unwrap_or(usize::MAX));
        let op = match request[0] % 5 {
            0 => Op::Read {
                offset,
                buffers: SharedBuffer::zeroed(length).buffers(),
            },
            1 => Op::Write {
                offset,
                buffers: Buffers::from_vec(vec![request[0]; length]),
            },
            2 => Op::Discard {
                offset,
                length: length as u64,
            },
            3 => Op::WriteZeroes {
                offset,
                length: length as u64,
                unmap: request[0] & 8 != 0,
            },
            _ => Op::Flush,
        };
        let _ = disk.execute(&op);
    }
    let _ = disk.close();
    let start = std::fs::read(&path).expect("the image is there");
    assert_eq!(
        start.get(..4),
        bytes.get(..4),
        "the header is still a header"
    );
    assert_eq!(
        start.get(20..24),
        bytes.get(20..24),
        "the cluster size has not changed"
    );
});
