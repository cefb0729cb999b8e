//! The chipset's small devices, each at the ports where an ICH9 or a PC has it.
//!
//! | ports | device | module |
//! |---|---|---|
//! | 0x3f8–0x3ff | 16550A serial port, GSI 4 | [`serial`] |
//! | 0x60, 0x64 | keyboard controller, reset only | [`i8042`] |
//! | 0x70–0x71 | real-time clock and CMOS memory | [`rtc`] |
//! | 0x92 | system control port A | [`port92`] |
//! | 0x402 | firmware's debug console | [`debugcon`] |
//! | 0x510–0x51b | firmware configuration | [`fw_cfg`] |
//! | 0xcf9 | reset control | [`reset`] |
//! | PMBASE + 0x00–0x7f | ACPI power management, SCI on GSI 9 | [`pm`] |
//!
//! [`pflash`], the firmware's flash, lies in memory below 4 GiB.
//!
//! The serial port's other end, on the host, is one of the back ends in [`console`].
//!
//! A device that the guest uses to end or restart itself says so through a [`PowerSink`]; it never acts on the process.

pub mod console;
pub mod debugcon;
pub mod fw_cfg;
pub mod i8042;
pub mod pflash;
pub mod pm;
pub mod port92;
pub mod reset;
pub mod rtc;
pub mod serial;

/// What the guest asked the platform to do with the whole machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerRequest {
    /// Restart it.
    Reset,
    /// Turn it off (ACPI S5).
    PowerOff,
}

/// Receives the guest's power requests on a vCPU thread; must only note the request and return.
pub trait PowerSink: Send + Sync {
    /// Notes that the guest asked for `request`.
    fn request(&self, request: PowerRequest);
}

/// Locks a register file; a panic elsewhere while it was held does not make a register file invalid.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
pub(crate) mod testing {
    //! Recorders for what devices signal.

    use std::sync::Mutex;

    use super::{PowerRequest, PowerSink, lock};
    use crate::interrupt::IrqLine;

    /// Records power requests.
    #[derive(Default)]
    pub(crate) struct PowerLog(Mutex<Vec<PowerRequest>>);

    impl PowerLog {
        /// What was asked for since the last call.
        pub(crate) fn take(&self) -> Vec<PowerRequest> {
            std::mem::take(&mut lock(&self.0))
        }
    }

    impl PowerSink for PowerLog {
        fn request(&self, request: PowerRequest) {
            lock(&self.0).push(request);
        }
    }

    /// Remembers a line's level.
    #[derive(Default)]
    pub(crate) struct LineLevel(Mutex<bool>);

    impl LineLevel {
        /// Whether the line is asserted.
        pub(crate) fn asserted(&self) -> bool {
            *lock(&self.0)
        }
    }

    impl IrqLine for LineLevel {
        fn set(&self, asserted: bool) {
            *lock(&self.0) = asserted;
        }
    }
}
