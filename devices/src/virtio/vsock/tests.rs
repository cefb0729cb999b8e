//! The socket device driven through its queues, with a driver that plays the guest's side of the protocol.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::Ordering;

use zerocopy::{FromBytes, IntoBytes};

use super::bits::{
    EVENT, HEADER_BYTES, HOST_CID, Header, RECEIVE, TRANSMIT, TYPE_STREAM, op, shutdown,
};
use super::*;
use crate::virtio::testing::{
    DriverQueue, Guest, PATIENCE, PlainThreads, eventually, readable, reset, writable,
};

const CID: u64 = 7;
const ROOM: u32 = 64 * 1024;

struct Fixture {
    folder: tempfile::TempDir,
    guest: Guest,
    device: Vsock,
    queues: Vec<DriverQueue>,
    /// Where the buffer of each receive descriptor lies.
    buffers: Vec<u64>,
    scratch: u64,
}

const BUFFER: usize = HEADER_BYTES + 4096;

fn fixture() -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vsock");
    let listener = UnixListener::bind(&path).unwrap();
    let device = Vsock::new(CID, path, listener, &PlainThreads).unwrap();
    let mut guest = Guest::new();
    let queues: Vec<DriverQueue> = (0..3).map(|n| guest.queue(n, 16)).collect();
    let buffers = (0..16).map(|_| guest.allocate(BUFFER as u64)).collect();
    let scratch = guest.allocate(1 << 20);
    let mut f = Fixture {
        folder,
        guest,
        device,
        queues,
        buffers,
        scratch,
    };
    f.activate();
    f
}

impl Fixture {
    fn activate(&mut self) {
        let queues: Vec<&DriverQueue> = self.queues.iter().collect();
        let activation = self.guest.activation(0, &queues);
        self.device.activate(activation).unwrap();
        for buffer in self.buffers.clone() {
            self.queues[usize::from(RECEIVE)].offer(&[writable(buffer, BUFFER)]);
        }
        self.queues[usize::from(RECEIVE)].ring();
    }

    fn client(&self) -> UnixStream {
        let stream = UnixStream::connect(self.folder.path().join("vsock")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    fn say_with(&mut self, header: &Header, bytes: &[u8]) {
        let mut packet = header.as_bytes().to_vec();
        packet.extend_from_slice(bytes);
        let address = vm_memory::GuestAddress(self.scratch);
        vm_memory::Bytes::write_slice(&*self.guest.memory, &packet, address).unwrap();
        let queue = &mut self.queues[usize::from(TRANSMIT)];
        queue.offer(&[readable(self.scratch, packet.len())]);
        queue.ring();
        queue.wait();
    }

    fn say(&mut self, host_port: u32, guest_port: u32, op: u16, bytes: &[u8]) {
        let header = header(host_port, guest_port, op, bytes.len() as u32);
        self.say_with(&header, bytes);
    }

    fn hear_any(&mut self) -> Option<(Header, Vec<u8>)> {
        let queue = &mut self.queues[usize::from(RECEIVE)];
        let (head, length) = queue.used()?;
        let buffer = self.buffers[usize::from(head)];
        let packet = self.guest.read(buffer, length as usize);
        queue.offer(&[writable(buffer, BUFFER)]);
        queue.ring();
        let (header, rest) = Header::read_from_prefix(&packet).unwrap();
        assert_eq!(header.dst_cid.get(), CID);
        assert_eq!(rest.len(), header.len.get() as usize);
        Some((header, rest.to_vec()))
    }

    fn hear(&mut self) -> (Header, Vec<u8>) {
        let mut heard = None;
        eventually("a packet", || {
            heard = self.hear_any();
            heard.is_some()
        });
        heard.unwrap()
    }

    fn expect(&mut self, op: u16) -> Header {
        let (header, _) = self.hear();
        assert_eq!(header.op.get(), op, "{header:?}");
        header
    }

    /// A connection that the guest asked for; the host's end of it.
    fn guest_opens(&mut self, guest_port: u32) -> UnixStream {
        let path = self.folder.path().join("vsock_1234");
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(path).unwrap();
        self.say(1234, guest_port, op::REQUEST, b"");
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        self.expect(op::RESPONSE);
        stream
    }
}

fn header(host_port: u32, guest_port: u32, op: u16, length: u32) -> Header {
    Header {
        src_cid: CID.into(),
        dst_cid: HOST_CID.into(),
        src_port: guest_port.into(),
        dst_port: host_port.into(),
        len: length.into(),
        kind: TYPE_STREAM.into(),
        op: op.into(),
        buf_alloc: ROOM.into(),
        ..Header::default()
    }
}

#[test]
fn a_program_of_the_host_reaches_a_port_of_the_guest() {
    let mut f = fixture();
    let mut client = f.client();
    client.write_all(b"CONNECT 5000\n").unwrap();
    let request = f.expect(op::REQUEST);
    assert_eq!(request.dst_port.get(), 5000);
    let port = request.src_port.get();
    f.say(port, 5000, op::RESPONSE, b"");
    let mut line = vec![0; format!("OK {port}\n").len()];
    client.read_exact(&mut line).unwrap();
    assert_eq!(line, format!("OK {port}\n").as_bytes());
    client.write_all(b"question").unwrap();
    let (packet, bytes) = f.hear();
    assert_eq!((packet.op.get(), &*bytes), (op::RW, &b"question"[..]));
    f.say(port, 5000, op::RW, b"answer");
    let mut answer = [0; 6];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"answer");
}

#[test]
fn a_program_of_the_guest_reaches_a_socket_of_the_host_or_is_refused() {
    let mut f = fixture();
    let mut stream = f.guest_opens(9);
    f.say(1234, 9, op::RW, b"hello");
    let mut hello = [0; 5];
    stream.read_exact(&mut hello).unwrap();
    assert_eq!(&hello, b"hello");
    f.say(4321, 9, op::REQUEST, b"");
    let refusal = f.expect(op::RST);
    assert_eq!(refusal.src_port.get(), 4321);
    let metrics = f.device.metrics();
    assert_eq!(metrics.connections.load(Ordering::Relaxed), 1);
    assert_eq!(metrics.refused.load(Ordering::Relaxed), 1);
}

#[test]
fn either_side_can_close_one_direction_and_go_on_in_the_other() {
    let mut f = fixture();
    let mut stream = f.guest_opens(9);
    stream.write_all(b"last").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let (_, bytes) = f.hear();
    assert_eq!(bytes, b"last");
    let end = f.expect(op::SHUTDOWN);
    assert_eq!(end.flags.get(), shutdown::SEND);
    f.say(1234, 9, op::RW, b"still");
    let mut still = [0; 5];
    stream.read_exact(&mut still).unwrap();
    let mut end = header(1234, 9, op::SHUTDOWN, 0);
    end.flags = shutdown::BOTH.into();
    f.say_with(&end, b"");
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
    f.expect(op::RST);
}

#[test]
fn a_client_that_leaves_ends_the_connection() {
    let mut f = fixture();
    let stream = f.guest_opens(9);
    drop(stream);
    let end = f.expect(op::SHUTDOWN);
    assert_eq!(end.flags.get(), shutdown::BOTH);
    f.say(1234, 9, op::RST, b"");
    let metrics = f.device.metrics();
    eventually("the connection to go", || {
        metrics.connections.load(Ordering::Relaxed) == 0
    });
}

#[test]
fn a_client_that_leaves_or_says_nonsense_before_connect_is_forgotten() {
    let mut f = fixture();
    drop(f.client());
    for words in [&b"GET / HTTP/1.1\n"[..], b"CONNECT x\n"] {
        let mut client = f.client();
        client.write_all(words).unwrap();
        assert_eq!(client.read(&mut [0]).unwrap(), 0, "the end");
    }
    let mut client = f.client();
    client.write_all(b"CONNECT 1\n").unwrap();
    f.expect(op::REQUEST);
}

#[test]
fn the_guest_is_sent_no_more_than_it_has_room_for() {
    let mut f = fixture();
    let mut stream = f.guest_opens(9);
    let sender = std::thread::spawn(move || {
        let bytes: Vec<u8> = (0..200_000u32).map(|n| n as u8).collect();
        stream.write_all(&bytes).unwrap();
        (stream, bytes)
    });
    let mut seen = Vec::new();
    while seen.len() < ROOM as usize {
        seen.extend(f.hear().1);
    }
    assert_eq!(seen.len(), ROOM as usize);
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(f.hear_any().is_none(), "no credit, no bytes");
    while seen.len() < 200_000 {
        let mut update = header(1234, 9, op::CREDIT_UPDATE, 0);
        update.fwd_cnt = (seen.len() as u32).into();
        f.say_with(&update, b"");
        let until = (seen.len() + ROOM as usize).min(200_000);
        while seen.len() < until {
            seen.extend(f.hear().1);
        }
    }
    let (_stream, bytes) = sender.join().unwrap();
    assert!(seen == bytes);
}

#[test]
fn a_guest_that_sends_more_than_it_may_loses_its_connection() {
    let mut f = fixture();
    let _stream = f.guest_opens(9);
    let block = vec![1; 200_000];
    let mut ended = false;
    for _ in 0..20 {
        f.say(1234, 9, op::RW, &block);
        while let Some((packet, _)) = f.hear_any() {
            ended |= packet.op.get() == op::RST;
        }
        if ended {
            break;
        }
    }
    assert!(ended);
    assert!(!f.guest.needs_reset());
}

#[test]
fn credit_is_told_when_it_has_grown_and_when_it_is_asked_for() {
    let mut f = fixture();
    let mut stream = f.guest_opens(9);
    f.say(1234, 9, op::CREDIT_REQUEST, b"");
    assert_eq!(f.expect(op::CREDIT_UPDATE).fwd_cnt.get(), 0);
    let block = vec![1; 150_000];
    let reader = std::thread::spawn(move || {
        let mut seen = vec![0; 150_000];
        stream.read_exact(&mut seen).unwrap();
        stream
    });
    f.say(1234, 9, op::RW, &block);
    let _stream = reader.join().unwrap();
    let update = f.expect(op::CREDIT_UPDATE);
    assert!(update.fwd_cnt.get() >= 128 * 1024);
}

#[test]
fn a_guest_that_never_answers_a_request_costs_the_client_two_seconds() {
    let mut f = fixture();
    let mut client = f.client();
    client.write_all(b"CONNECT 5000\n").unwrap();
    f.expect(op::REQUEST);
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    f.expect(op::RST);
}

#[test]
fn packets_that_belong_nowhere_are_refused() {
    let mut f = fixture();
    let mut wrong_cid = header(1, 2, op::RW, 0);
    wrong_cid.dst_cid = 3u64.into();
    let mut wrong_kind = header(1, 2, op::REQUEST, 0);
    wrong_kind.kind = 2u16.into();
    for packet in [
        wrong_cid,
        wrong_kind,
        header(1, 2, op::RW, 0),
        header(1, 2, 99, 0),
    ] {
        f.say_with(&packet, b"");
        f.expect(op::RST);
    }
    f.say(1, 2, op::RST, b"");
    let _stream = f.guest_opens(3);
}

#[test]
fn malformed_packets_break_the_queue_and_not_the_process() {
    let shapes: [fn(&mut Fixture); 4] = [
        |f| {
            let address = f.guest.place(&[0; 20]);
            f.queues[1].offer(&[readable(address, 20)]);
        },
        |f| {
            let lie = header(1, 2, op::RW, 5000);
            let address = f.guest.place(lie.as_bytes());
            f.queues[1].offer(&[readable(address, HEADER_BYTES)]);
        },
        |f| {
            f.queues[1].offer(&[writable(f.scratch, 100)]);
        },
        |f| {
            f.queues[1].offer(&[readable(f.scratch, 1 << 20)]);
        },
    ];
    for shape in shapes {
        let mut f = fixture();
        shape(&mut f);
        f.queues[1].ring();
        eventually("the device to want a reset", || f.guest.needs_reset());
        reset(&mut f.device);
    }
}

#[test]
fn hundreds_of_connections_carry_their_own_bytes() {
    let mut f = fixture();
    let mut clients = Vec::new();
    for n in 0..300u32 {
        let mut client = f.client();
        client
            .write_all(format!("CONNECT {n}\n").as_bytes())
            .unwrap();
        let request = f.expect(op::REQUEST);
        let port = request.src_port.get();
        f.say(port, n, op::RESPONSE, b"");
        clients.push((client, port));
    }
    for (n, (client, _)) in (0u32..).zip(&mut clients) {
        client.write_all(&n.to_le_bytes()).unwrap();
    }
    let mut seen = std::collections::BTreeMap::<u32, Vec<u8>>::new();
    while seen.values().map(Vec::len).sum::<usize>() < 4 * clients.len() {
        let (packet, bytes) = f.hear();
        assert_eq!(packet.op.get(), op::RW);
        seen.entry(packet.dst_port.get()).or_default().extend(bytes);
    }
    for (n, bytes) in &seen {
        assert_eq!(bytes, &n.to_le_bytes());
    }
    for (n, (client, port)) in (0..).zip(&mut clients) {
        f.say(*port, n, op::RW, &[n as u8]);
        let line = format!("OK {port}\n");
        let mut all = vec![0; line.len() + 1];
        client.read_exact(&mut all).unwrap();
        assert_eq!(all.last(), Some(&(n as u8)));
    }
}

#[test]
fn after_a_restore_the_guest_is_told_that_all_connections_are_gone() {
    let mut f = fixture();
    let event = f.guest.allocate(4);
    f.queues[usize::from(EVENT)].offer(&[writable(event, 4)]);
    f.queues[usize::from(EVENT)].ring();
    let mut stream = f.guest_opens(9);
    f.device.reset_connections().unwrap();
    assert_eq!(f.queues[usize::from(EVENT)].wait().1, 4);
    assert_eq!(f.guest.read(event, 4), [0; 4]);
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
}

#[test]
fn without_a_driver_clients_are_turned_away() {
    let mut f = fixture();
    reset(&mut f.device);
    let mut client = f.client();
    let _ = client.write_all(b"CONNECT 1\n");
    assert!(matches!(client.read(&mut [0]), Ok(0) | Err(_)));
    for queue in &mut f.queues {
        queue.clear();
    }
    f.activate();
    let _stream = f.guest_opens(9);
}

#[test]
fn reserved_context_ids_are_refused() {
    for cid in [0, 1, 2, u64::from(u32::MAX), 1 << 40] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vsock");
        let listener = UnixListener::bind(&path).unwrap();
        assert!(Vsock::new(cid, path, listener, &PlainThreads).is_err());
    }
}
