//! Locks: between our own disks, and with QEMU's tools in both directions.

mod common;

use std::io::Write as _;
use std::process::{Command, Stdio};

use common::{Folder, TestDisk, layer, qemu_img, qemu_io, refusal, spec, text, try_qemu_io};
use drover_block::{DiskSpec, Format, image};

#[test]
fn a_writer_is_alone_and_readers_share() {
    let folder = Folder::new();
    let top = folder.path("x.raw");
    image::create_raw(&top, 1 << 20).unwrap();
    let writer = spec(&top, Format::Raw, &[]);
    let reader = DiskSpec {
        read_only: true,
        ..writer.clone()
    };
    let one = TestDisk::open(&reader);
    let two = TestDisk::open(&reader);
    assert!(refusal(&writer).contains("in use by another process"));
    drop(one);
    assert!(refusal(&writer).contains("in use by another process"));
    two.close();
    let one = TestDisk::open(&writer);
    assert!(refusal(&writer).contains("open for writing") || refusal(&writer).contains("in use"));
    assert!(refusal(&reader).contains("open for writing") || refusal(&reader).contains("in use"));
    one.close();
    TestDisk::open(&writer).close();
}

#[test]
fn overlays_share_a_base_and_nobody_writes_it_meanwhile() {
    let folder = Folder::new();
    let base = folder.path("base.qcow2");
    image::create_qcow2(&base, &image::CreateOptions::new(1 << 20)).unwrap();
    let overlay = |name: &str| {
        let top = folder.path(name);
        let backing = Some((base.clone(), Format::Qcow2));
        let options = image::CreateOptions {
            backing,
            ..image::CreateOptions::new(1 << 20)
        };
        image::create_qcow2(&top, &options).unwrap();
        TestDisk::open(&spec(&top, Format::Qcow2, &[layer(&base, Format::Qcow2)]))
    };
    let one = overlay("one.qcow2");
    let two = overlay("two.qcow2");
    let writer = spec(&base, Format::Qcow2, &[]);
    assert!(refusal(&writer).contains("in use by another process"));
    one.close();
    two.close();
    TestDisk::open(&writer).close();
}

#[test]
fn qemu_is_kept_out_of_a_disk_that_we_write_and_may_read_one_that_we_read() {
    let folder = Folder::new();
    let top = folder.path("x.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "1M"]);
    let writer = spec(&top, Format::Qcow2, &[]);
    let disk = TestDisk::open(&writer);
    let output = try_qemu_io("qcow2", &top, &["read 0 512"]);
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("lock"),
        "{output:?}"
    );
    disk.close();
    qemu_io("qcow2", &top, &["write 0 512"]);
    let disk = TestDisk::open(&DiskSpec {
        read_only: true,
        ..writer
    });
    qemu_img(&["info", text(&top)]);
    let output = try_qemu_io("qcow2", &top, &["write 0 512"]);
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("lock"),
        "{output:?}"
    );
    disk.close();
}

#[test]
fn we_keep_out_of_a_disk_that_qemu_writes() {
    let folder = Folder::new();
    let top = folder.path("x.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&top), "1M"]);
    let mut qemu = Command::new("qemu-io")
        .args(["-f", "qcow2", text(&top)])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("qemu-io is installed by `cargo xtask setup`");
    let mut input = qemu.stdin.take().unwrap();
    let mut output = std::io::BufReader::new(qemu.stdout.take().unwrap());
    // Its answer to a command proves that it has opened the image.
    input.write_all(b"write 0 512\n").unwrap();
    let mut line = String::new();
    while !line.contains("wrote") {
        line.clear();
        assert!(
            std::io::BufRead::read_line(&mut output, &mut line).unwrap() > 0,
            "qemu-io has ended"
        );
    }
    let writer = spec(&top, Format::Qcow2, &[]);
    assert!(refusal(&writer).contains("in use by another process"));
    let reader = DiskSpec {
        read_only: true,
        ..writer.clone()
    };
    assert!(refusal(&reader).contains("open for writing"));
    assert!(image::info(&top, Format::Qcow2).is_err());
    drop(input);
    assert!(qemu.wait().unwrap().success());
    TestDisk::open(&writer).close();
}
