//! What of a console device outlives its process.

use serde::{Deserialize, Serialize};

/// The device-specific state: which ports the guest has open. Queues and features are the transport's; bytes on their way are lost,
/// as on a serial line, and the protocols over it begin anew.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConsoleState {
    /// One for each port.
    pub guest_open: Vec<bool>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_survives_a_round_trip_and_admits_no_stranger() {
        let state = ConsoleState {
            guest_open: vec![true, false],
        };
        let text = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<ConsoleState>(&text).unwrap(), state);
        assert!(serde_json::from_str::<ConsoleState>("{\"guest_open\":[],\"x\":1}").is_err());
    }
}
