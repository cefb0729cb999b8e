//! Block requests: whatever lies in a guest's rings and descriptors, what the parser accepts lies on the disk and in RAM.
#![no_main]

use drover_devices::virtio::block::request::{BadRequest, DiskRange, Limits, Operation, Parser};
use libfuzzer_sys::fuzz_target;

mod guest;

const CAPACITY_SECTORS: u64 = 4096;

fuzz_target!(|data: &[u8]| {
    let [flags, data @ ..] = data else { return };
    let memory = guest::memory(data);
    let mut parser = Parser::new(Limits {
        capacity_sectors: CAPACITY_SECTORS,
        read_only: flags & 1 != 0,
        discard: flags & 2 != 0,
    });
    let size = CAPACITY_SECTORS * 512;
    let on_disk = |offset: u64, length: u64| offset + length <= size;
    guest::for_each_chain(&memory, |chain| match parser.parse(&memory, chain) {
        Ok(request) => {
            let length = u64::from(request.data_bytes);
            let data = parser.data(&request.operation);
            assert_eq!(data.iter().map(|slice| slice.len() as u64).sum::<u64>(), length);
            match request.operation {
                Operation::Read { offset } => assert!(on_disk(offset, length)),
                Operation::Write { offset } => assert!(on_disk(offset, length) && flags & 1 == 0),
                Operation::Discard(ranges) | Operation::WriteZeroes(ranges) => {
                    let fits = |range: &DiskRange| on_disk(range.offset, range.length);
                    assert!(ranges.iter().all(fits) && flags & 1 == 0);
                }
                Operation::Flush | Operation::GetId => {}
            }
            assert!(request.status.0 < guest::RAM_BYTES);
        }
        Err(BadRequest::Answer { status, code }) => {
            assert!(status.0 < guest::RAM_BYTES && (1..=2).contains(&code));
        }
        Err(_) => {}
    });
});
