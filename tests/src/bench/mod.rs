//! Benchmarks against QEMU in the same run: alternating, paired, reported as ratios with their intervals.
//!
//! | benchmark | what is measured | where |
//! |---|---|---|
//! | [`boot`] | the same kernel and initramfs to init; memory, exits and CPU time of the VMM | lab |
//! | [`start`] | process start to the first instruction of a tiny guest | this machine |
//! | [`provision`] | a worker's overlay and seed, durable | this machine |
//! | [`block`] | the image engine's requests, against `qemu-img bench` | this machine |

pub mod block;
pub mod boot;
pub mod measure;
pub mod provision;
pub mod start;
pub mod statistics;
pub mod tiny_guest;

use serde_json::{Value, json};

/// The most that a measured value may be.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    /// What is measured.
    pub name: &'static str,
    /// What it was.
    pub value: f64,
    /// What it may be at most.
    pub at_most: f64,
}

/// Adds to a report which limits are kept, under `limits`.
pub fn add_limits(report: &mut Value, limits: &[Limit]) {
    let limits = limits
        .iter()
        .map(|limit| {
            json!({
                "name": limit.name,
                "value": limit.value,
                "at_most": limit.at_most,
                "kept": limit.value <= limit.at_most,
            })
        })
        .collect();
    report["limits"] = Value::Array(limits);
}

/// The names of the limits that a report says are not kept.
#[must_use]
pub fn broken_limits(report: &Value) -> Vec<String> {
    let limits = report["limits"].as_array().into_iter().flatten();
    limits
        .filter(|limit| limit["kept"] != true)
        .map(|limit| {
            format!(
                "{} is {}, at most {} allowed",
                limit["name"], limit["value"], limit["at_most"]
            )
        })
        .collect()
}
