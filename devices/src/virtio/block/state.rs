//! What of a disk's device outlives its process.

use serde::{Deserialize, Serialize};

/// What the driver has seen of the disk and must find again; queues and negotiated features are the transport's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockState {
    /// Size in sectors of 512 bytes.
    pub capacity_sectors: u64,
    /// Serial number.
    pub serial: String,
    /// Features offered.
    pub offered_features: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disks_state_survives_a_round_trip() {
        let state = BlockState {
            capacity_sectors: 1 << 40,
            serial: "root".into(),
            offered_features: 0x244,
        };
        let text = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<BlockState>(&text).unwrap(), state);
    }
}
