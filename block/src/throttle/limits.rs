//! What a disk or a group of disks may use, as its owner states it.

use serde::{Deserialize, Serialize};

use super::bucket::Bucket;

/// The greatest rate that can be stated, a second.
pub const MAX_RATE: u64 = 1 << 50;
/// The longest burst, in seconds.
pub const MAX_BURST_SECONDS: u32 = 86_400;

/// A rate above the usual one, for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Burst {
    /// A second; at least the usual rate.
    pub rate: u64,
    /// How long it can last after a time of rest, 1 to [`MAX_BURST_SECONDS`].
    pub seconds: u32,
}

/// A rate. A tenth of a second's worth can go at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// A second, 1 to [`MAX_RATE`].
    pub rate: u64,
    /// What is allowed above that for a while.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<Burst>,
}

impl From<u64> for Limit {
    fn from(rate: u64) -> Self {
        Self { rate, burst: None }
    }
}

/// Limits of one unit by direction. All that are stated hold together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Directions {
    /// Both directions together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<Limit>,
    /// Reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read: Option<Limit>,
    /// Writes, discards and write-zeroes requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write: Option<Limit>,
}

/// What a disk, or a group of disks together, may use. What is not stated is not limited; flushes never are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Requests.
    pub operations: Directions,
    /// Bytes read and written; discards and write-zeroes requests move none.
    pub bytes: Directions,
}

/// Limits that make no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("limit {name}: {reason}")]
pub struct LimitsError {
    /// Which, like `bytes.read`.
    pub name: &'static str,
    /// What is wrong with it.
    pub reason: String,
}

/// Which way a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

/// What a limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Operations,
    Bytes,
}

/// A bucket with what it is for; two of them make a limit with a burst.
#[derive(Debug)]
pub(super) struct Rule {
    pub(super) unit: Unit,
    /// `None` for both together.
    pub(super) direction: Option<Direction>,
    /// Whether it is the faster of the two buckets of a limit with a burst.
    pub(super) is_burst: bool,
    pub(super) bucket: Bucket,
}

impl Limits {
    fn each(&self) -> [(&'static str, Unit, Option<Direction>, Option<Limit>); 6] {
        use Direction::{Read, Write};
        use Unit::{Bytes, Operations};
        let (operations, bytes) = (&self.operations, &self.bytes);
        [
            ("operations.total", Operations, None, operations.total),
            ("operations.read", Operations, Some(Read), operations.read),
            (
                "operations.write",
                Operations,
                Some(Write),
                operations.write,
            ),
            ("bytes.total", Bytes, None, bytes.total),
            ("bytes.read", Bytes, Some(Read), bytes.read),
            ("bytes.write", Bytes, Some(Write), bytes.write),
        ]
    }

    /// Whether anything is limited.
    #[must_use]
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }

    /// Looks whether every number is in its range.
    ///
    /// # Errors
    /// The first that is not.
    pub fn check(&self) -> Result<(), LimitsError> {
        for (name, _, _, limit) in self.each() {
            let Some(Limit { rate, burst }) = limit else {
                continue;
            };
            let refuse = |reason: String| Err(LimitsError { name, reason });
            if !(1..=MAX_RATE).contains(&rate) {
                return refuse(format!(
                    "a rate is 1 to {MAX_RATE} a second, not {rate}; leave it out for no limit"
                ));
            }
            let Some(Burst {
                rate: fast,
                seconds,
            }) = burst
            else {
                continue;
            };
            if !(rate..=MAX_RATE).contains(&fast) {
                return refuse(format!(
                    "a burst is at least as fast as the rate, {rate} to {MAX_RATE} a second, not {fast}"
                ));
            }
            if !(1..=MAX_BURST_SECONDS).contains(&seconds) {
                return refuse(format!(
                    "a burst lasts 1 to {MAX_BURST_SECONDS} seconds, not {seconds}"
                ));
            }
        }
        Ok(())
    }

    /// The buckets that enforce these limits, which are in range.
    pub(super) fn rules(&self) -> Vec<Rule> {
        let mut rules = Vec::new();
        for (_, unit, direction, limit) in self.each() {
            let Some(Limit { rate, burst }) = limit else {
                continue;
            };
            let mut add = |is_burst, rate, capacity: u64| {
                rules.push(Rule {
                    unit,
                    direction,
                    is_burst,
                    bucket: Bucket::new(rate, capacity.max(1)),
                });
            };
            let Some(burst) = burst else {
                add(false, rate, rate / 10);
                continue;
            };
            // While a burst lasts the bucket loses what it is faster than the rate.
            let above = (burst.rate - rate).saturating_mul(burst.seconds.into());
            add(false, rate, above.max(rate / 10));
            add(true, burst.rate, burst.rate / 10);
        }
        rules
    }
}
