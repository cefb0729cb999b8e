//! What a vCPU's exits to this process are counted as. Relaxed counters: one writer, readers that only report.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! exit_counters {
    ($($(#[$doc:meta])* $field:ident => $name:literal,)*) => {
        /// Exits to userspace of one vCPU since it was created, by kind.
        #[derive(Debug, Default)]
        pub struct ExitCounters {
            $($(#[$doc])* pub $field: AtomicU64,)*
        }

        impl ExitCounters {
            /// Name and value of every counter.
            pub fn values(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$(($name, self.$field.load(Ordering::Relaxed)),)*].into_iter()
            }
        }
    };
}

exit_counters! {
    /// Reads of an I/O port.
    port_in => "port-in",
    /// Writes to an I/O port.
    port_out => "port-out",
    /// Reads of device memory.
    mmio_read => "mmio-read",
    /// Writes to device memory.
    mmio_write => "mmio-write",
    /// Kicks by the control thread, and other signals.
    interrupted => "interrupted",
    /// Triple faults.
    shutdown => "shutdown",
    /// All others.
    other => "other",
}

/// Counts one exit.
pub fn count(counter: &AtomicU64) {
    // The vCPU's thread is the only writer, so a plain load and store suffice and cost no locked instruction.
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(1),
        Ordering::Relaxed,
    );
}
