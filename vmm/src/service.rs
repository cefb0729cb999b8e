//! The API's view of the VM: each call becomes a message to the control thread and waits for its answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use drover_api::definition::VmConfig;
use drover_api::server::{Created, Reply, VmService};
use drover_api::types::{ApiError, ErrorCode, Event, Info, ShutdownRequest, VmState, VmView};
use tokio::sync::{broadcast, oneshot};

use crate::mailbox::{Answer, Mailbox, Message};

/// The VM's state as the control thread publishes it, readable without waiting for that thread.
#[derive(Debug, Default)]
pub struct PublishedState(AtomicU8);

const STATES: [VmState; 4] = [
    VmState::Created,
    VmState::Running,
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
