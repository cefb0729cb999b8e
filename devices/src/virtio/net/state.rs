//! What of a network card outlives its process.

use serde::{Deserialize, Serialize};

/// The device-specific state of a network card; queues and negotiated features are the transport's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetState {
    /// The MAC address, which the driver may have changed.
    pub mac: [u8; 6],
    /// Queue pairs in use, at least 1.
    pub active_pairs: u16,
    /// Offloads of the driver's side that are on, as feature bits.
    pub guest_offloads: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_cards_state_survives_a_round_trip() {
        let state = NetState {
            mac: [2, 0, 0, 0, 0, 1],
            active_pairs: 2,
            guest_offloads: 1 << 54,
        };
        let text = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<NetState>(&text).unwrap(), state);
    }
}
