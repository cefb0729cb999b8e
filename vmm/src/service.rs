//! The API's view of the VM: each call becomes a message to the control thread and waits for its answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use drover_api::definition::{LimitsConfig, VmConfig};
use drover_api::disks::{DiskView, JobChange, JobRequest, JobView, ResizeRequest, SnapshotRequest};
use drover_api::server::{Created, Reply, VmService};
use drover_api::types::{ApiError, ErrorCode, Event, Info, ShutdownRequest, VmState, VmView};
use tokio::sync::{broadcast, oneshot};

use crate::mailbox::{Answer, DiskMessage, Mailbox, Message};

/// The VM's state as the control thread publishes it, readable without waiting for that thread.
#[derive(Debug, Default)]
pub struct PublishedState(AtomicU8);

const STATES: [VmState; 5] = [
    VmState::Created,
    VmState::Running,
    VmState::Paused,
    VmState::ShuttingDown,
    VmState::Stopped,
];

impl PublishedState {
    /// Publishes `state`; `None` while there is no VM.
    pub fn set(&self, state: Option<VmState>) {
        let number = state.and_then(|state| STATES.iter().position(|known| *known == state));
        self.0
            .store(number.map_or(0, |index| index as u8 + 1), Ordering::Release);
    }

    /// The state published last.
    pub fn get(&self) -> Option<VmState> {
        let number = self.0.load(Ordering::Acquire);
        STATES.get(usize::from(number.checked_sub(1)?)).copied()
    }
}

/// [`VmService`] by messages.
pub struct Service {
    mailbox: Mailbox,
    state: Arc<PublishedState>,
    events: broadcast::Sender<Event>,
}

impl Service {
    /// A service in front of the control thread that owns `mailbox`'s other end.
    pub fn new(
        mailbox: Mailbox,
        state: Arc<PublishedState>,
        events: broadcast::Sender<Event>,
    ) -> Self {
        Self {
            mailbox,
            state,
            events,
        }
    }

    async fn ask<T>(&self, message: impl FnOnce(Answer<T>) -> Message) -> Reply<T> {
        let (answer, reply) = oneshot::channel();
        self.mailbox.send(message(answer));
        reply
            .await
            .unwrap_or_else(|_| Err(ApiError::new(ErrorCode::Internal, "the process is ending")))
    }
}

impl VmService for Service {
    async fn info(&self) -> Reply<Info> {
        Ok(Info {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            state: self.state.get(),
        })
    }

    async fn vm(&self) -> Reply<VmView> {
        self.ask(Message::View).await
    }

    async fn create(&self, config: VmConfig) -> Reply<Created> {
        self.ask(|answer| Message::Create(Box::new(config), answer))
            .await
    }

    async fn delete(&self) -> Reply<()> {
        self.ask(Message::Delete).await
    }

    async fn start(&self) -> Reply<VmView> {
        self.ask(Message::Start).await
    }

    async fn shutdown(&self, request: ShutdownRequest) -> Reply<VmView> {
        self.ask(|answer| Message::Shutdown(request, answer)).await
    }

    async fn reset(&self) -> Reply<VmView> {
        self.ask(Message::Reset).await
    }

    async fn pause(&self) -> Reply<VmView> {
        self.ask(Message::Pause).await
    }

    async fn resume(&self) -> Reply<VmView> {
        self.ask(Message::Resume).await
    }

    async fn disks(&self) -> Reply<Vec<DiskView>> {
        self.ask(|answer| Message::Disk(DiskMessage::View(answer)))
            .await
    }

    async fn resize(&self, disk: String, request: ResizeRequest) -> Reply<DiskView> {
        let size = request.size.0;
        self.ask(|answer| Message::Disk(DiskMessage::Resize { disk, size, answer }))
            .await
    }

    async fn snapshot(&self, request: SnapshotRequest) -> Reply<Vec<DiskView>> {
        self.ask(|answer| Message::Disk(DiskMessage::Snapshot { request, answer }))
            .await
    }

    async fn limit(&self, disk: String, limits: LimitsConfig) -> Reply<DiskView> {
        self.ask(|answer| {
            Message::Disk(DiskMessage::Limit {
                disk,
                limits,
                answer,
            })
        })
        .await
    }

    async fn begin_job(&self, disk: String, request: JobRequest) -> Reply<JobView> {
        self.ask(|answer| {
            Message::Disk(DiskMessage::BeginJob {
                disk,
                request,
                answer,
            })
        })
        .await
    }

    async fn jobs(&self) -> Reply<Vec<JobView>> {
        self.ask(|answer| Message::Disk(DiskMessage::Jobs(answer)))
            .await
    }

    async fn job(&self, id: String) -> Reply<JobView> {
        self.ask(|answer| Message::Disk(DiskMessage::Job { id, answer }))
            .await
    }

    async fn change_job(&self, id: String, change: JobChange) -> Reply<JobView> {
        self.ask(|answer| Message::Disk(DiskMessage::ChangeJob { id, change, answer }))
            .await
    }

    async fn delete_job(&self, id: String) -> Reply<JobView> {
        self.ask(|answer| Message::Disk(DiskMessage::DeleteJob { id, answer }))
            .await
    }

    async fn metrics(&self) -> Reply<String> {
        self.ask(Message::Metrics).await
    }

    fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_published_state_reads_back() {
        let published = PublishedState::default();
        assert_eq!(published.get(), None);
        for state in STATES {
            published.set(Some(state));
            assert_eq!(published.get(), Some(state));
        }
        published.set(None);
        assert_eq!(published.get(), None);
    }
}
