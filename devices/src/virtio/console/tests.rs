//! The console device driven through its queues.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use super::bits::event;
use super::*;
use crate::virtio::testing::{
    DriverQueue, Guest, PATIENCE, PlainThreads, eventually, readable, reset, writable,
};

const AGENT: &str = "org.qemu.guest_agent.0";

struct Fixture {
    guest: Guest,
    device: Console,
    console: UnixStream,
    agent: UnixStream,
    /// By number.
    queues: Vec<DriverQueue>,
}

fn fixture() -> Fixture {
    let (console, console_end) = UnixStream::pair().unwrap();
    let (agent, agent_end) = UnixStream::pair().unwrap();
    for stream in [&console, &agent] {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    let port = |name: &str, console, stream| PortOptions {
        name: name.to_owned(),
        console,
        stream,
    };
    let ports = vec![
        port("console", true, console_end),
        port(AGENT, false, agent_end),
    ];
    let device = Console::new(ports, &PlainThreads).unwrap();
    let mut guest = Guest::new();
    let queues = (0..6).map(|n| guest.queue(n, 16)).collect();
    Fixture {
        guest,
        device,
        console,
        agent,
        queues,
    }
}

impl Fixture {
    fn activate(&mut self, features: u64) {
        let queues: Vec<&DriverQueue> = self.queues.iter().collect();
        let activation = self.guest.activation(features, &queues);
        self.device.activate(activation).unwrap();
    }

    fn say(&mut self, id: u32, event: u16, value: u16) {
        let mut bytes = id.to_le_bytes().to_vec();
        bytes.extend(event.to_le_bytes());
        bytes.extend(value.to_le_bytes());
        self.send(3, &bytes);
    }

    fn send(&mut self, queue: usize, bytes: &[u8]) {
        let address = self.guest.place(bytes);
        self.queues[queue].offer(&[readable(address, bytes.len())]);
        self.queues[queue].ring();
        self.queues[queue].wait();
    }

    fn hear(&mut self) -> (u32, u16, u16, Vec<u8>) {
        let address = self.guest.allocate(128);
        self.queues[2].offer(&[writable(address, 128)]);
        self.queues[2].ring();
        let (_, bytes) = self.queues[2].wait();
        let message = self.guest.read(address, bytes as usize);
        let id = u32::from_le_bytes(message[..4].try_into().unwrap());
        let half = |at: usize| u16::from_le_bytes(message[at..at + 2].try_into().unwrap());
        (id, half(4), half(6), message[8..].to_vec())
    }

    /// The conversation of a driver that uses both ports.
    fn open(&mut self) {
        self.activate(feature::MULTIPORT);
        self.say(0, event::DEVICE_READY, 1);
        assert_eq!(self.hear(), (0, event::DEVICE_ADD, 0, vec![]));
        assert_eq!(self.hear(), (1, event::DEVICE_ADD, 0, vec![]));
        self.say(0, event::PORT_READY, 1);
        assert_eq!(self.hear(), (0, event::CONSOLE_PORT, 1, vec![]));
        assert_eq!(self.hear(), (0, event::PORT_NAME, 1, b"console".to_vec()));
        assert_eq!(self.hear(), (0, event::PORT_OPEN, 1, vec![]));
        self.say(1, event::PORT_READY, 1);
        let name = AGENT.as_bytes().to_vec();
        assert_eq!(self.hear(), (1, event::PORT_NAME, 1, name));
        assert_eq!(self.hear(), (1, event::PORT_OPEN, 1, vec![]));
        self.say(1, event::PORT_OPEN, 1);
        self.say(0, event::PORT_OPEN, 1);
    }
}

#[test]
fn a_driver_learns_of_both_ports_and_bytes_flow_both_ways() {
    let mut f = fixture();
    assert_eq!(f.device.queue_sizes().len(), 6);
    f.open();
    assert_eq!(f.device.state().guest_open, [true, true]);
    let buffer = f.guest.allocate(64);
    f.queues[4].offer(&[writable(buffer, 64)]);
    f.queues[4].ring();
    f.agent.write_all(b"{\"execute\":\"guest-ping\"}").unwrap();
    let (_, bytes) = f.queues[4].wait();
    assert_eq!(
        f.guest.read(buffer, bytes as usize),
        b"{\"execute\":\"guest-ping\"}"
    );
    f.send(5, b"{\"return\":{}}");
    let mut answer = [0; 13];
    f.agent.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"{\"return\":{}}");
    f.send(1, b"login: ");
    let mut answer = [0; 7];
    f.console.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"login: ");
}

#[test]
fn bytes_for_a_closed_port_wait_until_the_guest_opens_it() {
    let mut f = fixture();
    f.activate(feature::MULTIPORT);
    let buffer = f.guest.allocate(64);
    f.queues[4].offer(&[writable(buffer, 64)]);
    f.queues[4].ring();
    f.agent.write_all(b"early").unwrap();
    f.say(7, event::PORT_READY, 1);
    assert_eq!(f.queues[4].used(), None);
    f.say(1, event::PORT_OPEN, 1);
    let (_, bytes) = f.queues[4].wait();
    assert_eq!(f.guest.read(buffer, bytes as usize), b"early");
    let bad = f
        .device
        .metrics()
        .bad_messages
        .load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(bad, 1, "a port that is not there");
}

#[test]
fn a_driver_without_ports_has_the_first_as_its_console() {
    let mut f = fixture();
    f.activate(0);
    let buffer = f.guest.allocate(64);
    f.queues[0].offer(&[writable(buffer, 64)]);
    f.queues[0].ring();
    f.console.write_all(b"ls\n").unwrap();
    let (_, bytes) = f.queues[0].wait();
    assert_eq!(f.guest.read(buffer, bytes as usize), b"ls\n");
}

#[test]
fn a_reader_that_dawdles_holds_up_the_guest_and_loses_nothing() {
    let mut f = fixture();
    f.open();
    let block = vec![b'x'; 64 << 10];
    let address = f.guest.place(&block);
    let blocks = 12;
    for _ in 0..blocks {
        f.queues[5].offer(&[readable(address, block.len())]);
    }
    f.queues[5].ring();
    let mut seen = vec![0; blocks * block.len()];
    f.agent.read_exact(&mut seen).unwrap();
    assert!(seen.iter().all(|byte| *byte == b'x'));
    for _ in 0..blocks {
        f.queues[5].wait();
    }
}

#[test]
fn a_host_end_that_is_gone_swallows_what_the_guest_writes() {
    let mut f = fixture();
    f.open();
    let (_, nobody) = UnixStream::pair().unwrap();
    drop(std::mem::replace(&mut f.agent, nobody));
    for _ in 0..3 {
        f.send(5, b"hello");
    }
    let metrics = f.device.metrics();
    eventually("bytes to be dropped", || {
        metrics
            .dropped_bytes
            .load(std::sync::atomic::Ordering::Relaxed)
            >= 10
    });
    assert!(!f.guest.needs_reset());
}

#[test]
fn a_reset_closes_the_ports_and_a_second_driver_starts_afresh() {
    let mut f = fixture();
    f.open();
    reset(&mut f.device);
    assert_eq!(f.device.state().guest_open, [false, false]);
    for queue in &mut f.queues {
        queue.clear();
    }
    f.open();
}

#[test]
fn malformed_chains_break_the_queue_and_not_the_process() {
    for (queue, writes) in [(4, false), (5, true), (2, false), (3, true)] {
        let mut f = fixture();
        f.open();
        f.agent.write_all(b"x").unwrap();
        if queue == 2 {
            f.say(0, event::PORT_READY, 1);
        }
        let part = match writes {
            true => writable(0x100, 8),
            false => readable(0x100, 8),
        };
        f.queues[queue].offer(&[part]);
        f.queues[queue].ring();
        eventually("the device to want a reset", || f.guest.needs_reset());
        reset(&mut f.device);
    }
    let mut f = fixture();
    f.open();
    f.queues[5].offer(&[readable(u64::MAX - 8, 64)]);
    f.queues[5].ring();
    eventually("the device to want a reset", || f.guest.needs_reset());
}

#[test]
fn messages_that_nobody_reads_are_bounded() {
    let mut f = fixture();
    f.activate(feature::MULTIPORT);
    for _ in 0..600 {
        if f.guest.needs_reset() {
            return;
        }
        let mut bytes = vec![0; 6];
        bytes.extend(1u16.to_le_bytes());
        let address = f.guest.place(&bytes);
        f.queues[3].offer(&[readable(address, 8)]);
        f.queues[3].ring();
        eventually("an answer", || {
            f.queues[3].used().is_some() || f.guest.needs_reset()
        });
    }
    assert!(f.guest.needs_reset());
}
