//! The network card driven through its queues, with a real tap in a network namespace of the test's own.
//!
//! The host's side of the tap is a packet socket. Frames are of an EtherType reserved for experiments, so that what the host's own
//! protocols send is told apart. Without root there is no namespace, and these tests say that they were skipped.

#![allow(unsafe_code)]

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::virtio::net::bits::{HEADER_BYTES, Header, control as commands, gso, header_flag};
use crate::virtio::net::tap::TapError;
use crate::virtio::net::tx::BadFrame;
use crate::virtio::testing::{
    DriverQueue, Guest, Part, PlainThreads, RAM_BYTES, eventually, readable, reset, writable,
};

/// The "Local Experimental" EtherType of IEEE 802.
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];
const MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];

/// Moves the test's thread into a new network namespace; false, with a word, if it may not.
fn own_namespace() -> bool {
    // SAFETY: affects the calling thread's view of the network only.
    let done = unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0;
    if !done || std::fs::metadata("/dev/net/tun").is_err() {
        eprintln!("skipped: no network namespace or no /dev/net/tun");
        return false;
    }
    // The host's own protocols stay silent; /proc/sys/net is the namespace's.
    for scope in ["all", "default"] {
        let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{scope}/disable_ipv6"), "1");
    }
    true
}

fn options(queue_size: u16) -> NetOptions {
    NetOptions {
        id: "eth0".into(),
        mac: MAC,
        mtu: Some(1450),
        queue_size,
        offloads: true,
    }
}

fn card(name: &str, pairs: u16) -> Net {
    let taps = Tap::create(name, pairs, None).unwrap();
    Net::new(taps, options(256), &PlainThreads).unwrap()
}

/// The host's end of a tap: all frames that pass the interface.
struct Wire(OwnedFd);

impl Wire {
    /// With `offloads`, frames carry a virtio header in both directions.
    fn new(name: &str, offloads: bool) -> Self {
        let protocol = u16::from_be_bytes(ETHERTYPE).to_be();
        // SAFETY: a plain system call.
        let socket = unsafe {
            libc::socket(
                libc::AF_PACKET,
                libc::SOCK_RAW | libc::SOCK_NONBLOCK,
                i32::from(protocol),
            )
        };
        assert!(socket >= 0, "packet socket: {}", io::Error::last_os_error());
        // SAFETY: the descriptor was just made and is owned by nobody else.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        let request = sys::Ifreq::named(name).unwrap();
        let index = sys::interface_index(request).unwrap().unwrap();
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: protocol,
            sll_ifindex: index,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        let length = size_of::<libc::sockaddr_ll>() as u32;
        // SAFETY: the address lives until the call returns.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
        assert_eq!(bound, 0, "{}", io::Error::last_os_error());
        if offloads {
            let on = 1_i32;
            // SAFETY: the value lives until the call returns.
            let set = unsafe {
                libc::setsockopt(
                    socket.as_raw_fd(),
                    libc::SOL_PACKET,
                    libc::PACKET_VNET_HDR,
                    (&raw const on).cast(),
                    4,
                )
            };
            assert_eq!(set, 0, "{}", io::Error::last_os_error());
        }
        Self(socket)
    }

    fn send(&self, frame: &[u8]) {
        assert_eq!(rustix::io::write(&self.0, frame).unwrap(), frame.len());
    }

    fn receive(&self) -> Option<Vec<u8>> {
        let mut frame = vec![0; 70_000];
        let length = rustix::io::read(&self.0, &mut *frame).ok()?;
        frame.truncate(length);
        Some(frame)
    }

    fn wait(&self) -> Vec<u8> {
        let mut frame = None;
        eventually("a frame from the guest", || {
            frame = self.receive();
            frame.is_some()
        });
        frame.unwrap()
    }
}

/// A frame with `length` bytes of payload, each `fill`.
fn frame(fill: u8, length: usize) -> Vec<u8> {
    [
        &[0xff; 6][..],
        &[2, 0, 0, 0, 0, 9],
        &ETHERTYPE,
        &vec![fill; length],
    ]
    .concat()
}

/// An IPv4 TCP frame of this much payload, whose checksum is left to be completed.
fn tcp_frame(payload: usize) -> Vec<u8> {
    let total = u16::try_from(40 + payload).unwrap();
    let mut ip = vec![
        0x45, 0, 0, 0, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
    ];
    ip[2..4].copy_from_slice(&total.to_be_bytes());
    let mut sum: u32 = ip
        .as_chunks::<2>()
        .0
        .iter()
        .map(|w| u32::from(u16::from_be_bytes(*w)))
        .sum();
    sum = (sum & 0xffff) + (sum >> 16);
    ip[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    let mut tcp = vec![0; 20];
    tcp[..4].copy_from_slice(&[0x12, 0x34, 0x56, 0x78]);
    tcp[12] = 0x50;
    tcp[13] = 0x10;
    [
        &[0xff; 6][..],
        &[2, 0, 0, 0, 0, 9],
        &[8, 0],
        &ip,
        &tcp,
        &vec![0x77; payload],
    ]
    .concat()
}

fn tso_header(payload: u16) -> Header {
    Header {
        flags: header_flag::NEEDS_CSUM,
        gso_type: gso::TCPV4,
        hdr_len: 54_u16.to_le_bytes(),
        gso_size: payload.to_le_bytes(),
        csum_start: 34_u16.to_le_bytes(),
        csum_offset: 16_u16.to_le_bytes(),
        num_buffers: [0; 2],
    }
}

fn send(guest: &mut Guest, tx: &mut DriverQueue, header: Header, frame: &[u8]) {
    let header = guest.place(header.as_bytes());
    let body = guest.place(frame);
    let head = tx.offer(&[readable(header, HEADER_BYTES), readable(body, frame.len())]);
    tx.ring();
    assert_eq!(tx.wait(), (head, 0));
}

/// Activates the card and waits until it serves: what the tap holds at that time is thrown away.
fn activate(
    device: &mut Net,
    guest: &mut Guest,
    features: u64,
    rx: &DriverQueue,
    tx: &mut DriverQueue,
) {
    device
        .activate(guest.activation(features, &[rx, tx]))
        .unwrap();
    send(guest, tx, Header::default(), &frame(0xaa, 46));
}

fn rx_features(device: &Net) -> u64 {
    device.features() & !feature::MQ
}

#[test]
fn a_frame_of_the_guest_reaches_the_host_and_back() {
    if !own_namespace() {
        return;
    }
    let mut device = card("t0", 1);
    let wire = Wire::new("t0", false);
    let mut guest = Guest::new();
    let (mut rx, mut tx) = (guest.queue(0, 16), guest.queue(1, 16));
    device
        .activate(guest.activation(rx_features(&device), &[&rx, &tx]))
        .unwrap();

    let out = frame(0x11, 200);
    send(&mut guest, &mut tx, Header::default(), &out);
    assert_eq!(wire.wait(), out);

    let buffer = guest.allocate(2048);
    let head = rx.offer(&[writable(buffer, 2048)]);
    rx.ring();
    let back = frame(0x22, 300);
    wire.send(&back);
    assert_eq!(
        rx.wait(),
        (head, u32::try_from(HEADER_BYTES + back.len()).unwrap())
    );
    assert_eq!(guest.read(buffer + HEADER_BYTES as u64, back.len()), back);
    assert_eq!(guest.read(buffer + 10, 2), [1, 0], "num_buffers");
    let metrics = device.metrics();
    assert_eq!(metrics.tx_bytes.load(Ordering::Relaxed), out.len() as u64);
    assert_eq!(metrics.rx_bytes.load(Ordering::Relaxed), back.len() as u64);
}

#[test]
fn a_frame_may_take_several_merged_buffers() {
    if !own_namespace() {
        return;
    }
    let mut device = card("t0", 1);
    let wire = Wire::new("t0", false);
    let mut guest = Guest::new();
    let (mut rx, mut tx) = (guest.queue(0, 16), guest.queue(1, 16));
    let features = rx_features(&device);
    activate(&mut device, &mut guest, features, &rx, &mut tx);
    let buffers: Vec<u64> = (0..8).map(|_| guest.allocate(256)).collect();
    let offered: Vec<u16> = buffers
        .iter()
        .map(|buffer| rx.offer(&[writable(*buffer, 256)]))
        .collect();
    rx.ring();
    let sent = frame(0x33, 600);
    wire.send(&sent);
    let lengths: Vec<(u16, u32)> = (0..3).map(|_| rx.wait()).collect();
    let expected = [
        256,
        256,
        u32::try_from(sent.len() + HEADER_BYTES - 512).unwrap(),
    ];
    assert_eq!(
        lengths,
        offered.into_iter().zip(expected).collect::<Vec<_>>()
    );
    assert_eq!(guest.read(buffers[0] + 10, 2), [3, 0]);
    let mut got = guest.read(buffers[0] + HEADER_BYTES as u64, 256 - HEADER_BYTES);
    got.extend(guest.read(buffers[1], 256));
    got.extend(guest.read(buffers[2], expected[2] as usize));
    assert_eq!(got, sent);
}

#[test]
fn a_frame_that_finds_too_few_merged_buffers_waits_for_more() {
    if !own_namespace() {
        return;
    }
    let mut device = card("t0", 1);
    let wire = Wire::new("t0", false);
    let mut guest = Guest::new();
    let (mut rx, mut tx) = (guest.queue(0, 16), guest.queue(1, 16));
    let features = rx_features(&device);
    activate(&mut device, &mut guest, features, &rx, &mut tx);
    let buffers: Vec<u64> = (0..3).map(|_| guest.allocate(256)).collect();
    rx.offer(&[writable(buffers[0], 256)]);
    rx.ring();
    let sent: Vec<u8> = frame(0, 600)
        .into_iter()
        .enumerate()
        .map(|(n, b)| if n < 14 { b } else { n as u8 })
        .collect();
    wire.send(&sent);
    let metrics = device.metrics();
    eventually("the queue to starve", || {
        metrics.rx_starved.load(Ordering::Relaxed) > 0
    });
    assert!(rx.used().is_none());
    rx.offer(&[writable(buffers[1], 256)]);
    rx.offer(&[writable(buffers[2], 100), writable(buffers[2] + 100, 156)]);
    rx.ring();
    for _ in 0..3 {
        rx.wait();
    }
    let mut got = guest.read(buffers[0] + HEADER_BYTES as u64, 256 - HEADER_BYTES);
    got.extend(guest.read(buffers[1], 256));
    got.extend(guest.read(buffers[2], sent.len() - got.len()));
    assert_eq!(got, sent);
    assert_eq!(guest.read(buffers[0] + 10, 2), [3, 0]);
    assert_eq!(metrics.rx_dropped.load(Ordering::Relaxed), 0);
}

#[test]
fn without_merged_buffers_a_frame_too_long_for_its_buffer_is_dropped_and_the_next_one_comes() {
    if !own_namespace() {
        return;
    }
    let mut device = card("t0", 1);
    let wire = Wire::new("t0", false);
    let mut guest = Guest::new();
    let (mut rx, mut tx) = (guest.queue(0, 16), guest.queue(1, 16));
    let features = rx_features(&device) & !feature::MRG_RXBUF;
    activate(&mut device, &mut guest, features, &rx, &mut tx);
    let buffer = guest.allocate(256);
    rx.offer(&[writable(buffer, 12), writable(buffer + 12, 244)]);
    rx.ring();
    wire.send(&frame(0x44, 800));
    wire.send(&frame(0x55, 100));
    rx.wait();
    assert_eq!(
        guest.read(buffer + HEADER_BYTES as u64, 114),
        frame(0x55, 100)
    );
    assert_eq!(device.metrics().rx_dropped.load(Ordering::Relaxed), 1);
}

#[test]
fn frames_wait_while_the_guest_has_no_buffers() {
    if !own_namespace() {
        return;
    }
    let mut device = card("t0", 1);
    let wire = Wire::new("t0", false);
    let mut guest = Guest::new();
    let (mut rx, mut tx) = (guest.queue(0, 64), guest.queue(1, 16));
    let features = rx_features(&device);
    activate(&mut device, &mut guest, features, &rx, &mut tx);
    for fill in 0..40 {
        wire.send(&frame(fill, 100));
    }
    let metrics = device.metrics();
    eventually("the queue to starve", || {
        metrics.rx_starved.load(Ordering::Relaxed) > 0
    });
    let buffer = guest.allocate(256 * 40);
    for n in 0..40 {
        rx.offer(&[writable(buffer + n * 256, 256)]);
        rx.ring();
    }
    for n in 0..40 {
        rx.wait();
        let at = buffer + n * 256 + HEADER_BYTES as u64;
        assert_eq!(guest.read(at, 114), frame(n as u8, 100));
    }
}

#[test]
fn a_segment_of_64_kib_passes_whole_in_both_directions_where_negotiated() {
    if !own_namespace() {
        return;
    }
    let mut device = card("t0", 1);
    let mut guest = Guest::new();
    let (mut rx, mut tx) = (guest.queue(0, 128), guest.queue(1, 16));
    let features = rx_features(&device);
    assert_ne!(
        features & feature::GUEST_TSO4,
        0,
        "this kernel's taps have no TSO"
    );
    activate(&mut device, &mut guest, features, &rx, &mut tx);
    let buffer = guest.allocate(2048 * 64);
    for n in 0..64 {
        rx.offer(&[writable(buffer + n * 2048, 2048)]);
    }
    rx.ring();
    let state = || device.state().guest_offloads & feature::GUEST_TSO4 != 0;
    eventually("the offloads to be on", state);

    let all = Wire::all("t0");
    let sent = tcp_frame(60_000);
    let header = tso_header(1400);
    let with_header = [&header.as_bytes()[..10], &sent].concat();
    all.send(&with_header);
    let (_, first) = rx.wait();
    assert_eq!(first, 2048);
    let got = Header::read(&guest.read(buffer, HEADER_BYTES));
    assert_eq!(got.gso_type, gso::TCPV4);
    assert_eq!(got.flags & header_flag::NEEDS_CSUM, header_flag::NEEDS_CSUM);
    let total = sent.len() + HEADER_BYTES;
    assert_eq!(
        usize::from(u16::from_le_bytes(got.num_buffers)),
        total.div_ceil(2048)
    );
    assert_eq!(guest.read(buffer + HEADER_BYTES as u64, sent.len()), sent);

    while all.receive().is_some() {}
    send(&mut guest, &mut tx, header, &sent);
    let got = all.wait_for(|frame| frame.len() > 60_000);
    assert_eq!(got[10..], sent);
}

impl Wire {
    /// A socket for every protocol, with virtio headers.
    fn all(name: &str) -> Self {
        let wire = Self::new(name, true);
        let index = sys::interface_index(sys::Ifreq::named(name).unwrap())
            .unwrap()
            .unwrap();
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: (libc::ETH_P_ALL as u16).to_be(),
            sll_ifindex: index,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        let length = size_of::<libc::sockaddr_ll>() as u32;
        // SAFETY: the address lives until the call returns.
        let bound = unsafe { libc::bind(wire.0.as_raw_fd(), (&raw const address).cast(), length) };
        assert_eq!(bound, 0, "{}", io::Error::last_os_error());
        wire
    }

    fn wait_for(&self, wanted: impl Fn(&[u8]) -> bool) -> Vec<u8> {
        loop {
            let frame = self.wait();
            if wanted(&frame) {
                return frame;
            }
        }
    }
}

impl Header {
    fn read(bytes: &[u8]) -> Self {
        zerocopy::FromBytes::read_from_bytes(bytes).unwrap()
    }
}

#[test]
fn what_is_malformed_is_dropped_and_counted_and_the_queue_goes_on() {
    if !own_namespace() {
        return;
    }
    let mut device = card("t0", 1);
    let wire = Wire::new("t0", false);
    let mut guest = Guest::new();
    let (rx, mut tx) = (guest.queue(0, 16), guest.queue(1, 64));
    device
        .activate(guest.activation(rx_features(&device), &[&rx, &tx]))
        .unwrap();
    let header = guest.place(&[0; HEADER_BYTES]);
    let body = guest.place(&frame(1, 100));
    let tail = guest.allocate(64);
    let chains: [Vec<Part>; 6] = [
        vec![readable(header, 5)],
        vec![readable(header, HEADER_BYTES)],
        vec![
            readable(header, HEADER_BYTES),
            readable(RAM_BYTES - 10, 100),
        ],
        vec![readable(header, HEADER_BYTES), writable(tail, 64)],
        // The kernel's own check: no room for an Ethernet header.
        vec![readable(header, HEADER_BYTES), readable(body, 3)],
        vec![readable(u64::MAX - 4, HEADER_BYTES), readable(body, 114)],
    ];
    for chain in &chains {
        let head = tx.offer(chain);
        tx.ring();
        assert_eq!(tx.wait(), (head, 0));
    }
    let bad = Header {
        gso_type: 77,
        ..Header::default()
    };
    send(&mut guest, &mut tx, bad, &frame(2, 100));
    let count = device.metrics().tx_malformed.load(Ordering::Relaxed);
    assert_eq!(count, chains.len() as u64 + 1);
    send(&mut guest, &mut tx, Header::default(), &frame(3, 100));
    assert_eq!(wire.wait(), frame(3, 100));
    assert!(!guest.needs_reset());
}

#[test]
fn an_offload_that_was_not_negotiated_is_refused() {
    let mut guest = Guest::new();
    let mut queue = guest.queue(1, 16);
    let mut parse = |header: Header, features: u64| {
        let header = guest.place(header.as_bytes());
        let body = guest.allocate(1000);
        queue.offer(&[readable(header, HEADER_BYTES), readable(body, 1000)]);
        let mut active = queue.active().queue;
        let memory = Arc::clone(&guest.memory);
        let chain = virtio_queue::QueueOwnedT::iter(&mut active, &*memory)
            .unwrap()
            .last()
            .unwrap();
        tx::parse(&memory, chain, features, &mut Vec::new())
    };
    let tso = tso_header(1000);
    let all = feature::CSUM | feature::HOST_TSO4;
    assert_eq!(parse(tso, all), Ok(tso));
    assert_eq!(parse(tso, feature::CSUM), Err(BadFrame::Offload));
    assert_eq!(parse(tso, feature::HOST_TSO4), Err(BadFrame::Offload));
    assert_eq!(
        parse(
            Header {
                gso_size: [0; 2],
                ..tso
            },
            all
        ),
        Err(BadFrame::Offload)
    );
    assert_eq!(
        parse(Header { flags: 0, ..tso }, all),
        Err(BadFrame::Offload)
    );
    let ecn = Header {
        gso_type: gso::TCPV4 | gso::ECN,
        ..tso
    };
    assert_eq!(parse(ecn, all), Err(BadFrame::Offload));
    assert_eq!(parse(ecn, all | feature::HOST_ECN), Ok(ecn));
    let odd = Header {
        flags: 0xfe,
        num_buffers: [9, 9],
        ..Header::default()
    };
    assert_eq!(parse(odd, 0), Ok(Header::default()));
}

/// Sends a control command and returns its answer.
fn command(guest: &mut Guest, queue: &mut DriverQueue, bytes: &[u8]) -> u8 {
    let place = guest.place(bytes);
    let answer = guest.place(&[0xee]);
    let (head, rest) = bytes.split_at(2);
    queue.offer(&[
        readable(place, head.len()),
        readable(place + 2, rest.len()),
        writable(answer, 1),
    ]);
    queue.ring();
    queue.wait();
    guest.byte(answer)
}

#[test]
fn control_commands_are_checked_and_carried_out() {
    if !own_namespace() {
        return;
    }
    let mut device = card("t0", 1);
    let mut guest = Guest::new();
    let (rx, tx, mut ctrl) = (guest.queue(0, 16), guest.queue(1, 16), guest.queue(2, 16));
    let features = device.features();
    device
        .activate(guest.activation(features, &[&rx, &tx, &ctrl]))
        .unwrap();
    let mut say = |bytes: &[u8]| command(&mut guest, &mut ctrl, bytes);
    assert_eq!(say(&[commands::RX, 0, 1]), commands::OK);
    assert_eq!(say(&[commands::RX, 0, 2]), commands::ERR);
    assert_eq!(say(&[commands::RX, 9, 1]), commands::ERR);
    let tables = [
        &[commands::MAC, 0][..],
        &1_u32.to_le_bytes(),
        &[1; 6],
        &[0; 4],
    ]
    .concat();
    assert_eq!(say(&tables), commands::OK);
    assert_eq!(say(&tables[..tables.len() - 1]), commands::ERR);
    let huge = [&[commands::MAC, 0][..], &u32::MAX.to_le_bytes(), &[1; 6]].concat();
    assert_eq!(say(&huge), commands::ERR);
    assert_eq!(say(&[commands::MAC, 1, 2, 2, 2, 2, 2, 2]), commands::OK);
    assert_eq!(say(&[commands::MAC, 1, 2, 2]), commands::ERR);
    // There is one pair, so MQ is not offered.
    assert_eq!(say(&[commands::MQ, 0, 1, 0]), commands::ERR);
    let csum = [
        &[commands::GUEST_OFFLOADS, 0][..],
        &feature::GUEST_CSUM.to_le_bytes(),
    ]
    .concat();
    assert_eq!(say(&csum), commands::OK);
    let other = [
        &[commands::GUEST_OFFLOADS, 0][..],
        &feature::HOST_TSO4.to_le_bytes(),
    ]
    .concat();
    assert_eq!(say(&other), commands::ERR);
    assert_eq!(say(&[200, 0, 0]), commands::ERR);
    assert_eq!(device.state().guest_offloads, feature::GUEST_CSUM);
    let mut mac = [0; 6];
    device.read_config(0, &mut mac);
    assert_eq!(mac, [2; 6]);
    // A reset brings the card's own address back, and no offloads.
    reset(&mut device);
    device.read_config(0, &mut mac);
    assert_eq!(mac, MAC);
    assert_eq!(device.state().guest_offloads, 0);
}

#[test]
fn a_control_chain_without_an_answer_byte_needs_a_reset_and_frames_go_on() {
    if !own_namespace() {
        return;
    }
    let mut device = card("t0", 1);
    let wire = Wire::new("t0", false);
    let mut guest = Guest::new();
    let (rx, mut tx, mut ctrl) = (guest.queue(0, 16), guest.queue(1, 16), guest.queue(2, 16));
    device
        .activate(guest.activation(device.features(), &[&rx, &tx, &ctrl]))
        .unwrap();
    let place = guest.place(&[commands::RX, 0, 1]);
    ctrl.offer(&[readable(place, 3)]);
    ctrl.ring();
    eventually("the device to ask for a reset", || guest.needs_reset());
    send(&mut guest, &mut tx, Header::default(), &frame(5, 60));
    assert_eq!(wire.wait(), frame(5, 60));
}

#[test]
fn of_two_pairs_only_the_first_receives_until_the_driver_asks_for_both() {
    if !own_namespace() {
        return;
    }
    let mut device = card("t0", 2);
    assert_eq!(device.queue_sizes().len(), 5);
    let mut guest = Guest::new();
    let mut queues: Vec<DriverQueue> = (0..5).map(|index| guest.queue(index, 64)).collect();
    let all: Vec<&DriverQueue> = queues.iter().collect();
    device
        .activate(guest.activation(device.features(), &all))
        .unwrap();
    send(
        &mut guest,
        &mut queues[1],
        Header::default(),
        &frame(0xaa, 46),
    );
    send(
        &mut guest,
        &mut queues[3],
        Header::default(),
        &frame(0xaa, 46),
    );
    for receive in [0, 2] {
        let buffer = guest.allocate(256 * 64);
        for n in 0..64 {
            queues[receive].offer(&[writable(buffer + n * 256, 256)]);
        }
        queues[receive].ring();
    }
    // Which queue a flow takes is the kernel's choice; 32 flows do not all take the first of two by chance.
    let flows = Wire::all("t0");
    let burst = || {
        for port in 0..32 {
            let mut flow = tcp_frame(100);
            flow[34..36].copy_from_slice(&(4000_u16 + port).to_be_bytes());
            flows.send(&[&[0; 10], &*flow].concat());
        }
    };
    burst();
    for _ in 0..32 {
        queues[0].wait();
    }
    assert!(queues[2].used().is_none());

    for (pairs, code) in [(3, commands::ERR), (0, commands::ERR), (2, commands::OK)] {
        let bytes = [commands::MQ, 0, pairs, 0];
        assert_eq!(command(&mut guest, &mut queues[4], &bytes), code);
    }
    assert_eq!(device.state().active_pairs, 2);
    burst();
    let (mut first, mut second) = (0, 0);
    eventually("all frames on either queue", || {
        first += std::iter::from_fn(|| queues[0].used()).count();
        second += std::iter::from_fn(|| queues[2].used()).count();
        first + second == 32
    });
    assert!(first > 0 && second > 0, "{first} and {second} frames");

    reset(&mut device);
    assert_eq!(device.state().active_pairs, 1);
}

fn wire_wait_for(wire: &Wire, wanted: &[u8]) {
    while wire.wait() != wanted {}
}

#[test]
fn a_driver_without_mq_finds_the_control_queue_at_number_two() {
    if !own_namespace() {
        return;
    }
    let mut device = card("t0", 2);
    let mut guest = Guest::new();
    let (rx, tx, mut ctrl) = (guest.queue(0, 16), guest.queue(1, 16), guest.queue(2, 16));
    let features = device.features() & !feature::MQ;
    device
        .activate(guest.activation(features, &[&rx, &tx, &ctrl]))
        .unwrap();
    assert_eq!(
        command(&mut guest, &mut ctrl, &[commands::RX, 1, 0]),
        commands::OK
    );
}

#[test]
fn a_driver_may_come_and_go_many_times() {
    if !own_namespace() {
        return;
    }
    let mut device = card("t0", 2);
    let wire = Wire::new("t0", false);
    let mut guest = Guest::new();
    let (mut rx, mut tx) = (guest.queue(0, 16), guest.queue(1, 16));
    let buffer = guest.allocate(2048);
    for round in 0..20 {
        rx.clear();
        tx.clear();
        rx.offer(&[writable(buffer, 2048)]);
        device
            .activate(guest.activation(rx_features(&device), &[&rx, &tx]))
            .unwrap();
        send(&mut guest, &mut tx, Header::default(), &frame(round, 60));
        wire_wait_for(&wire, &frame(round, 60));
        wire.send(&frame(round, 61));
        rx.wait();
        assert_eq!(
            guest.read(buffer + HEADER_BYTES as u64, 75),
            frame(round, 61)
        );
        reset(&mut device);
        // What comes while nobody listens does not reach the next driver.
        wire.send(&frame(0xdd, 61));
    }
}

#[test]
fn transmitting_through_an_interface_that_is_down_loses_frames_and_nothing_else() {
    if !own_namespace() {
        return;
    }
    let taps = Tap::create("t0", 1, None).unwrap();
    let wire = Wire::new("t0", false);
    let mut device = Net::new(taps, options(64), &PlainThreads).unwrap();
    let mut guest = Guest::new();
    let (rx, mut tx) = (guest.queue(0, 16), guest.queue(1, 16));
    device
        .activate(guest.activation(rx_features(&device), &[&rx, &tx]))
        .unwrap();
    let request = sys::Ifreq::named("t0").unwrap();
    set_flags(request, 0);
    send(&mut guest, &mut tx, Header::default(), &frame(1, 60));
    assert_eq!(device.metrics().tx_refused.load(Ordering::Relaxed), 1);
    sys::set_up(request).unwrap();
    let _ = rustix::io::read(&wire.0, &mut [0; 16]);
    send(&mut guest, &mut tx, Header::default(), &frame(2, 60));
    wire_wait_for(&wire, &frame(2, 60));
}

fn set_flags(request: sys::Ifreq, flags: u16) {
    use rustix::net::{AddressFamily, SocketType, socket};
    let socket = socket(AddressFamily::UNIX, SocketType::DGRAM, None).unwrap();
    let mut request = request.with_flags(flags);
    let file = std::os::fd::AsFd::as_fd(&socket);
    sys::ioctl_ifreq(file, libc::SIOCSIFFLAGS, &mut request).unwrap();
}

#[test]
fn a_card_needs_both_queues_of_its_first_pair() {
    if !own_namespace() {
        return;
    }
    let mut device = card("t0", 1);
    let mut guest = Guest::new();
    let rx = guest.queue(0, 16);
    let error = device.activate(guest.activation(0, &[&rx])).unwrap_err();
    assert!(matches!(error, ActivateError::MissingQueue(1)));
}

#[test]
fn a_tap_is_found_by_name_or_refused_by_name_and_reason() {
    if !own_namespace() {
        return;
    }
    let say = |result: Result<Vec<Tap>, TapError>| result.unwrap_err().to_string();
    assert_eq!(say(Tap::open_named("t9", 1)), "tap t9 does not exist");
    assert!(matches!(Tap::open_named("a/b", 1), Err(TapError::Name(_))));
    assert!(matches!(Tap::open_named("", 1), Err(TapError::Name(_))));
    assert!(matches!(
        Tap::open_named("sixteen-letters-", 1),
        Err(TapError::Name(_))
    ));
    assert!(matches!(Tap::open_named("lo", 1), Err(TapError::Kind(..))));

    let held = Tap::create("t1", 1, Some(9000)).unwrap();
    assert_eq!(
        say(Tap::open_named("t1", 1)),
        "tap t1 is in use by another process"
    );
    assert_eq!(say(Tap::create("t1", 1, None)), "tap t1 exists already");
    drop(held);
    assert_eq!(say(Tap::open_named("t1", 1)), "tap t1 does not exist");

    persistent("t2", 1);
    assert!(matches!(
        Tap::open_named("t2", 2),
        Err(TapError::Kind(_, "multi_queue"))
    ));
    assert_eq!(Tap::open_named("t2", 1).unwrap().len(), 1);
    persistent("t3", 2);
    assert_eq!(Tap::open_named("t3", 1).unwrap()[0].name(), "t3");
    assert_eq!(Tap::open_named("t3", 2).unwrap().len(), 2);
}

/// An interface that stays when its descriptors are closed, as `ip tuntap add` makes it; gone with the namespace.
fn persistent(name: &str, queues: u16) {
    const TUNSETPERSIST: u64 = 0x4004_54cb;
    let taps = Tap::create(name, queues, None).unwrap();
    sys::ioctl_value(std::os::fd::AsFd::as_fd(&taps[0]), TUNSETPERSIST, 1).unwrap();
}

#[test]
fn a_tap_is_taken_over_by_descriptor_and_other_files_are_refused() {
    if !own_namespace() {
        return;
    }
    let tap = Tap::create("t0", 1, None).unwrap().remove(0);
    let copy = std::os::fd::AsFd::as_fd(&tap).try_clone_to_owned().unwrap();
    assert_eq!(Tap::from_fd(copy).unwrap().name(), "t0");
    let null = std::fs::File::open("/dev/null").unwrap();
    assert!(matches!(
        Tap::from_fd(null.into()),
        Err(TapError::NotATap(..))
    ));
}

#[test]
fn the_configuration_tells_address_link_pairs_and_mtu() {
    if !own_namespace() {
        return;
    }
    let device = card("t0", 2);
    let mut bytes = [0xff; 16];
    device.read_config(0, &mut bytes);
    assert_eq!(bytes[..6], MAC);
    assert_eq!(bytes[6..8], [1, 0]);
    assert_eq!(bytes[8..10], [2, 0]);
    assert_eq!(bytes[10..12], 1450_u16.to_le_bytes());
    assert_eq!(bytes[12..], [0; 4]);
    let quiet = NetOptions {
        mtu: None,
        offloads: false,
        ..options(64)
    };
    let taps = Tap::create("t1", 1, None).unwrap();
    let device = Net::new(taps, quiet, &PlainThreads).unwrap();
    let absent = feature::MTU | feature::CSUM | feature::GUEST_TSO4 | feature::MQ;
    assert_eq!(device.features() & absent, 0);
}

#[test]
fn a_created_interface_is_gone_with_its_card() {
    if !own_namespace() {
        return;
    }
    let mut device = card("t0", 2);
    let mut guest = Guest::new();
    let (rx, mut tx) = (guest.queue(0, 16), guest.queue(1, 16));
    let features = rx_features(&device);
    activate(&mut device, &mut guest, features, &rx, &mut tx);
    drop(device);
    let request = sys::Ifreq::named("t0").unwrap();
    assert_eq!(sys::interface_index(request).unwrap(), None);
}

#[test]
fn thread_names_fit_their_fifteen_bytes() {
    assert_eq!(thread_name("net", "eth0", "-0"), "net-eth0-0");
    assert_eq!(
        thread_name("net", "a-very-long-name", "-15"),
        "net-a-very-l-15"
    );
}

proptest! {
    /// Whatever lies in the descriptors, parsing ends, and what it accepts lies in RAM.
    #[test]
    fn no_chain_breaks_the_parsers(
        table in proptest::collection::vec((any::<u16>(), any::<u64>(), any::<u32>(), 0_u16..8), 8),
        near in any::<bool>(),
        bytes in proptest::collection::vec(any::<u8>(), 64),
        features in any::<u64>(),
    ) {
        let mut guest = Guest::new();
        let mut queue = guest.queue(0, 8);
        guest.memory.write_slice(&bytes, GuestAddress(0x8000)).unwrap();
        for (index, (next, address, length, flags)) in table.iter().enumerate() {
            let (address, length) =
                if near { (0x8000 + address % 48, length % 64) } else { (*address, *length) };
            let part = Part { address, length, writable: flags & 2 != 0 };
            queue.descriptor(u16::try_from(index).unwrap(), part, *flags, next % 10);
        }
        let head = queue.offer(&[]);
        let memory = Arc::clone(&guest.memory);
        for parser in 0..2 {
            let mut active = queue.active().queue;
            let chain = virtio_queue::QueueOwnedT::iter(&mut active, &*memory).unwrap().next().unwrap();
            prop_assert_eq!(chain.head_index(), head);
            if parser == 0 {
                let mut slices = Vec::new();
                if tx::parse(&memory, chain, features, &mut slices).is_ok() {
                    prop_assert!(slices.len() > 1);
                }
            } else if let Ok((_, answer)) = control::parse(&memory, chain, features, &mut Vec::new()) {
                prop_assert!(answer.0 < RAM_BYTES);
            }
        }
    }
}
