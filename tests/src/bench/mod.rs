//! Benchmarks against QEMU in the same run: alternating, paired, reported as ratios with their intervals.
//!
//! | benchmark | what is measured | where |
//! |---|---|---|
//! | [`boot`] | the same kernel and initramfs to init; memory, exits and CPU time of the VMM | lab |
//! | [`start`] | process start to the first instruction of a tiny guest | this machine |
//! | [`provision`] | a worker's overlay and seed, durable | this machine |

pub mod boot;
pub mod measure;
pub mod provision;
pub mod start;
pub mod statistics;
pub mod tiny_guest;
