//! What disks count, with every engine.

mod common;

use std::sync::Arc;

use common::{Folder, TestDisk, allocated, engines, spec};
use drover_block::{
    Directions, Disk, DiskOptions, DiskStatistics, Format, Limits, RequestKind, Throttle, image,
    render_prometheus,
};

#[test]
fn a_disk_counts_what_it_did_and_goes_on_when_it_is_opened_again() {
    for engine in engines() {
        let folder = Folder::new();
        let top = folder.path("x.qcow2");
        image::create_qcow2(&top, &image::CreateOptions::new(1 << 20)).unwrap();
        let spec = spec(&top, Format::Qcow2, &[]);
        let statistics = Arc::new(DiskStatistics::default());
        let operations = Directions {
            write: Some(10.into()),
            ..Directions::default()
        };
        let limits = Limits {
            operations,
            ..Limits::default()
        };
        for _ in 0..2 {
            let options = DiskOptions {
                statistics: Some(Arc::clone(&statistics)),
                throttle: Some(Throttle::new(limits).unwrap()),
                ..engine.into()
            };
            let mut disk = TestDisk(Disk::open_with(&spec, options).unwrap());
            disk.write(0, &[1; 4096]);
            disk.write(65536, &[1; 512]);
            disk.read(0, 1024);
            disk.zero(65536, 65536, false);
            disk.flush();
            disk.try_read(1 << 20, 512).unwrap_err();
            assert!(Arc::ptr_eq(&disk.0.statistics(), &statistics));
            disk.close();
        }
        let totals = |kind| {
            let totals = statistics.totals(kind);
            (totals.operations, totals.bytes, totals.errors)
        };
        assert_eq!(totals(RequestKind::Write), (4, 2 * 4608, [0; 3]));
        assert_eq!(totals(RequestKind::Read), (4, 2048, [2, 0, 0]));
        assert_eq!(totals(RequestKind::WriteZeroes), (2, 131_072, [0; 3]));
        assert_eq!(totals(RequestKind::Flush), (2, 0, [0; 3]));
        assert_eq!(totals(RequestKind::Discard), (0, 0, [0; 3]));
        assert!(statistics.totals(RequestKind::Flush).latency_nanos > 0);
        let (waited, nanos) = statistics.throttled();
        assert_eq!(waited, 4);
        assert!(nanos > 200_000_000, "{nanos}");
        let (hits, misses) = statistics.cache_hits_and_misses();
        assert!(hits > 0 && misses > 0, "{hits} {misses}");
        assert_eq!(statistics.allocated_bytes(), Some(allocated(&top)));
        let mut text = String::new();
        render_prometheus(&mut text, &[("device=\"root\"", &statistics)]);
        let line = "drover_disk_operations_total{device=\"root\",kind=\"write\"} 4\n";
        assert!(text.contains(line), "{text}");
    }
}

#[test]
fn statistics_keep_no_lock_on_an_image_that_was_closed() {
    let folder = Folder::new();
    let top = folder.path("x.raw");
    image::create_raw(&top, 1 << 20).unwrap();
    let spec = spec(&top, Format::Raw, &[]);
    let statistics = Arc::new(DiskStatistics::default());
    let options = DiskOptions {
        statistics: Some(Arc::clone(&statistics)),
        ..DiskOptions::default()
    };
    Disk::open_with(&spec, options).unwrap().close().unwrap();
    TestDisk::open(&spec).close();
    assert_eq!(statistics.allocated_bytes(), Some(allocated(&top)));
}
