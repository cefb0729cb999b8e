//! vhost-user: the queues of a disk served across a process boundary, in both directions.
//!
//! ```text
//!   another VMM ── unix socket: features, memory, rings ──> session ──> Block ──> its one thread
//!        └──────── its guest's memory, kicks and calls: shared, no message ────────────┘
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`export`] | a disk of `drover-block` on a socket, one client after the other |
//! | `session` | what a client has said so far: the protocol's back end |
//! | `record` | what is under way, in memory that the client keeps for whoever serves it next |
//! | `table` | the client's memory, mapped and checked |
//! | `signals` | the eventfds of a client: kicks in, calls out |
//! | `client` | a driver without a guest, for tests and benches (feature `testing`) |
//!
//! The client is not trusted: what it sends is bounded and checked, and what it may break is its own session and what its disk says.
//! The messages themselves are parsed by the `vhost` crate. Requests and queues are those of [`crate::virtio::block`].
#![deny(unsafe_code)]

#[cfg(feature = "testing")]
pub mod client;
pub mod export;
mod record;
mod session;
mod signals;
mod table;
