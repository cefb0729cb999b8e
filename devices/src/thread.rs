//! How a device gets a thread of its own.

use std::io;
use std::thread::JoinHandle;

/// What a device thread does; selects its seccomp policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadRole {
    /// Serves one disk's queues.
    Disk,
    /// Serves one network queue pair.
    Net,
    /// Serves a slow device (rng, console).
    Slow,
    /// Serves the guest's sockets.
    Vsock,
    /// Speaks with the back end of a vhost-user device.
    VhostUser,
}

/// Starts device threads. The VMM's implementation names the thread and narrows its system calls before `body` runs.
pub trait Threads: Send + Sync {
    /// Starts `body` on a new thread called `name` (at most 15 bytes).
    ///
    /// # Errors
    /// The thread could not be started.
    fn spawn(
        &self,
        name: &str,
        role: ThreadRole,
        body: Box<dyn FnOnce() + Send>,
    ) -> io::Result<JoinHandle<()>>;
}
