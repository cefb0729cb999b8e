//! What of a balloon outlives its process.

use serde::{Deserialize, Serialize};

/// The device-specific state. Which pages are out needs no saving: they are not there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonState {
    /// Pages that the driver is asked to give up.
    pub num_pages: u32,
    /// Pages that it has given up.
    pub actual: u32,
}
