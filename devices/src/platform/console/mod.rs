//! Where the serial port's bytes go to and come from: the back ends behind [`SerialOutput`].
//!
//! | back end | output | input | when nobody reads fast enough |
//! |---|---|---|---|
//! | [`Nowhere`] | dropped | — | — |
//! | [`FileConsole`] | appended | — | a full disk: dropped and counted |
//! | [`StdioConsole`] | standard output | standard input | the oldest bytes are dropped and counted |
//! | [`PtyConsole`] | a new pseudo-terminal | the same | the oldest bytes are dropped and counted |
//! | [`SocketConsole`] | one client of a unix socket | the same | the oldest bytes are dropped and counted |
//!
//! ```text
//!             write                                  ┌─ position of the reader
//!  port ───────────────▶ [ backlog, bounded ░░░░▒▒▒▒▒▒▒▒▒▒▒▒▒ ] ─ as far as it takes without blocking ─▶ reader
//!       ◀── ready, room ─── input, no more than the port has room for ◀──────────────────────────────── reader
//! ```
//!
//! The last three are one [`channel::Channel`] each: a bounded backlog, at most one reader, and an epoll set of its own that the
//! control loop sees as a single descriptor which never changes, whatever comes and goes behind it.

mod backlog;
mod channel;
mod file;
mod pty;
mod socket;
mod stdio;

pub use file::{FileConsole, Nowhere};
pub use pty::PtyConsole;
pub use socket::SocketConsole;
pub use stdio::StdioConsole;

#[cfg(doc)]
use super::serial::SerialOutput;

/// Output that waits for a reader, in bytes. A socket may keep more, as scrollback.
const BACKLOG: usize = 64 << 10;
