//! A disk whose queues another process serves: the front end of vhost-user-blk.
//!
//! ```text
//!   guest doorbell ── ioeventfd ──────────────────────────────────────────> back end ── reads and writes the guest's memory (a memfd)
//!   guest <── vector ── thread of the device <── call eventfd ────────────── back end
//!   transport ── activate, reset ──> thread of the device ── messages ────> back end
//! ```
//!
//! | file | what |
//! |---|---|
//! | `back_end` | one connection to a back end: what is asked of it, in order |
//! | `relay` | the thread: hands calls on, connects again when the back end has gone |
//!
//! The back end may die and return at any time. Until it returns the guest's requests wait in the rings. Where it keeps a record of
//! what is under way (INFLIGHT_SHMFD) the next one finishes that; where not, the next one begins at the first request that was not
//! answered, which loses nothing if the last one answered in order, as it does with one request at a time.

mod back_end;
mod metrics;
mod relay;
#[cfg(test)]
mod tests;

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub use self::back_end::BackEndError;
pub use self::metrics::VhostUserMetrics;
use self::relay::{Message, Relay};
use crate::thread::{ThreadRole, Threads};
use crate::virtio::block::bits::Config;
use crate::virtio::net::thread_name;
use crate::virtio::worker::{Answers, Scope, Session, answer};
use crate::virtio::{
    ActivateError, Activation, ActiveQueue, DeviceType, Pending, VirtioDevice, read_config_bytes,
};

/// The longest that a back end may take over a message before its connection is cut.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is wanted of a back end.
#[derive(Clone, Debug)]
pub struct VhostUserBlkOptions {
    /// The device's name in thread names and messages.
    pub id: String,
    /// Where the back end listens.
    pub socket: PathBuf,
    /// Request queues, 1 to 64.
    pub queues: u16,
    /// Entries of each queue: a power of two, 2 to 1024.
    pub queue_size: u16,
}

/// The connection as others than its thread may touch it: to cut it.
#[derive(Default)]
struct Line(Mutex<Option<UnixStream>>);

impl Line {
    fn set(&self, stream: Option<UnixStream>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = stream;
    }

    /// Ends whatever the thread is waiting for.
    fn cut(&self) {
        if let Some(stream) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            // It may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// The disk's configuration space as the back end told it last.
type SharedConfig = Arc<Mutex<Config>>;

/// A disk that a back end serves.
pub struct VhostUserBlk {
    offered: u64,
    queue_sizes: Vec<u16>,
    config: SharedConfig,
    metrics: Arc<VhostUserMetrics>,
    inbox: Sender<Message>,
    bell: EventFd,
    line: Arc<Line>,
    thread: Option<JoinHandle<()>>,
}

impl VhostUserBlk {
    /// A device for the disk that a back end serves now.
    ///
    /// # Errors
    /// Nobody serves the socket, or not such a disk, or no answer comes; or the host has no thread or descriptor left.
    pub fn connect(
        options: &VhostUserBlkOptions,
        threads: &dyn Threads,
    ) -> Result<Self, BackEndError> {
        let host = BackEndError::Host;
        let line = Arc::new(Line::default());
        let config = SharedConfig::default();
        let metrics = Arc::new(VhostUserMetrics::default());
        let bell = EventFd::new(EFD_NONBLOCK).map_err(host)?;
        let (inbox, messages) = channel();
        let relay = Relay::new(
            options.clone(),
            messages,
            bell.try_clone().map_err(host)?,
            Arc::clone(&config),
            Arc::clone(&metrics),
            Arc::clone(&line),
        )
        .map_err(host)?;
        let (ready, greeted) = channel();
        let name = thread_name("vub", &options.id, "");
        let thread = threads
            .spawn(
                &name,
                ThreadRole::VhostUser,
                Box::new(move || relay.run(&ready)),
            )
            .map_err(host)?;
        let mut device = Self {
            offered: 0,
            queue_sizes: vec![options.queue_size; options.queues.into()],
            config,
            metrics,
            inbox,
            bell,
            line,
            thread: Some(thread),
        };
        device.offered = match greeted.recv_timeout(PATIENCE) {
            Ok(offered) => offered?,
            Err(RecvTimeoutError::Timeout) => {
                return Err(BackEndError::Silent(options.socket.clone()));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(host(io::Error::other("the device's thread did not start")));
            }
        };
        Ok(device)
    }

    /// Its counters.
    #[must_use]
    pub fn metrics(&self) -> Arc<VhostUserMetrics> {
        Arc::clone(&self.metrics)
    }

    fn send(&self, message: Message) -> Result<(), ActivateError> {
        self.inbox
            .send(message)
            .map_err(|_| ActivateError::ThreadGone)?;
        self.bell
            .write(1)
            .map_err(|error| ActivateError::Host("waking the device's thread", error))
    }

    fn stop_queues(&self, scope: Scope) -> Box<dyn Pending> {
        let (answer, answers) = answer();
        // A message that cannot be sent is dropped, and the answer in it with it.
        let _ = self.send(Message::Reset(scope, answer));
        Box::new(Patient {
            answers,
            since: Instant::now(),
            line: Arc::clone(&self.line),
        })
    }
}

impl Drop for VhostUserBlk {
    fn drop(&mut self) {
        let stopped = self.stop_queues(Scope::All);
        let _ = self.send(Message::Stop);
        // A thread that still waits for its first greeting has no queues to stop.
        if self.offered == 0 || !stopped.wait(PATIENCE) {
            self.line.cut();
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a device thread ended by a panic");
        }
    }
}

/// Waits for the back end to let go of queues, and cuts the connection to one that does not.
struct Patient {
    answers: Answers,
    since: Instant,
    line: Arc<Line>,
}

impl Patient {
    fn lose_patience(&self) {
        if self.since.elapsed() > PATIENCE {
            self.line.cut();
        }
    }
}

impl Pending for Patient {
    fn is_done(&self) -> bool {
        self.answers.is_done() || {
            self.lose_patience();
            false
        }
    }

    fn wait(&self, timeout: Duration) -> bool {
        self.answers.wait(timeout) || {
            self.lose_patience();
            false
        }
    }
}

impl VirtioDevice for VhostUserBlk {
    fn device_type(&self) -> DeviceType {
        DeviceType::Block
    }

    fn features(&self) -> u64 {
        self.offered
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let config = *self.config.lock().unwrap_or_else(PoisonError::into_inner);
        read_config_bytes(zerocopy::IntoBytes::as_bytes(&config), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation {
            memory,
            features,
            queues,
            interrupt,
        } = activation;
        let session = Session {
            memory,
            features,
            interrupt,
        };
        self.send(Message::Activate(session, queues))
    }

    fn reset(&mut self) -> Box<dyn Pending> {
        self.stop_queues(Scope::All)
    }

    fn reset_queue(&mut self, index: u16) -> Box<dyn Pending> {
        self.stop_queues(Scope::Queue(index))
    }

    fn enable_queue(&mut self, queue: ActiveQueue) -> Result<(), ActivateError> {
        self.send(Message::EnableQueue(queue))
    }
}
