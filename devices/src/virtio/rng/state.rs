//! What of the entropy device outlives its process.

use serde::{Deserialize, Serialize};

/// The device-specific state of the entropy device: none. Queues and negotiated features are the transport's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RngState {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entropy_devices_state_survives_a_round_trip_and_admits_no_stranger() {
        let text = serde_json::to_string(&RngState {}).unwrap();
        assert_eq!(
            serde_json::from_str::<RngState>(&text).unwrap(),
            RngState {}
        );
        assert!(serde_json::from_str::<RngState>("{\"more\":1}").is_err());
    }
}
