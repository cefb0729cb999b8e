//! `drover image export`: the engine as a back end of other VMMs.

use std::io;
use std::path::PathBuf;
use std::thread::JoinHandle;

use clap::{Args, ValueEnum};
use drover_api::socket::{SocketError, bind_socket};
use drover_block::lease::LeaseRequest;
use drover_block::{Cache, Disk, DiskOptions, IoEngine};
use drover_devices::termination::TerminationSignals;
use drover_devices::thread::{ThreadRole, Threads};
use drover_devices::vhost_user::export::{Crashes, serve};
use drover_devices::virtio::block::{Block, BlockOptions, MAX_QUEUES};
use tracing_subscriber::EnvFilter;

use super::image_chain::{Chain, failure};
use crate::failure::Failure;

/// An image, and how it is served.
#[derive(Debug, Args)]
pub(crate) struct Export {
    /// The unix socket on which VMMs find the disk; made with mode 0600.
    #[arg(long, value_name = "SOCKET")]
    vhost_user_blk: PathBuf,
    #[command(flatten)]
    chain: Chain,
    /// Refuse writes; then others may read the same image.
    #[arg(long)]
    read_only: bool,
    /// Request queues, as many as the VMM may use.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_QUEUES)))]
    queues: u16,
    /// What moves the bytes [default: io_uring where the host allows it, else threads].
    #[arg(long, value_enum)]
    io: Option<Mover>,
    /// How the image is cached on the host; what lies below it always is.
    #[arg(long, value_enum, default_value_t = Caching::Direct)]
    cache: Caching,
    /// Make every write durable before it is answered, and let the VMM keep a record of requests under way: then it may go on with the
    /// next export after this process was killed.
    #[arg(long)]
    crash_safe: bool,
    /// Do without a lease, for a folder that cannot be written.
    #[arg(long)]
    no_lease: bool,
    /// The serial number that guests see, at most 20 bytes.
    #[arg(long, default_value = "drover")]
    serial: String,
}

/// What moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mover {
    /// An io_uring.
    Uring,
    /// A pool of threads.
    Threads,
}

/// How the image is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Caching {
    /// Past the page cache (O_DIRECT).
    Direct,
    /// Through the page cache.
    Buffered,
}

/// Entries of a ring as told to drivers through the greatest number of segments; rings themselves may be larger.
const QUEUE_SIZE: u16 = 128;

/// Serves the image until a signal ends it.
pub(crate) fn export(args: &Export) -> Result<(), Failure> {
    start_logging();
    let host = |error: io::Error| Failure::host(format!("cannot wait for signals: {error}"));
    let signals = TerminationSignals::take().map_err(host)?;
    let mut spec = args.chain.spec()?;
    spec.read_only = args.read_only;
    spec.top.cache = match args.cache {
        Caching::Direct => Cache::Direct,
        Caching::Buffered => Cache::Buffered,
    };
    let engine = match args.io {
        Some(Mover::Uring) => IoEngine::IoUring,
        Some(Mover::Threads) => IoEngine::Threads,
        None => IoEngine::asynchronous(),
    };
    let options = DiskOptions {
        engine,
        lease: (!args.no_lease).then(|| LeaseRequest {
            owner: "image export".to_owned(),
        }),
        ..DiskOptions::default()
    };
    let disk = Disk::open_with(&spec, options).map_err(failure)?;
    let (listener, _guard) = bind_socket(&args.vhost_user_blk).map_err(|error| match error {
        SocketError::Io { .. } => Failure::host(error.to_string()),
        _ => Failure::input(error.to_string()),
    })?;
    let options = BlockOptions {
        id: "export".to_owned(),
        serial: args.serial.clone(),
        queues: args.queues,
        queue_size: QUEUE_SIZE,
        // At most a cluster of 2 MiB.
        discard_granularity: u32::try_from(disk.discard_granularity()).unwrap_or(1 << 21),
    };
    let path = args.chain.path.display();
    let block = Block::new(disk, &options, &PlainThreads)
        .map_err(|error| Failure::host(format!("{path}: cannot be served: {error}")))?;
    let crashes = if args.crash_safe {
        Crashes::LoseNothing
    } else {
        Crashes::LoseCache
    };
    serve(
        &listener,
        block,
        crashes,
        std::os::fd::AsFd::as_fd(&signals),
    )
    .map_err(|error| Failure::host(format!("{path}: {error}")))
}

/// What happens is told on standard error; how much, RUST_LOG says.
fn start_logging() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_target(false)
        .init();
}

/// Threads without a policy: this process holds nothing but the image and what its client shares.
struct PlainThreads;

impl Threads for PlainThreads {
    fn spawn(
        &self,
        name: &str,
        _role: ThreadRole,
        body: Box<dyn FnOnce() + Send>,
    ) -> io::Result<JoinHandle<()>> {
        std::thread::Builder::new().name(name.into()).spawn(body)
    }
}
