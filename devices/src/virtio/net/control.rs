//! The control queue (virtio 1.2 §5.1.6.5): commands of a class, a number and data, each answered by one byte.
//!
//! Frames are not filtered by address: the tap's bridge does that, and a device may deliver more than was asked for. Receive modes and
//! filter tables are therefore checked, acknowledged and forgotten.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::seldom::Seldom;
use crate::virtio::net::bits::{control, feature};
use crate::virtio::net::metrics::{NetMetrics, count};
use crate::virtio::net::tap::Tap;
use crate::virtio::queue::{Chain, EndlessChain, GuestQueue, walk};
use crate::virtio::worker::Progress;

/// How often the host refused what a driver asked for, in the whole process: a driver may ask as often as it likes.
static NOT_SWITCHED: Seldom = Seldom::new();

/// Commands in one turn.
const TURN: usize = 16;

/// The longest command: filter tables of more addresses than any driver sends.
const MAX_COMMAND_BYTES: usize = 16 << 10;

/// A command of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// A receive mode is switched.
    ReceiveMode,
    /// Filter tables are set.
    FilterTables,
    /// The device's address is set.
    SetMac([u8; 6]),
    /// This many queue pairs are in use.
    SetQueuePairs(u16),
    /// These offloads of the driver's side are on.
    SetGuestOffloads(u64),
}

/// What is wrong with a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadCommand {
    /// The chain has no end, so there is no place for an answer.
    #[error(transparent)]
    Endless(#[from] EndlessChain),
    /// There is no byte to answer in.
    #[error("a control command has no place for its answer")]
    NoAnswer,
    /// The command can be answered: it failed.
    #[error("a control command is malformed")]
    Malformed(GuestAddress),
}

/// Reads a command off its chain; also where its answer goes.
///
/// # Errors
/// It is malformed, unknown or not of a negotiated feature.
pub fn parse(
    memory: &GuestMemoryMmap<()>,
    chain: Chain<'_>,
    features: u64,
    bytes: &mut Vec<u8>,
) -> Result<(Command, GuestAddress), BadCommand> {
    bytes.clear();
    let mut answer = None;
    let mut good = true;
    walk(chain, |descriptor| {
        let (address, length) = (descriptor.addr(), descriptor.len());
        if descriptor.is_write_only() {
            answer = address
                .0
                .checked_add(u64::from(length) - 1)
                .map(GuestAddress);
            return Ok(());
        }
        let start = bytes.len();
        let end = start.saturating_add(length as usize);
        // Nothing readable may follow the answer (§2.7.4.2).
        good &= answer.is_none() && end <= MAX_COMMAND_BYTES;
        if good {
            bytes.resize(end, 0);
            let into = bytes.get_mut(start..).unwrap_or_default();
            good = memory.read_slice(into, address).is_ok();
        }
        Ok::<(), BadCommand>(())
    })?;
    let answer = answer
        .filter(|address| memory.read_obj::<u8>(*address).is_ok())
        .ok_or(BadCommand::NoAnswer)?;
    decode(bytes, features)
        .filter(|_| good)
        .map(|command| (command, answer))
        .ok_or(BadCommand::Malformed(answer))
}

fn decode(bytes: &[u8], features: u64) -> Option<Command> {
    let (&[class, number], data) = bytes.split_first_chunk()?;
    let has = |bit: u64| features & bit != 0;
    match (class, number) {
        (control::RX, ..=control::RX_ALLMULTI) if has(feature::CTRL_RX) => {
            matches!(data, [0 | 1]).then_some(Command::ReceiveMode)
        }
        (control::MAC, control::MAC_TABLE_SET) if has(feature::CTRL_RX) => {
            let rest = filter_table(filter_table(data)?)?;
            rest.is_empty().then_some(Command::FilterTables)
        }
        (control::MAC, control::MAC_ADDR_SET) if has(feature::CTRL_MAC_ADDR) => {
            data.try_into().ok().map(Command::SetMac)
        }
        (control::MQ, control::MQ_VQ_PAIRS_SET) if has(feature::MQ) => data
            .try_into()
            .ok()
            .map(|pairs| Command::SetQueuePairs(u16::from_le_bytes(pairs))),
        (control::GUEST_OFFLOADS, control::GUEST_OFFLOADS_SET)
            if has(feature::CTRL_GUEST_OFFLOADS) =>
        {
            let wanted = u64::from_le_bytes(data.try_into().ok()?);
            (wanted & !(features & feature::GUEST_OFFLOADS) == 0)
                .then_some(Command::SetGuestOffloads(wanted))
        }
        _ => None,
    }
}

/// What follows a table of addresses: a count, and six bytes each.
fn filter_table(bytes: &[u8]) -> Option<&[u8]> {
    let (count, rest) = bytes.split_first_chunk()?;
    rest.get(
        usize::try_from(u32::from_le_bytes(*count))
            .ok()?
            .checked_mul(6)?..,
    )
}

/// What the control queue changes and others read.
#[derive(Debug)]
pub(super) struct Shared {
    /// The address the card was made with.
    own_mac: [u8; 6],
    mac: Mutex<[u8; 6]>,
    active_pairs: AtomicU16,
    guest_offloads: AtomicU64,
}

impl Shared {
    pub(super) fn new(mac: [u8; 6]) -> Self {
        Self {
            own_mac: mac,
            mac: Mutex::new(mac),
            active_pairs: AtomicU16::new(1),
            guest_offloads: AtomicU64::new(0),
        }
    }

    pub(super) fn mac(&self) -> [u8; 6] {
        *self.mac.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_mac(&self, mac: [u8; 6]) {
        *self.mac.lock().unwrap_or_else(PoisonError::into_inner) = mac;
    }

    pub(super) fn active_pairs(&self) -> u16 {
        self.active_pairs.load(Ordering::Relaxed)
    }

    pub(super) fn guest_offloads(&self) -> u64 {
        self.guest_offloads.load(Ordering::Relaxed)
    }
}

/// The control queue and what its commands act on.
pub(super) struct Control {
    queue: Option<GuestQueue>,
    features: u64,
    taps: Vec<Arc<Tap>>,
    shared: Arc<Shared>,
    bytes: Vec<u8>,
}

impl Control {
    pub(super) fn new(taps: Vec<Arc<Tap>>, shared: Arc<Shared>) -> Self {
        Self {
            queue: None,
            features: 0,
            taps,
            shared,
            bytes: Vec::new(),
        }
    }

    pub(super) fn start(&mut self, features: u64) {
        self.features = features;
        self.set_guest_offloads(features & feature::GUEST_OFFLOADS);
    }

    pub(super) fn set_queue(&mut self, queue: Option<GuestQueue>) {
        self.queue = queue;
    }

    /// Back to what a driver finds after a reset: one queue pair, no offloads, the card's own address.
    pub(super) fn reset(&mut self) {
        self.queue = None;
        self.features = 0;
        self.set_queue_pairs(1);
        self.set_guest_offloads(0);
        self.shared.set_mac(self.shared.own_mac);
    }

    pub(super) fn run(&mut self, metrics: &NetMetrics) -> Progress {
        let Some(mut queue) = self.queue.take() else {
            return Progress::Idle;
        };
        queue.silence();
        let memory = Arc::clone(queue.memory());
        let mut commands = 0;
        let progress = loop {
            if commands == TURN {
                break Progress::More;
            }
            let Some(chain) = queue.pop(&memory) else {
                if queue.listen() {
                    continue;
                }
                break Progress::Idle;
            };
            commands += 1;
            let head = chain.head_index();
            let (ok, answer) = match parse(&memory, chain, self.features, &mut self.bytes) {
                Ok((command, answer)) => (self.carry_out(&command), answer),
                Err(BadCommand::Malformed(answer)) => (false, answer),
                Err(error) => {
                    queue.give_up(&error);
                    break Progress::Idle;
                }
            };
            count(
                if ok {
                    &metrics.control_ok
                } else {
                    &metrics.control_refused
                },
                1,
            );
            let code = if ok { control::OK } else { control::ERR };
            match memory.write_obj(code, answer) {
                Ok(()) => queue.push(head, 1),
                Err(error) => queue.give_up(&error),
            }
        };
        queue.signal();
        self.queue = Some(queue);
        progress
    }

    fn carry_out(&mut self, command: &Command) -> bool {
        match *command {
            Command::ReceiveMode | Command::FilterTables => true,
            Command::SetMac(mac) => {
                self.shared.set_mac(mac);
                true
            }
            Command::SetQueuePairs(pairs) => {
                let known = (1..=self.taps.len()).contains(&usize::from(pairs));
                known && self.set_queue_pairs(pairs)
            }
            Command::SetGuestOffloads(offloads) => self.set_guest_offloads(offloads),
        }
    }

    /// Attaches the first `pairs` taps and detaches the others; false if the host refused one.
    fn set_queue_pairs(&mut self, pairs: u16) -> bool {
        let mut done = true;
        for (number, tap) in self.taps.iter().enumerate().skip(1) {
            if let Err(error) = tap.set_attached(number < usize::from(pairs)) {
                if let Some(times) = NOT_SWITCHED.again() {
                    tracing::warn!(
                        tap = tap.name(),
                        number,
                        times,
                        "a queue cannot be switched: {error}"
                    );
                }
                done = false;
            }
        }
        if done {
            self.shared.active_pairs.store(pairs, Ordering::Relaxed);
        }
        done
    }

    fn set_guest_offloads(&mut self, offloads: u64) -> bool {
        let Some(tap) = self.taps.first() else {
            return false;
        };
        match tap.set_guest_offloads(offloads) {
            Ok(()) => {
                self.shared
                    .guest_offloads
                    .store(offloads, Ordering::Relaxed);
                true
            }
            Err(error) => {
                if let Some(times) = NOT_SWITCHED.again() {
                    tracing::warn!(
                        tap = tap.name(),
                        times,
                        "offloads cannot be switched: {error}"
                    );
                }
                false
            }
        }
    }
}
