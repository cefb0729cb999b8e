//! Starts a process that outlives its starter: a session of its own, so that no terminal's hang-up or Ctrl-C reaches it.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes `command` start in a new session.
#[allow(unsafe_code)]
pub(crate) fn in_new_session(command: &mut Command) {
    let start_session = || rustix::process::setsid().map(drop).map_err(io::Error::from);
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; the closure makes one system call,
    // allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(start_session);
    }
}
