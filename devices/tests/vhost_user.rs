//! A disk exported over vhost-user, driven by the client of this crate.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use drover_block::image::{CreateOptions, check, create_qcow2, create_raw};
use drover_block::{Backing, Cache, Disk, DiskSpec, Format, IoEngine, Layer};
use drover_devices::thread::{ThreadRole, Threads};
use drover_devices::vhost_user::client::{
    Access, Client, ClientError, ClientOptions, Job, Order, Pattern,
};
use drover_devices::vhost_user::export::{Crashes, ExportError, serve};
use drover_devices::virtio::block::bits::feature;
use drover_devices::virtio::block::{Block, BlockOptions};

const DISK_BYTES: u64 = 64 << 20;

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

/// An export on a thread of this process.
struct Export {
    folder: tempfile::TempDir,
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<Result<(), ExportError>>>,
}

impl Export {
    fn socket(&self) -> PathBuf {
        self.folder.path().join("disk.sock")
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("disk.qcow2")
    }

    fn start(engine: IoEngine, read_only: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("disk.qcow2");
        create_qcow2(&image, &CreateOptions::new(DISK_BYTES)).unwrap();
        Self::serve(folder, &image, Format::Qcow2, engine, read_only)
    }

    fn serve(
        folder: tempfile::TempDir,
        image: &Path,
        format: Format,
        engine: IoEngine,
        read_only: bool,
    ) -> Self {
        let spec = DiskSpec {
            top: Layer {
                path: image.into(),
                format,
                cache: Cache::Buffered,
            },
            backing: Backing::Explicit(Vec::new()),
            read_only,
            discard: true,
        };
        let disk = Disk::open_with(&spec, engine).unwrap();
        let options = BlockOptions {
            id: "export".into(),
            serial: "serial".into(),
            queues: 4,
            queue_size: 128,
            discard_granularity: 65536,
        };
        let block = Block::new(disk, &options, &PlainThreads).unwrap();
        let listener = UnixListener::bind(folder.path().join("disk.sock")).unwrap();
        let (wait, stop) = rustix::pipe::pipe().unwrap();
        let thread =
            std::thread::spawn(move || serve(&listener, block, Crashes::default(), wait.as_fd()));
        Self {
            folder,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    fn client(&self, queues: u16, depth: u16) -> Client {
        let options = ClientOptions {
            queues,
            depth,
            buffer_bytes: 128 << 10,
        };
        Client::connect(&self.socket(), &options).unwrap()
    }

    /// Tells the export to stop and waits for it.
    fn stop(&mut self) -> Result<(), ExportError> {
        drop(self.stop.take());
        self.thread.take().unwrap().join().unwrap()
    }
}

fn engines() -> Vec<IoEngine> {
    let mut engines = vec![IoEngine::Inline, IoEngine::Threads];
    match IoEngine::asynchronous() {
        IoEngine::IoUring => engines.push(IoEngine::IoUring),
        _ => println!("skipped: this host allows no io_uring"),
    }
    engines
}

#[test]
fn what_one_client_writes_another_reads_and_the_image_is_sound() {
    for engine in engines() {
        let mut export = Export::start(engine, false);
        let mut client = export.client(1, 1);
        assert_eq!(client.capacity_bytes(), DISK_BYTES);
        let all = feature::FLUSH | feature::DISCARD | feature::WRITE_ZEROES | feature::MQ;
        assert_eq!(client.features() & all, all);
        client.write_at(4096, &[7; 65536]).unwrap();
        client.execute(Access::WriteZeroes, 8192, 4096).unwrap();
        client.execute(Access::Flush, 0, 0).unwrap();
        client.disconnect().unwrap();

        let mut client = export.client(4, 8);
        let mut bytes = vec![1; 65536];
        client.read_at(4096, &mut bytes).unwrap();
        assert_eq!(bytes[..4096], [7; 4096]);
        assert_eq!(bytes[4096..8192], [0; 4096]);
        assert_eq!(bytes[8192..], vec![7; 65536 - 8192]);
        client.execute(Access::Discard, 0, 1 << 20).unwrap();
        client.read_at(4096, &mut bytes).unwrap();
        assert_eq!(bytes, vec![0; 65536]);
        drop(client);
        export.stop().unwrap();
        assert!(check(&export.image(), Format::Qcow2).unwrap().is_clean());
    }
}

#[test]
fn four_queues_of_mixed_requests_are_all_answered_and_a_vanished_client_harms_nobody() {
    for engine in engines() {
        let mut export = Export::start(engine, false);
        for round in 0..3 {
            let mut client = export.client(4, 32);
            let pattern = Pattern {
                order: Order::Random { seed: round },
                reads_percent: 40,
                discards_percent: 10,
                ..Pattern::reads(8192, DISK_BYTES)
            };
            let outcome = client.run(pattern.jobs().take(4000)).unwrap();
            assert_eq!((outcome.requests, outcome.errors), (4000, 0));
            assert_eq!(outcome.bytes, 4000 * 8192);
            // Without a goodbye.
            drop(client);
        }
        export.stop().unwrap();
        assert!(check(&export.image(), Format::Qcow2).unwrap().is_clean());
    }
}

#[test]
fn told_to_stop_an_export_answers_what_is_under_way_and_closes_the_image() {
    for engine in engines() {
        let mut export = Export::start(engine, false);
        let mut client = export.client(2, 32);
        let running = std::thread::spawn(move || {
            let pattern = Pattern {
                reads_percent: 0,
                ..Pattern::reads(4096, DISK_BYTES)
            };
            client.run(pattern.jobs().take(1000))
        });
        assert_eq!(running.join().unwrap().unwrap().requests, 1000);
        let _idle = export.client(1, 1);
        export.stop().unwrap();
        assert!(check(&export.image(), Format::Qcow2).unwrap().is_clean());
    }
}

#[test]
fn a_read_only_export_says_so_and_refuses_writes() {
    let mut export = Export::start(IoEngine::Inline, true);
    let mut client = export.client(1, 4);
    assert_ne!(client.features() & feature::RO, 0);
    assert_eq!(client.features() & feature::WRITE_ZEROES, 0);
    let error = client.write_at(0, &[1; 512]).unwrap_err();
    assert!(matches!(error, ClientError::Status(1)), "{error}");
    client.execute(Access::Flush, 0, 0).unwrap();
    let past = client.execute(Access::Read, DISK_BYTES, 512).unwrap_err();
    assert!(matches!(past, ClientError::Status(1)), "{past}");
    drop(client);
    export.stop().unwrap();
}

#[test]
fn a_client_that_comes_while_another_is_served_waits_for_its_turn() {
    let mut export = Export::start(IoEngine::Inline, false);
    let first = export.client(1, 1);
    let socket = export.socket();
    let second = std::thread::spawn(move || {
        let options = ClientOptions {
            queues: 1,
            depth: 1,
            buffer_bytes: 4096,
        };
        let mut client = Client::connect(&socket, &options).unwrap();
        client.execute(Access::Flush, 0, 0).unwrap();
    });
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!second.is_finished());
    drop(first);
    second.join().unwrap();
    export.stop().unwrap();
}

#[test]
fn garbage_on_the_socket_ends_only_its_own_session() {
    let mut export = Export::start(IoEngine::Inline, false);
    let mut state = 0x1234_5678_9abc_def1_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..400 {
        let mut stream = UnixStream::connect(export.socket()).unwrap();
        // Half of them random bytes, half of them messages with a plausible header and a random body.
        for _ in 0..1 + random() % 6 {
            let mut message = Vec::new();
            if round % 2 == 0 {
                let length = random() % 64;
                message.extend((0..length).map(|_| random().to_le_bytes()[0]));
            } else {
                let request = 1 + u32::try_from(random() % 45).unwrap();
                let size = u32::try_from(random() % 72).unwrap();
                message.extend(request.to_ne_bytes());
                message.extend([1_u32, 9][usize::from(random() % 4 == 0)].to_ne_bytes());
                message.extend(size.to_ne_bytes());
                message.extend((0..size).map(|_| random().to_le_bytes()[3] & 0x83));
            }
            if stream.write_all(&message).is_err() {
                break;
            }
        }
        // Some stay for a moment, in the middle of a message.
        if round % 16 == 0 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    let mut client = export.client(1, 1);
    client.write_at(0, &[5; 512]).unwrap();
    drop(client);
    export.stop().unwrap();
}

#[test]
fn a_raw_image_is_served_as_well() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk.raw");
    create_raw(&image, 1 << 20).unwrap();
    let mut export = Export::serve(folder, &image, Format::Raw, IoEngine::Threads, false);
    let mut client = export.client(1, 2);
    let jobs = (0..16).map(|block| Job {
        access: Access::Write,
        offset: block * 65536,
        length: 65536,
    });
    assert_eq!(client.run(jobs).unwrap().errors, 0);
    drop(client);
    export.stop().unwrap();
    assert!(!std::fs::read(&image).unwrap().contains(&0));
}
