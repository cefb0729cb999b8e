//! Features, configuration space and control messages (virtio 1.2 §5.3).

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Feature bits (§5.3.3).
pub mod feature {
    /// VIRTIO_CONSOLE_F_MULTIPORT: several ports, and control queues that tell of them.
    pub const MULTIPORT: u64 = 1 << 1;
}

/// The configuration space (§5.3.4); what belongs to features that are not offered is zero.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// Columns.
    pub columns: U16,
    /// Rows.
    pub rows: U16,
    /// How many ports there may be.
    pub max_nr_ports: U32,
    /// Emergency write.
    pub emergency_write: U32,
}

/// A control message (§5.3.6.2); PORT_NAME is followed by the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Control {
    /// The port that it is about.
    pub id: U32,
    /// What happened.
    pub event: U16,
    /// More about that.
    pub value: U16,
}

/// Events of a control message.
pub mod event {
    /// Driver: it is ready to hear of ports (value 1).
    pub const DEVICE_READY: u16 = 0;
    /// Device: there is a port.
    pub const DEVICE_ADD: u16 = 1;
    /// Driver: it is ready to use the port (value 1).
    pub const PORT_READY: u16 = 3;
    /// Device: the port is to be a console.
    pub const CONSOLE_PORT: u16 = 4;
    /// Either: the port is open (1) or closed (0) at this end.
    pub const PORT_OPEN: u16 = 6;
    /// Device: the port's name follows.
    pub const PORT_NAME: u16 = 7;
}

/// Queue on which the device sends control messages.
pub const CONTROL_RECEIVE: u16 = 2;
/// Queue on which the driver sends control messages.
pub const CONTROL_TRANSMIT: u16 = 3;

/// What a queue is for (§5.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Bytes to the guest, for this port.
    Receive(usize),
    /// Bytes from the guest, for this port.
    Transmit(usize),
    /// Control messages to the guest.
    ControlReceive,
    /// Control messages from the guest.
    ControlTransmit,
}

impl Role {
    /// What queue `index` is for.
    #[must_use]
    pub fn of(index: u16) -> Self {
        let port = match index / 2 {
            0 => 0,
            pair => usize::from(pair) - 1,
        };
        match index {
            CONTROL_RECEIVE => Self::ControlReceive,
            CONTROL_TRANSMIT => Self::ControlTransmit,
            _ if index.is_multiple_of(2) => Self::Receive(port),
            _ => Self::Transmit(port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_numbered_as_in_5_3_2() {
        use Role::{ControlReceive, ControlTransmit, Receive, Transmit};
        let roles: Vec<Role> = (0..8).map(Role::of).collect();
        assert_eq!(
            roles,
            [
                Receive(0),
                Transmit(0),
                ControlReceive,
                ControlTransmit,
                Receive(1),
                Transmit(1),
                Receive(2),
                Transmit(2)
            ]
        );
        assert_eq!(size_of::<Config>(), 12);
        assert_eq!(size_of::<Control>(), 8);
    }
}
