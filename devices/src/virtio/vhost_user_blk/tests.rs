//! The front end in front of this crate's own export, and of QEMU's storage daemon where that is installed.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use drover_block::image::{CreateOptions, check, create_qcow2, create_raw};
use drover_block::{Backing, Cache, Disk, DiskSpec, Format, IoEngine, Layer};

use super::*;
use crate::vhost_user::export::{Crashes, ExportError, serve};
use crate::virtio::block::bits::{feature, kind, status};
use crate::virtio::block::{Block, BlockOptions};
use crate::virtio::testing::{
    DriverQueue, Guest, PATIENCE as TEST_PATIENCE, PlainThreads, eventually, readable, reset,
    reset_queue, writable,
};

const DISK_BYTES: u64 = 16 << 20;

/// A back end that can be stopped and started again.
struct Server {
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<Result<(), ExportError>>>,
}

impl Server {
    fn start(folder: &Path) -> Self {
        let spec = DiskSpec {
            top: Layer {
                path: folder.join("disk.qcow2"),
                format: Format::Qcow2,
                cache: Cache::Buffered,
            },
            backing: Backing::Explicit(Vec::new()),
            read_only: false,
            discard: true,
        };
        let disk = Disk::open_with(&spec, IoEngine::Threads).unwrap();
        let options = BlockOptions {
            id: "export".into(),
            serial: "serial".into(),
            queues: 2,
            queue_size: 128,
            discard_granularity: 65536,
        };
        let block = Block::new(disk, &options, &PlainThreads).unwrap();
        let socket = socket(folder);
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(socket).unwrap();
        let (wait, stop) = rustix::pipe::pipe().unwrap();
        let thread =
            std::thread::spawn(move || serve(&listener, block, Crashes::LoseNothing, wait.as_fd()));
        Self {
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    fn stop(&mut self) {
        drop(self.stop.take());
        self.thread.take().unwrap().join().unwrap().unwrap();
    }
}

fn socket(folder: &Path) -> PathBuf {
    folder.join("disk.sock")
}

fn options(folder: &Path, queues: u16) -> VhostUserBlkOptions {
    VhostUserBlkOptions {
        id: "remote".into(),
        socket: socket(folder),
        queues,
        queue_size: 16,
    }
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk.qcow2");
    create_qcow2(&image, &CreateOptions::new(DISK_BYTES)).unwrap();
    folder
}

/// Offers a request of one data buffer; the status byte's address.
fn offer(guest: &mut Guest, queue: &mut DriverQueue, kind: u32, sector: u64, data: u64) -> u64 {
    let mut header = [0; 16];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[8..].copy_from_slice(&sector.to_le_bytes());
    let header = guest.place(&header);
    let status = guest.place(&[0xee]);
    let data = if kind == kind::IN {
        writable(data, 512)
    } else {
        readable(data, 512)
    };
    let parts = if kind == kind::FLUSH {
        vec![readable(header, 16), writable(status, 1)]
    } else {
        vec![readable(header, 16), data, writable(status, 1)]
    };
    queue.offer(&parts);
    queue.ring();
    status
}

fn request(guest: &mut Guest, queue: &mut DriverQueue, kind: u32, sector: u64, data: u64) {
    let status = offer(guest, queue, kind, sector, data);
    queue.wait();
    assert_eq!(guest.byte(status), status::OK);
}

fn activate(device: &mut VhostUserBlk, guest: &Guest, queues: &[&DriverQueue]) {
    // The transport adds VIRTIO_F_VERSION_1.
    let features = device.features() | 1 << 32;
    device.activate(guest.activation(features, queues)).unwrap();
}

fn write_and_read(guest: &mut Guest, queue: &mut DriverQueue, sector: u64, byte: u8) {
    let out = guest.place(&[byte; 512]);
    request(guest, queue, kind::OUT, sector, out);
    request(guest, queue, kind::FLUSH, 0, 0);
    let into = guest.allocate(512);
    request(guest, queue, kind::IN, sector, into);
    assert_eq!(guest.read(into, 512), [byte; 512]);
}

#[test]
fn what_is_written_through_the_back_end_is_read_back_on_all_queues_and_after_resets() {
    let folder = folder();
    let mut server = Server::start(folder.path());
    let mut device = VhostUserBlk::connect(&options(folder.path(), 2), &PlainThreads).unwrap();
    let wanted = feature::MQ | feature::FLUSH | feature::DISCARD | feature::WRITE_ZEROES;
    assert_eq!(device.features() & wanted, wanted);
    let mut capacity = [0; 8];
    device.read_config(0, &mut capacity);
    assert_eq!(u64::from_le_bytes(capacity), DISK_BYTES / 512);

    let mut guest = Guest::shared();
    let mut queues = [guest.queue(0, 16), guest.queue(1, 16)];
    for round in 1..4 {
        let [first, second] = &mut queues;
        activate(&mut device, &guest, &[first, second]);
        write_and_read(&mut guest, first, round, 7);
        write_and_read(&mut guest, second, round + 100, 8);
        reset_queue(&mut device, 1);
        second.clear();
        device.enable_queue(second.active()).unwrap();
        write_and_read(&mut guest, second, round + 200, 9);
        reset(&mut device);
        first.clear();
        second.clear();
    }
    assert!(guest.interrupts.queue.load(Ordering::SeqCst) > 0);
    drop(device);
    server.stop();
    let image = folder.path().join("disk.qcow2");
    assert!(check(&image, Format::Qcow2).unwrap().is_clean());
}

#[test]
fn requests_wait_while_the_back_end_is_away_and_are_served_when_it_returns() {
    let folder = folder();
    let mut server = Server::start(folder.path());
    let mut device = VhostUserBlk::connect(&options(folder.path(), 1), &PlainThreads).unwrap();
    let mut guest = Guest::shared();
    let mut queue = guest.queue(0, 16);
    activate(&mut device, &guest, &[&queue]);
    write_and_read(&mut guest, &mut queue, 3, 1);
    for round in 0..2 {
        server.stop();
        let metrics = device.metrics();
        eventually("the loss to be noticed", || {
            metrics.losses.load(Ordering::Relaxed) == round + 1
        });
        let out = guest.place(&[0x55; 512]);
        let status = offer(&mut guest, &mut queue, kind::OUT, 9, out);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(guest.byte(status), 0xee);
        server = Server::start(folder.path());
        queue.wait();
        assert_eq!(guest.byte(status), status::OK);
        write_and_read(&mut guest, &mut queue, 3, 2);
    }
    assert_eq!(device.metrics().connections.load(Ordering::Relaxed), 3);
    // A reset while it is away is answered at once.
    server.stop();
    assert!(device.reset().wait(TEST_PATIENCE));
    drop(device);
}

#[test]
fn without_a_back_end_or_with_too_many_queues_the_error_says_what_to_do() {
    let folder = folder();
    let error = VhostUserBlk::connect(&options(folder.path(), 1), &PlainThreads)
        .err()
        .unwrap();
    assert!(
        error.to_string().contains("no vhost-user back end"),
        "{error}"
    );
    let mut server = Server::start(folder.path());
    let error = VhostUserBlk::connect(&options(folder.path(), 3), &PlainThreads)
        .err()
        .unwrap();
    assert!(error.to_string().contains("it has 2, but 3"), "{error}");
    server.stop();
}

#[test]
fn private_memory_is_refused_as_a_lost_back_end_not_as_a_crash() {
    let folder = folder();
    let mut server = Server::start(folder.path());
    let mut device = VhostUserBlk::connect(&options(folder.path(), 1), &PlainThreads).unwrap();
    let mut guest = Guest::new();
    let queue = guest.queue(0, 16);
    activate(&mut device, &guest, &[&queue]);
    let metrics = device.metrics();
    eventually("the session to end", || {
        metrics.losses.load(Ordering::Relaxed) > 0
    });
    drop(device);
    server.stop();
}

struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn qemu_storage_daemon_is_a_back_end_as_well() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk.raw");
    create_raw(&image, DISK_BYTES).unwrap();
    let node = format!("driver=file,node-name=disk,filename={}", image.display());
    let export = format!(
        "type=vhost-user-blk,id=e,node-name=disk,writable=on,num-queues=2,addr.type=unix,addr.path={}",
        socket(folder.path()).display()
    );
    let daemon = Command::new("qemu-storage-daemon")
        .args(["--blockdev", &node, "--export", &export])
        .spawn();
    let Ok(daemon) = daemon else {
        println!("skipped: qemu-storage-daemon is not installed");
        return;
    };
    let daemon = Daemon(daemon);
    eventually("the daemon's socket", || socket(folder.path()).exists());
    let mut device = None;
    eventually("the daemon to listen", || {
        device = VhostUserBlk::connect(&options(folder.path(), 2), &PlainThreads).ok();
        device.is_some()
    });
    let mut device = device.unwrap();
    let mut guest = Guest::shared();
    let mut queues = [guest.queue(0, 16), guest.queue(1, 16)];
    for round in 1..3 {
        let [first, second] = &mut queues;
        activate(&mut device, &guest, &[first, second]);
        write_and_read(&mut guest, first, round, 7);
        write_and_read(&mut guest, second, round + 100, 8);
        reset(&mut device);
        first.clear();
        second.clear();
    }
    drop(device);
    drop(daemon);
    assert_eq!(std::fs::read(&image).unwrap()[512..1024], [7; 512]);
}
