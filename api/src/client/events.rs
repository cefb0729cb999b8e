//! Reads server-sent events (WHATWG HTML §9.2.6), as far as our server sends them.

use http_body_util::BodyExt;
use hyper::body::Incoming;

use super::{ClientError, Result};
use crate::types::Event;

/// A line or an event longer than this is none of our server's, bytes.
const MAX_EVENT: usize = 1 << 20;

/// The events of one subscription.
#[derive(Debug)]
pub struct Events {
    body: Incoming,
    parser: Parser,
}

impl Events {
    pub(super) fn new(body: Incoming) -> Self {
        Self {
            body,
            parser: Parser::default(),
        }
    }

    /// Waits for the next event; `None` when the server has stopped.
    ///
    /// # Errors
    /// The connection broke, or something else than events came.
    pub async fn next(&mut self) -> Result<Option<Event>> {
        loop {
            if let Some(event) = self.parser.next()? {
                return Ok(Some(event));
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(Ok(frame)) => {
                    if let Some(bytes) = frame.data_ref() {
                        self.parser.push(bytes)?;
                    }
                }
                Some(Err(error)) => {
                    return Err(ClientError::Broken {
                        operation: "GET /v1/events".into(),
                        source: error.into(),
                    });
                }
            }
        }
    }
}

/// Bytes that have come and data lines of the event that is not complete.
#[derive(Debug, Default)]
struct Parser {
    pending: Vec<u8>,
    data: String,
}

impl Parser {
    fn push(&mut self, bytes: &[u8]) -> Result<()> {
        if self.pending.len() + self.data.len() + bytes.len() > MAX_EVENT {
            return Err(unexpected(format!(
                "an event of more than {MAX_EVENT} bytes"
            )));
        }
        self.pending.extend_from_slice(bytes);
        Ok(())
    }

    fn next(&mut self) -> Result<Option<Event>> {
        while let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            let line = std::str::from_utf8(&line).map_err(|error| unexpected(error.to_string()))?;
            let line = line.trim_end_matches(['\n', '\r']);
            if line.is_empty() && !self.data.is_empty() {
                let data = std::mem::take(&mut self.data);
                let event = serde_json::from_str(&data);
                return event
                    .map(Some)
                    .map_err(|error| unexpected(error.to_string()));
            }
            // The event's name is in the data, too; other fields and comments carry nothing.
            if let Some(data) = line.strip_prefix("data:") {
                self.data.push_str(data.strip_prefix(' ').unwrap_or(data));
                self.data.push('\n');
            }
        }
        Ok(None)
    }
}

fn unexpected(reason: String) -> ClientError {
    ClientError::Unexpected {
        operation: "GET /v1/events".into(),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::EventKind;

    #[test]
    fn events_arrive_whole_however_they_are_cut() {
        let text = ": alive\n\nevent: reset\ndata: {\"time_ms\":1,\r\ndata: \"event\":\"reset\"}\n\ndata:{\"time_ms\":2,\"event\":\"deleted\"}\n\n";
        for size in 1..text.len() {
            let mut parser = Parser::default();
            let mut events = Vec::new();
            for piece in text.as_bytes().chunks(size) {
                parser.push(piece).unwrap();
                while let Some(event) = parser.next().unwrap() {
                    events.push(event);
                }
            }
            let expected = [(1, EventKind::Reset), (2, EventKind::Deleted)];
            assert_eq!(
                events,
                expected.map(|(time_ms, kind)| Event { time_ms, kind }),
                "{size}"
            );
        }
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut parser = Parser::default();
        parser.push(&vec![b'x'; MAX_EVENT]).unwrap();
        assert!(parser.push(b"x").is_err());
    }
}
