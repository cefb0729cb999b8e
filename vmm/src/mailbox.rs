//! How everybody else talks to the control thread: typed messages through a channel, and an event descriptor that wakes its loop.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use drover_api::definition::{LimitsConfig, VmConfig};
use drover_api::disks::{DiskView, JobChange, JobRequest, JobView, SnapshotRequest};
use drover_api::server::{Created, Reply};
use drover_api::types::{ShutdownRequest, VmView};
use drover_block::{Disk, IoError, JobHandle};
use drover_devices::platform::PowerRequest;
use drover_devices::virtio::block::handle::Stopped;
use tokio::sync::oneshot;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::vcpu::CrashReason;

/// Where a request's answer goes.
pub type Answer<T> = oneshot::Sender<Reply<T>>;

/// What the control thread is told.
pub enum Message {
    /// `GET /v1/vm`.
    View(Answer<VmView>),
    /// `PUT /v1/vm`.
    Create(Box<VmConfig>, Answer<Created>),
    /// `DELETE /v1/vm`.
    Delete(Answer<()>),
    /// `POST /v1/vm/start`.
    Start(Answer<VmView>),
    /// `POST /v1/vm/shutdown`.
    Shutdown(ShutdownRequest, Answer<VmView>),
    /// `POST /v1/vm/reset`.
    Reset(Answer<VmView>),
    /// `POST /v1/vm/pause`.
    Pause(Answer<VmView>),
    /// `POST /v1/vm/resume`.
    Resume(Answer<VmView>),
    /// Something about disks and their jobs.
    Disk(DiskMessage),
    /// `GET /v1/metrics`.
    Metrics(Answer<String>),
    /// The guest wants a reset or power-off.
    Power(PowerRequest),
    /// A vCPU cannot go on.
    Crashed(CrashReason),
}

/// What the control thread is told about disks. Disks go by their place in the definition.
pub enum DiskMessage {
    /// `GET /v1/vm/disks`.
    View(Answer<Vec<DiskView>>),
    /// `POST /v1/vm/disks/{disk}/resize`.
    Resize {
        /// Its id.
        disk: String,
        /// In bytes.
        size: u64,
        /// To whom.
        answer: Answer<DiskView>,
    },
    /// `POST /v1/vm/disks/snapshot`.
    Snapshot {
        /// What was asked for.
        request: SnapshotRequest,
        /// To whom.
        answer: Answer<Vec<DiskView>>,
    },
    /// `PUT /v1/vm/disks/{disk}/limits`.
    Limit {
        /// Its id.
        disk: String,
        /// From now on.
        limits: LimitsConfig,
        /// To whom.
        answer: Answer<DiskView>,
    },
    /// `POST /v1/vm/disks/{disk}/jobs`.
    BeginJob {
        /// Its id.
        disk: String,
        /// What was asked for.
        request: JobRequest,
        /// To whom.
        answer: Answer<JobView>,
    },
    /// `GET /v1/vm/jobs`.
    Jobs(Answer<Vec<JobView>>),
    /// `GET /v1/vm/jobs/{id}`.
    Job {
        /// Which.
        id: String,
        /// To whom.
        answer: Answer<JobView>,
    },
    /// `PATCH /v1/vm/jobs/{id}`.
    ChangeJob {
        /// Which.
        id: String,
        /// What was asked for.
        change: JobChange,
        /// To whom.
        answer: Answer<JobView>,
    },
    /// `DELETE /v1/vm/jobs/{id}`.
    DeleteJob {
        /// Which.
        id: String,
        /// To whom.
        answer: Answer<JobView>,
    },
    /// A disk's thread hands it over.
    Taken {
        /// For which exchange.
        exchange: u64,
        /// Which disk.
        index: usize,
        /// It.
        disk: Box<Disk>,
        /// How its last flush ended.
        flushed: Result<(), IoError>,
    },
    /// A disk's thread has begun a job, or could not.
    Begun {
        /// Which.
        job: u64,
        /// How to follow it.
        handle: Result<JobHandle, String>,
    },
    /// A request failed and is kept.
    Stopped {
        /// On which disk.
        index: usize,
        /// What failed.
        stopped: Stopped,
    },
}

/// The sending end; cheap to clone.
#[derive(Clone)]
pub struct Mailbox {
    sender: Sender<Message>,
    wake: Arc<EventFd>,
}

/// The control thread's end.
pub struct Inbox {
    receiver: Receiver<Message>,
    wake: Arc<EventFd>,
}

/// A mailbox and its inbox.
///
/// # Errors
/// No more descriptors.
pub fn mailbox() -> io::Result<(Mailbox, Inbox)> {
    let wake = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
    let (sender, receiver) = channel();
    Ok((
        Mailbox {
            sender,
            wake: wake.clone(),
        },
        Inbox { receiver, wake },
    ))
}

impl Mailbox {
    /// Sends `message`. If the control thread has ended, it is dropped, and with it the answer that somebody may wait for.
    pub fn send(&self, message: Message) {
        if self.sender.send(message).is_ok() {
            // The counter cannot overflow: the loop reads it back to zero each time it wakes.
            let _ = self.wake.write(1);
        }
    }
}

impl Inbox {
    /// Readable when messages wait.
    pub fn wake(&self) -> &EventFd {
        &self.wake
    }

    /// The next message, if one waits.
    pub fn next(&self) -> Option<Message> {
        self.receiver.try_recv().ok()
    }

    /// Quietens [`Inbox::wake`]; call before taking messages.
    pub fn acknowledge(&self) {
        // Not readable is fine: an earlier round took the message already.
        let _ = self.wake.read();
    }
}
