//! Power cuts and failing hosts, tried out on what the engine did to its file.
//!
//! A run's writes, punches and fdatasyncs are recorded with their beginnings and ends:
//!
//! ```text
//!   write a ├──┤                    durable at the cut: a, because an fdatasync began after its end and is over
//!   write b    ├─────────┤          may be lost, wholly or in part, sector by sector: b and c
//!   sync           ├───┤
//!   write c                ├── ╳ cut
//! ```
//!
//! Whatever is left must have no corruption, and every sector must hold what was flushed or something that the guest wrote later.
//! Runs are made with the inline engine and with many requests at once in a shuffled order of transfers.
//!
//! `BLOCK_POWER_CUTS` is the number of cuts of all tests together; 20 000 if it is not set.

mod cuts;
mod failures;
mod guest;
mod promise;
mod replay;
mod scene;
