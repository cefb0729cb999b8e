//! `drover-vmm`: one VM, one process.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | the guest powered off, or was shut down through the API or SIGTERM |
//! | 1 | something failed that is nobody's input |
//! | 2 | bad input: command line, definition, or a host that cannot give what the definition asks for |
//! | 3 | the guest crashed: the virtual machine could not go on |

use std::error::Error;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::JoinHandle;

use clap::Parser;
use drover_api::definition::{self, VmConfig};
use drover_api::server::{self, SocketGuard};
use drover_vmm::control::{Control, Outcome, Setup};
use drover_vmm::mailbox::mailbox;
use drover_vmm::metrics::Timeline;
use drover_vmm::process::{TerminationSignals, use_one_malloc_arena};
use drover_vmm::service::{PublishedState, Service};
use drover_vmm::threads::{Role, Sandbox, ThreadStarter, narrow};
use drover_vmm::vcpu::run_page::install_kick_handler;
use tokio::sync::{broadcast, oneshot};

/// Runs one virtual machine.
#[derive(Debug, Parser)]
#[command(name = "drover-vmm", version)]
struct Arguments {
    /// Unix socket of the API.
    #[arg(long, value_name = "PATH", required_unless_present = "config")]
    api_socket: Option<PathBuf>,
    /// Definition of a VM (YAML or JSON) to create and start at once.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// What is logged to standard error: error, warn, info, debug, trace, or per-module directives.
    #[arg(long, value_name = "LEVEL", default_value = "warn")]
    log_level: String,
    /// What happens at a system call that a thread's policy does not allow.
    #[arg(long, value_enum, default_value_t)]
    seccomp: Sandbox,
}

/// Events that a slow reader of `GET /v1/events` may be behind.
const EVENT_BACKLOG: usize = 64;

/// Why the process ends early.
enum Failure {
    /// Exit code 2.
    BadInput(String),
    /// Exit code 1.
    Other(String),
}

impl Failure {
    fn other(error: impl Into<Box<dyn Error>>) -> Self {
        Self::Other(error.into().to_string())
    }
}

fn main() -> ExitCode {
    let timeline = Timeline::begin();
    use_one_malloc_arena();
    let arguments = Arguments::parse();
    let (message, code) = match run(&arguments, timeline) {
        Ok(Outcome::Clean) => return ExitCode::SUCCESS,
        Ok(Outcome::Crashed) => ("the virtual machine could not go on".to_owned(), 3),
        Err(Failure::BadInput(message)) => (message, 2),
        Err(Failure::Other(message)) => (message, 1),
    };
    eprintln!("drover-vmm: {message}");
    ExitCode::from(code)
}

fn run(arguments: &Arguments, timeline: Timeline) -> Result<Outcome, Failure> {
    start_logging(&arguments.log_level)?;
    let config = arguments
        .config
        .as_deref()
        .map(read_definition)
        .transpose()?;
    // Before any thread exists, since threads inherit what is blocked.
    let signals = TerminationSignals::take().map_err(Failure::other)?;
    install_kick_handler().map_err(Failure::other)?;

    let (mailbox, inbox) = mailbox().map_err(Failure::other)?;
    let (events, _) = broadcast::channel(EVENT_BACKLOG);
    let published = Arc::new(PublishedState::default());
    let threads = ThreadStarter::new(arguments.seccomp);
    let mut control = Control::new(Setup {
        mailbox: mailbox.clone(),
        inbox,
        signals,
        threads,
        published: published.clone(),
        events: events.clone(),
        timeline,
    })
    .map_err(Failure::other)?;

    // The socket exists before the VM does: whoever started the process can wait for it, and another process's VM on the same socket
    // is noticed before anything is opened twice.
    let socket = arguments
        .api_socket
        .as_deref()
        .map(server::bind_socket)
        .transpose();
    let socket = socket.map_err(|error| Failure::BadInput(error.to_string()))?;
    // Children inherit a policy and can only narrow it, so the widest comes first.
    narrow(Role::Control, arguments.seccomp).map_err(Failure::other)?;

    if let Some(config) = config {
        let file = arguments.config.as_deref().unwrap_or(Path::new("-"));
        control
            .boot(config)
            .map_err(|error| Failure::BadInput(format!("{}: {error}", file.display())))?;
    }
    let api = socket
        .map(|socket| Api::start(socket, Service::new(mailbox, published, events), &threads))
        .transpose()?;
    let outcome = control.run().map_err(Failure::other);
    if let Some(api) = api {
        api.stop();
    }
    outcome
}

/// The API's thread, and its socket.
struct Api {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
    _socket: SocketGuard,
}

impl Api {
    fn start(
        (listener, guard): (std::os::unix::net::UnixListener, SocketGuard),
        service: Service,
        threads: &ThreadStarter,
    ) -> Result<Self, Failure> {
        let (stop, stopped) = oneshot::channel::<()>();
        let body = move || {
            let stopped = async {
                let _ = stopped.await;
            };
            if let Err(error) = server::run(listener, Arc::new(service), stopped) {
                tracing::error!(%error, "the API cannot be served");
            }
        };
        let thread = threads
            .start("api", Role::Api, body)
            .map_err(Failure::other)?;
        Ok(Self {
            stop,
            thread,
            _socket: guard,
        })
    }

    /// Returns once the replies in flight are with the clients.
    fn stop(self) {
        let _ = self.stop.send(());
        let _ = self.thread.join();
    }
}

fn read_definition(path: &Path) -> Result<VmConfig, Failure> {
    let name = path.display().to_string();
    let bad = |error: &dyn std::fmt::Display| Failure::BadInput(format!("{name}: {error}"));
    let text = std::fs::read(path).map_err(|error| bad(&error))?;
    let config =
        definition::parse(&text, &name).map_err(|error| Failure::BadInput(error.to_string()))?;
    config
        .validate()
        .map_err(|error| Failure::BadInput(error.with_source(&name).to_string()))?;
    Ok(config)
}

fn start_logging(level: &str) -> Result<(), Failure> {
    let filter = tracing_subscriber::EnvFilter::try_new(level)
        .map_err(|error| Failure::BadInput(format!("--log-level: {error}")))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    Ok(())
}
