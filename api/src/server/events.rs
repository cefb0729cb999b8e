//! `GET /v1/events`: server-sent events (WHATWG HTML §9.2). A reader that is too slow is told how many it missed.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::response::sse::{self, KeepAlive, Sse};
use tokio::sync::{OwnedSemaphorePermit, broadcast, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;
use tokio_stream::wrappers::{BroadcastStream, WatchStream};

use crate::types::{Event, EventKind};

/// How often a silent stream shows that it lives.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Ends when the server stops, after the events that were there by then.
pub(super) struct EventStream {
    events: BroadcastStream<Event>,
    stopped: WatchStream<bool>,
    _place: OwnedSemaphorePermit,
}

impl EventStream {
    pub(super) fn reply(
        events: broadcast::Receiver<Event>,
        stopped: watch::Receiver<bool>,
        place: OwnedSemaphorePermit,
    ) -> Sse<impl Stream<Item = Result<sse::Event, Infallible>>> {
        let stream = Self {
            events: BroadcastStream::new(events),
            stopped: WatchStream::new(stopped),
            _place: place,
        };
        Sse::new(stream).keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
    }
}

impl Stream for EventStream {
    type Item = Result<sse::Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match Pin::new(&mut self.events).poll_next(context) {
            Poll::Ready(Some(Ok(event))) => return Poll::Ready(Some(Ok(message(&event)))),
            Poll::Ready(Some(Err(BroadcastStreamRecvError::Lagged(missed)))) => {
                return Poll::Ready(Some(Ok(message(&lagged(missed)))));
            }
            Poll::Ready(None) => return Poll::Ready(None),
            Poll::Pending => {}
        }
        loop {
            match Pin::new(&mut self.stopped).poll_next(context) {
                Poll::Ready(Some(false)) => {}
                Poll::Ready(Some(true) | None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

fn lagged(missed: u64) -> Event {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let time_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    Event {
        time_ms,
        kind: EventKind::Lagged { missed },
    }
}

fn message(event: &Event) -> sse::Event {
    let message = sse::Event::default().event(event.kind.name());
    // Only maps with keys that are no text fail to serialise, and an event has none; a comment then says so.
    message
        .json_data(event)
        .unwrap_or_else(|error| sse::Event::default().comment(error.to_string()))
}
