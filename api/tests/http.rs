//! The server as clients see it: ours, and raw bytes on the socket.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use drover_api::client::{ClientError, blocking};
use drover_api::definition::{VmConfig, parse};
use drover_api::server::{self, SocketGuard};
use drover_api::types::{ApiError, ErrorCode, EventKind, ShutdownRequest, StopReason, VmState};
use tokio::sync::oneshot;

mod memory;

use memory::MemoryService;

struct Server {
    folder: tempfile::TempDir,
    service: Arc<MemoryService>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _guard: SocketGuard,
}

impl Server {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (listener, guard) = server::bind_socket(&folder.path().join("api.sock")).unwrap();
        let service = Arc::new(MemoryService::new());
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::spawn({
            let service = Arc::clone(&service);
            move || {
                let stopped = async { drop(stopped.await) };
                server::run(listener, service, stopped).unwrap();
            }
        });
        Self {
            folder,
            service,
            stop: Some(stop),
            thread: Some(thread),
            _guard: guard,
        }
    }

    fn client(&self) -> blocking::Client {
        blocking::Client::new(self.folder.path().join("api.sock")).unwrap()
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.folder.path().join("api.sock")).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        stream
    }

    /// Sends a request and returns status, header and body of the reply.
    fn raw(&self, request: &[u8]) -> (u16, String, String) {
        let mut stream = self.connect();
        // A refusal may come, and the connection be closed, before all is sent.
        let _ = stream.write_all(request);
        let mut reply = Vec::new();
        let _ = stream.read_to_end(&mut reply);
        let reply = String::from_utf8(reply).unwrap();
        let (head, body) = reply
            .split_once("\r\n\r\n")
            .unwrap_or_else(|| panic!("no reply: {reply:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, head.to_ascii_lowercase(), body.to_owned())
    }

    fn refusal(&self, method: &str, path: &str, content_type: &str, body: &str) -> (u16, ApiError) {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let (status, head, body) = self.raw(request.as_bytes());
        assert!(head.contains("content-type: application/json"), "{head}");
        (status, serde_json::from_str(&body).unwrap())
    }

    fn stop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

const DEFINITION: &str = "name: t1\nmemory: {size: 64MiB}\nboot: {kernel: /x/vmlinux}\n";

fn definition() -> VmConfig {
    parse(DEFINITION.as_bytes(), "test").unwrap()
}

fn code(error: ClientError) -> ErrorCode {
    match error {
        ClientError::Refused(error) => error.code,
        other => panic!("{other}"),
    }
}

#[test]
fn a_vm_lives_through_the_client() {
    let server = Server::start();
    let client = server.client();
    assert_eq!(client.info().unwrap().state, None);
    assert_eq!(code(client.vm().unwrap_err()), ErrorCode::NoVm);
    assert_eq!(
        client.create(&definition()).unwrap().state,
        VmState::Created
    );
    assert_eq!(client.start().unwrap().state, VmState::Running);
    assert_eq!(client.reset().unwrap().resets, 1);
    let stopped = client.shutdown(ShutdownRequest::default()).unwrap();
    assert_eq!(
        (stopped.state, stopped.stop_reason),
        (VmState::Stopped, Some(StopReason::PoweredOff))
    );
    assert_eq!(client.vm().unwrap(), stopped);
    client.delete().unwrap();
    assert_eq!(code(client.vm().unwrap_err()), ErrorCode::NoVm);
    assert!(client.metrics().unwrap().contains("drover_up 1"));
}

#[test]
fn what_is_so_already_is_a_success_and_what_cannot_be_tells_the_state() {
    let server = Server::start();
    let client = server.client();
    client.delete().unwrap();
    client.create(&definition()).unwrap();
    client.create(&definition()).unwrap();
    let other = VmConfig {
        name: "t2".into(),
        ..definition()
    };
    assert_eq!(
        code(client.create(&other).unwrap_err()),
        ErrorCode::WrongState
    );
    client.start().unwrap();
    client.start().unwrap();
    let ClientError::Refused(error) = client.delete().unwrap_err() else {
        panic!()
    };
    assert_eq!((error.status(), error.state), (409, Some(VmState::Running)));
}

#[test]
fn a_definition_in_yaml_is_taken_as_well() {
    let server = Server::start();
    let request = format!(
        "PUT /v1/vm HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/yaml; charset=utf-8\r\ncontent-length: {}\r\n\r\n{DEFINITION}",
        DEFINITION.len()
    );
    let (status, _, body) = server.raw(request.as_bytes());
    assert_eq!(status, 201, "{body}");
    assert_eq!(server.client().vm().unwrap().config, definition());
}

#[test]
fn bad_bodies_are_refused_with_the_field() {
    let server = Server::start();
    let put = |body: &str| server.refusal("PUT", "/v1/vm", "application/json", body);
    let (status, error) = put(
        r#"{"name":"a","memory":{"size":"64MiB"},"boot":{"kernel":"/k"},"disks":[{"id":"d","path":"/d","format":"vmdk"}]}"#,
    );
    assert_eq!(
        (status, error.field.as_deref()),
        (400, Some("disks[0].format"))
    );
    let (status, error) = put(r#"{"name":"a","memory":{"size":"63MiB"},"boot":{"kernel":"/k"}}"#);
    assert_eq!((status, error.field.as_deref()), (422, Some("memory.size")));
    for body in ["", "{", "[]", "null", "\"x\"", "\u{0}", r#"{"name":1}"#] {
        let (status, error) = put(body);
        assert_eq!(
            (status, error.code),
            (400, ErrorCode::Malformed),
            "{body:?}"
        );
    }
    let shutdown = |body: &str| {
        server
            .refusal("POST", "/v1/vm/shutdown", "application/json", body)
            .0
    };
    assert_eq!(shutdown(r#"{"timeout":1}"#), 400);
    assert_eq!(shutdown(r#"{"timeout_ms":-1}"#), 400);
    assert_eq!(shutdown(r#"{"timeout_ms":3600001}"#), 422);
    assert_eq!(shutdown("null"), 404, "sound, but there is no VM");
}

#[test]
fn other_types_paths_and_methods_are_refused_by_name() {
    let server = Server::start();
    let refusal = |method, path, kind| server.refusal(method, path, kind, "{}");
    assert_eq!(refusal("PUT", "/v1/vm", "text/plain").0, 415);
    assert_eq!(refusal("PUT", "/v1/vm", "").0, 415);
    assert_eq!(refusal("POST", "/v1/vm/shutdown", "text/plain").0, 415);
    assert_eq!(
        refusal("GET", "/v2/vm", "application/json").1.code,
        ErrorCode::NotFound
    );
    assert_eq!(
        refusal("PATCH", "/v1/info", "application/json").1.code,
        ErrorCode::MethodNotAllowed
    );
    let (status, head, _) =
        server.raw(b"PATCH /v1/vm HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    let allow = head
        .lines()
        .find_map(|line| line.strip_prefix("allow: "))
        .unwrap();
    let mut allow: Vec<_> = allow.split(',').map(str::trim).collect();
    allow.sort_unstable();
    assert_eq!((status, allow), (405, vec!["delete", "get", "head", "put"]));
}

#[test]
fn what_is_too_large_is_refused_whether_it_is_announced_or_not() {
    let server = Server::start();
    let put =
        "PUT /v1/vm HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n";
    let announced = format!("{put}content-length: 1048577\r\n\r\n");
    assert_eq!(server.raw(announced.as_bytes()).0, 413);
    let chunk = "x".repeat(0x1000);
    let chunks = format!("1000\r\n{chunk}\r\n").repeat(257);
    let chunked = format!("{put}transfer-encoding: chunked\r\n\r\n{chunks}0\r\n\r\n");
    assert_eq!(server.raw(chunked.as_bytes()).0, 413);
    let header = format!(
        "GET /v1/info HTTP/1.1\r\nhost: x\r\nfill: {}\r\n\r\n",
        "x".repeat(20_000)
    );
    assert_eq!(server.raw(header.as_bytes()).0, 431);
}

#[test]
fn a_body_that_nests_without_end_is_refused_and_the_server_goes_on() {
    let server = Server::start();
    let deep = [
        ("application/json", r#"{"a":"#.repeat(100_000)),
        (
            "application/json",
            format!("{}1{}", r#"{"a":"#.repeat(120), "}".repeat(120)),
        ),
        ("application/json", r#"{"a":["#.repeat(60)),
        ("application/yaml", "- ".repeat(100_000)),
        ("application/yaml", "? ".repeat(100_000)),
        (
            "application/yaml",
            format!("a: {}{}", "[".repeat(120), "]".repeat(120)),
        ),
    ];
    for (kind, body) in deep {
        let mut stream = server.connect();
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        let head = format!(
            "PUT /v1/vm HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        assert!(reply.starts_with("HTTP/1.1 400"), "{reply}");
    }
    server.client().info().unwrap();
}

#[test]
fn events_reach_every_reader_and_a_slow_one_learns_what_it_missed() {
    let server = Server::start();
    let (first, second) = (server.client(), server.client());
    let mut events = first.events().unwrap();
    let mut slow = second.events().unwrap();
    server.client().create(&definition()).unwrap();
    server.client().start().unwrap();
    let running = EventKind::State {
        state: VmState::Running,
        stop_reason: None,
    };
    assert_eq!(events.next().unwrap().unwrap().kind, running);
    assert_eq!(slow.next().unwrap().unwrap().kind, running);
    // The kernel's buffer and the server's take some; what does not fit is counted.
    let reason = "x".repeat(50_000);
    for _ in 0..200 {
        server.service.publish(EventKind::Crashed {
            reason: reason.clone(),
        });
    }
    let (mut seen, mut missed) = (0, 0);
    while seen + missed < 200 {
        match slow.next().unwrap().unwrap().kind {
            EventKind::Lagged { missed: more } => missed += more,
            _ => seen += 1,
        }
    }
    assert!(missed > 0 && seen > 0, "{missed} missed, {seen} seen");
}

#[test]
fn more_readers_of_events_than_allowed_are_refused_until_one_leaves() {
    let server = Server::start();
    let clients: Vec<_> = (0..server::limits::SUBSCRIBERS)
        .map(|_| server.client())
        .collect();
    let mut readers: Vec<_> = clients
        .iter()
        .map(|client| client.events().unwrap())
        .collect();
    let late = server.client();
    assert_eq!(code(late.events().unwrap_err()), ErrorCode::TooMany);
    drop(readers.pop());
    drop(clients);
    let admitted = (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(20));
        late.events().is_ok()
    });
    assert!(admitted);
}

#[test]
fn a_stopping_server_ends_its_streams_after_their_last_event_and_finishes_its_replies() {
    let mut server = Server::start();
    let client = server.client();
    let mut events = client.events().unwrap();
    // Half a request is on its way when the server is told to stop.
    let mut pending = server.connect();
    pending
        .write_all(b"PUT /v1/vm HTTP/1.1\r\nhost: x\r\ncontent-type: application/yaml\r\ncontent-length: 58\r\n\r\nname: t1\n")
        .unwrap();
    std::thread::sleep(Duration::from_millis(100));
    server.service.publish(EventKind::Deleted);
    drop(server.stop.take());
    std::thread::sleep(Duration::from_millis(100));
    pending.write_all(&DEFINITION.as_bytes()[9..]).unwrap();
    let mut reply = String::new();
    pending.read_to_string(&mut reply).unwrap();
    assert!(reply.starts_with("HTTP/1.1 201"), "{reply}");
    assert_eq!(events.next().unwrap().unwrap().kind, EventKind::Deleted);
    assert_eq!(events.next().unwrap(), None);
    server.stop();
    assert!(server.client().info().unwrap_err().is_absent());
}

#[test]
fn the_document_is_served() {
    let server = Server::start();
    let (status, head, body) =
        server.raw(b"GET /v1/openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    assert_eq!(status, 200);
    assert!(head.contains("content-type: application/json"), "{head}");
    assert_eq!(body, server::openapi::DOCUMENT);
}

#[test]
fn nobody_on_the_socket_is_an_error_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let client = blocking::Client::new(folder.path().join("none.sock")).unwrap();
    let error = client.info().unwrap_err();
    assert!(error.is_absent(), "{error}");
    assert!(
        error
            .to_string()
            .contains(Path::new("none.sock").to_str().unwrap()),
        "{error}"
    );
}
