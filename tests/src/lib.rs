//! Drover's end-to-end tests and benchmarks, and the lab in which they run.
//!
//! ```text
//! this machine                          the emulated KVM host ("L1")           guests ("L2")
//! cargo xtask test
//!   drover-lab host ── QEMU TCG, SVM ──> drover-lab run ── drover-vmm, KVM ──> busybox, Debian workers
//!     host/: boots hosts, shards,          stories/: one function a test         lab-guest: its helper
//!     counts results                       fixtures/: Vm, Peer, Console, taps
//! ```
//!
//! On a machine whose processor has vmx or svm, `drover-lab run` is started directly; stories cannot tell
//! the difference.

#![forbid(unsafe_code)]

pub mod bench;
pub mod demo;
pub mod failure;
pub mod fixtures;
pub mod host;
pub mod pattern;
pub mod runner;
pub mod site;
pub mod stories;
