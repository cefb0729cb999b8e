//! 16550A serial port at 0x3f8, GSI 4, around vm-superio's register model.
//!
//! ```text
//!  vCPU: one exit a byte ──> [Pending output, bounded] ── timer, at most OUTPUT_DELAY later ──> control loop ──> a SerialOutput
//!  control loop: a SerialOutput's input ── push_input, as far as the FIFO has room ──> guest
//! ```
//!
//! A vCPU never makes a system call a byte: bytes gather and a timer, armed by the first of them, wakes the control loop.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use vm_superio::serial::SerialEvents;
use vm_superio::{Serial, SerialState, Trigger};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::timerfd::TimerFd;

use super::lock;
use crate::bus::BusDevice;

/// Output waits at most this long for more before the control loop is woken.
pub const OUTPUT_DELAY: Duration = Duration::from_millis(2);

/// Output that the control loop has not taken yet; past it the oldest bytes are dropped and counted.
const OUTPUT_LIMIT: usize = 256 << 10;

/// The UART's receive FIFO, in bytes, as vm-superio has it.
const FIFO_LEN: usize = 64;

/// Where the port's bytes go to and come from. Owned by the control loop, called on its thread only.
pub trait SerialOutput: Send {
    /// Takes all of `bytes`. Never blocks for longer than a local file's write does: what a reader is too slow for is dropped by the
    /// output and counted there.
    fn write(&mut self, bytes: &[u8]);

    /// Descriptors to wait for; [`SerialOutput::ready`] is called when one is readable.
    fn descriptors(&self) -> Vec<RawFd>;

    /// Handles readiness of `descriptor`: accepts a client, reads input. At most `room` bytes of input (perhaps none) are appended to
    /// `input`; the rest stays unread until the guest has room.
    fn ready(&mut self, descriptor: RawFd, room: usize, input: &mut Vec<u8>);

    /// Stops reporting input while the guest has no room for it (`held`), or begins again; clients and output are served all the same.
    fn hold_input(&mut self, _held: bool) {}

    /// Bytes dropped so far because a reader was too slow.
    fn dropped(&self) -> u64 {
        0
    }
}

struct Irq(EventFd);

impl Trigger for Irq {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Wakes the control loop when the guest has emptied the FIFO, if input was held back.
struct Room {
    wanted: Arc<Mutex<bool>>,
    event: EventFd,
}

impl SerialEvents for Room {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}

    fn in_buffer_empty(&self) {
        if std::mem::take(&mut *lock(&self.wanted)) {
            // The counter cannot overflow: it is written only after the control loop asked again.
            let _ = self.event.write(1);
        }
    }
}

/// Gathers output for the control loop.
struct PendingOutput {
    bytes: VecDeque<u8>,
    dropped: u64,
    timer: TimerFd,
}

impl Write for PendingOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.is_empty() && !bytes.is_empty() {
            self.timer.reset(OUTPUT_DELAY, None)?;
        }
        for &byte in bytes {
            if self.bytes.len() == OUTPUT_LIMIT {
                self.bytes.pop_front();
                self.dropped += 1;
            }
            self.bytes.push_back(byte);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

type Uart = Serial<Irq, Room, PendingOutput>;

/// The serial port.
pub struct SerialPort {
    uart: Mutex<Uart>,
    room_wanted: Arc<Mutex<bool>>,
    timer: RawFd,
    room: RawFd,
}

impl SerialPort {
    /// The first port of COM1.
    pub const COM1: u16 = 0x3f8;
    /// Ports in its range.
    pub const LEN: u16 = 8;

    /// A port in its power-on state; `irq` is signalled for each (edge-triggered) interrupt.
    ///
    /// # Errors
    /// No more descriptors.
    pub fn new(irq: EventFd) -> io::Result<Self> {
        let timer = TimerFd::new()?;
        let room = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
        let room_wanted = Arc::new(Mutex::new(false));
        let (timer_fd, room_fd) = (timer.as_raw_fd(), room.as_raw_fd());
        let output = PendingOutput {
            bytes: VecDeque::new(),
            dropped: 0,
            timer,
        };
        let events = Room {
            wanted: room_wanted.clone(),
            event: room,
        };
        Ok(Self {
            uart: Mutex::new(Serial::with_events(Irq(irq), events, output)),
            room_wanted,
            timer: timer_fd,
            room: room_fd,
        })
    }

    /// Readable when output waits to be taken. Lives as long as the port.
    #[must_use]
    pub fn output_descriptor(&self) -> RawFd {
        self.timer
    }

    /// Readable when the guest has made room for input that was held back. Lives as long as the port.
    #[must_use]
    pub fn room_descriptor(&self) -> RawFd {
        self.room
    }

    /// Moves all waiting output to the end of `output` and quietens [`SerialPort::output_descriptor`].
    pub fn take_output(&self, output: &mut Vec<u8>) {
        let mut uart = lock(&self.uart);
        let pending = uart.writer_mut();
        // Disarms: the next byte arms it again. An expiry that nobody read is forgotten with it.
        let _ = pending.timer.clear();
        let (front, back) = pending.bytes.as_slices();
        output.extend_from_slice(front);
        output.extend_from_slice(back);
        pending.bytes.clear();
    }

    /// How much input the guest can take now, in bytes. If none, [`SerialPort::room_descriptor`] becomes readable once there is.
    #[must_use]
    pub fn input_room(&self) -> usize {
        let uart = lock(&self.uart);
        let room = uart.fifo_capacity();
        if room == 0 {
            *lock(&self.room_wanted) = true;
        }
        room
    }

    /// Quietens [`SerialPort::room_descriptor`].
    pub fn acknowledge_room(&self) {
        // Not readable is fine: somebody was faster.
        let _ = lock(&self.uart).events().event.read();
    }

    /// Gives the guest as much of `input` as there is room for; returns how much that was.
    pub fn push_input(&self, input: &[u8]) -> usize {
        let mut uart = lock(&self.uart);
        let length = input.len().min(uart.fifo_capacity());
        // The interrupt's counter cannot overflow and the FIFO has room, so nothing is lost.
        uart.enqueue_raw_bytes(&input[..length]).unwrap_or(0)
    }

    /// Output bytes dropped because the control loop did not take them.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        lock(&self.uart).writer().dropped
    }

    /// What a snapshot keeps. Output must have been taken before.
    #[must_use]
    pub fn state(&self) -> SerialState {
        lock(&self.uart).state()
    }

    /// Takes the registers back to their power-on values, keeping output that waits to be taken.
    pub fn reset(&self) {
        let mut uart = lock(&self.uart);
        for _ in 0..FIFO_LEN {
            uart.read(DATA);
        }
        for (register, value) in [
            (LCR, LCR_8N1_DLAB),
            (DATA, 12),
            (IER, 0),
            (LCR, LCR_8N1),
            (IER, 0),
            (MCR, MCR_OUT2),
        ] {
            // Writing none of these sends a byte or raises an interrupt.
            let _ = uart.write(register, value);
        }
    }
}

const DATA: u8 = 0;
const IER: u8 = 1;
const IIR: u8 = 2;
const LCR: u8 = 3;
const MCR: u8 = 4;
/// Eight data bits, no parity, one stop bit.
const LCR_8N1: u8 = 0x03;
const LCR_8N1_DLAB: u8 = 0x83;
/// The registers 0 and 1 are the divisor's.
const DLAB: u8 = 0x80;
/// The auxiliary output that gates the interrupt on a PC.
const MCR_OUT2: u8 = 0x08;

impl BusDevice for SerialPort {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let (Ok(offset), Some(first)) = (u8::try_from(offset), data.first_mut()) {
            let mut uart = lock(&self.uart);
            if offset == IIR {
                still_pending(&mut uart);
            }
            *first = uart.read(offset);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (Ok(offset), Some(&value)) = (u8::try_from(offset), data.first()) {
            // A failed signal leaves the byte in place; the guest polls or is interrupted by the next one.
            let _ = lock(&self.uart).write(offset, value);
        }
    }
}

/// Makes input that waits a reason for the interrupt again. On a real UART it is one until all of it is read, while vm-superio
/// forgets it with the first byte read: a driver that stops after so many bytes (Linux: 256) would never come back for the rest.
fn still_pending<T: Trigger<E = io::Error>, E: SerialEvents, W: Write>(uart: &mut Serial<T, E, W>) {
    if uart.fifo_capacity() < FIFO_LEN && uart.read(LCR) & DLAB == 0 {
        // Enabling an interrupt that is enabled looks at its reasons. A failed signal is no loss: the driver is here.
        let enabled = uart.read(IER);
        let _ = uart.write(IER, enabled);
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

    use super::*;

    fn port() -> (SerialPort, EventFd) {
        let irq = EventFd::new(libc::EFD_NONBLOCK).expect("eventfd");
        (
            SerialPort::new(irq.try_clone().expect("dup")).expect("port"),
            irq,
        )
    }

    fn readable(descriptor: RawFd, timeout_ms: i32) -> bool {
        let epoll = Epoll::new().expect("epoll");
        let wanted = EpollEvent::new(EventSet::IN, 0);
        epoll
            .ctl(ControlOperation::Add, descriptor, wanted)
            .expect("a valid descriptor");
        epoll
            .wait(timeout_ms, &mut [EpollEvent::default()])
            .expect("wait")
            == 1
    }

    #[test]
    fn output_gathers_until_it_is_taken() {
        let (port, _) = port();
        for byte in b"hello\n" {
            port.write(0, &[*byte]);
        }
        let mut output = Vec::new();
        port.take_output(&mut output);
        assert_eq!(output, b"hello\n");
        port.take_output(&mut output);
        assert_eq!(output.len(), 6);
    }

    #[test]
    fn the_first_byte_arms_the_timer() {
        let (port, _) = port();
        port.write(0, b"x");
        assert!(readable(port.output_descriptor(), 1000));
    }

    #[test]
    fn input_interrupts_and_a_full_fifo_asks_to_be_told_of_room() {
        let (port, irq) = port();
        port.write(1, &[1]);
        assert_eq!(port.push_input(&[7; 100]), 64);
        assert_eq!(irq.read().ok(), Some(1));
        assert_eq!(port.input_room(), 0);
        let mut byte = [0];
        for _ in 0..64 {
            port.read(0, &mut byte);
            assert_eq!(byte, [7]);
        }
        assert_eq!(port.input_room(), 64);
        assert!(readable(port.room_descriptor(), 0));
        port.acknowledge_room();
    }

    #[test]
    fn input_that_a_driver_leaves_for_later_stays_a_reason_to_interrupt() {
        const RECEIVED: u8 = 0x04;
        let (port, _irq) = port();
        port.write(1, &[1]);
        port.push_input(&[7; 64]);
        let mut byte = [0];
        for _ in 0..3 {
            port.read(2, &mut byte);
            assert_eq!(byte[0] & 0x0f, RECEIVED);
            port.read(0, &mut byte);
        }
        for _ in 3..64 {
            port.read(0, &mut byte);
        }
        port.read(2, &mut byte);
        assert_ne!(byte[0] & 0x0f, RECEIVED, "nothing is left");
    }

    #[test]
    fn output_past_the_limit_drops_the_oldest() {
        let (port, _) = port();
        for _ in 0..OUTPUT_LIMIT + 3 {
            port.write(0, b"a");
        }
        port.write(0, b"z");
        let mut output = Vec::new();
        port.take_output(&mut output);
        assert_eq!(output.len(), OUTPUT_LIMIT);
        assert_eq!(output.last(), Some(&b'z'));
        assert_eq!(port.dropped(), 4);
    }

    #[test]
    fn reset_empties_the_fifo_and_disables_interrupts() {
        let (port, irq) = port();
        port.write(1, &[1]);
        port.push_input(b"abc");
        let _ = irq.read();
        port.reset();
        let mut status = [0];
        port.read(5, &mut status);
        assert_eq!(status[0] & 1, 0, "no data ready");
        port.push_input(b"d");
        assert!(irq.read().is_err(), "no interrupt while IER is clear");
    }
}
