//! A back end that promises to lose nothing and is killed in the middle of its work, again and again: the next one finishes what was
//! under way, and what was answered is there.

use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use drover_block::image::{CreateOptions, check, create_qcow2};
use drover_block::{Backing, Cache, Disk, DiskSpec, Format, IoEngine, Layer};
use drover_devices::thread::{ThreadRole, Threads};
use drover_devices::vhost_user::client::{Access, Client, ClientOptions, Job, Order, Pattern};
use drover_devices::vhost_user::export::{Crashes, serve};
use drover_devices::virtio::block::{Block, BlockOptions};

const DISK_BYTES: u64 = 64 << 20;
const BLOCK: u64 = 4096;

/// Tells this program, started again, which folder to serve a disk in.
const FOLDER: &str = "DROVER_TEST_EXPORT";

struct PlainThreads;

impl Threads for PlainThreads {
    fn spawn(
        &self,
        name: &str,
        _role: ThreadRole,
        body: Box<dyn FnOnce() + Send>,
    ) -> std::io::Result<JoinHandle<()>> {
        std::thread::Builder::new().name(name.into()).spawn(body)
    }
}

/// The back end; in the process that [`Export::start`] starts, and nothing anywhere else.
#[test]
fn serves_when_it_is_told_to() {
    let Some(folder) = std::env::var_os(FOLDER) else {
        return;
    };
    let folder = Path::new(&folder);
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
    let socket = folder.join("disk.sock");
    let _ = std::fs::remove_file(&socket);
    let listener = UnixListener::bind(socket).unwrap();
    // The parent's end of standard input: its closing ends this process in an orderly way.
    let stop = std::io::stdin();
    serve(&listener, block, Crashes::LoseNothing, stop.as_fd()).unwrap();
}

struct Export(Child);

impl Export {
    fn start(folder: &Path) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "serves_when_it_is_told_to"])
            .env(FOLDER, folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }

    fn stop(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_killed_back_end_loses_no_request_of_a_client_that_finds_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    create_qcow2(
        &folder.path().join("disk.qcow2"),
        &CreateOptions::new(DISK_BYTES),
    )
    .unwrap();
    let mut export = Export::start(folder.path());
    let socket = folder.path().join("disk.sock");
    while !socket.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let options = ClientOptions {
        queues: 2,
        depth: 32,
        buffer_bytes: 4096,
    };
    let mut client = Client::connect(&socket, &options).unwrap();
    client.set_reconnect(true);

    let running = std::thread::spawn(move || {
        let jobs = (0..DISK_BYTES / BLOCK).map(|block| Job {
            access: Access::Write,
            // Neighbours are far from each other in time, so that most requests need new metadata.
            offset: block * 37 % (DISK_BYTES / BLOCK) * BLOCK,
            length: BLOCK,
        });
        let written = client.run(jobs).unwrap();
        (client, written)
    });
    let mut kills = 0;
    while !running.is_finished() && kills < 6 {
        std::thread::sleep(Duration::from_millis(60));
        if running.is_finished() {
            break;
        }
        drop(export);
        kills += 1;
        export = Export::start(folder.path());
    }
    let (mut client, written) = running.join().unwrap();
    assert!(kills > 0, "it was over before anything could be killed");
    assert_eq!(
        (written.requests, written.errors),
        (DISK_BYTES / BLOCK, 0),
        "after {kills} kills"
    );

    // Every block was written, by whichever back end.
    let mut bytes = [0; BLOCK as usize];
    for block in 0..DISK_BYTES / BLOCK {
        client.read_at(block * BLOCK, &mut bytes).unwrap();
        assert!(!bytes.contains(&0), "block {block} after {kills} kills");
    }
    let pattern = Pattern {
        order: Order::Random { seed: 7 },
        ..Pattern::reads(BLOCK, DISK_BYTES)
    };
    assert_eq!(client.run(pattern.jobs().take(500)).unwrap().errors, 0);
    drop(client);
    export.stop();
    let report = check(&folder.path().join("disk.qcow2"), Format::Qcow2).unwrap();
    assert_eq!(report.corruptions, 0);
}
