//! Threads by role, each narrowed to the system calls that its role needs (seccomp, KILL_PROCESS).
//!
//! | role | threads | policy in resources/seccomp/x86_64.json |
//! |---|---|---|
//! | control | main thread | what building, resetting and removing a VM takes; a superset of the others, which inherit it |
//! | api | HTTP server | sockets and epoll |
//! | vcpu | vcpu-N | KVM ioctls, signals |
//! | disk, net, slow, vsock | device threads | their files' reads and writes, epoll |
//! | vhost_user | device threads | a unix socket, epoll |
//! | pool | block-io-N, of disks that use no io_uring | transfers of files that are open |
//!
//! A thread starts with its creator's filter and can only narrow it further. The policies are compiled when Drover is built, so that
//! starting a thread costs two system calls.

use std::io;
use std::thread::{Builder, JoinHandle};

use drover_block::ThreadStart;
use drover_devices::thread::{ThreadRole, Threads};
use seccompiler::{BpfProgram, sock_filter};

/// What a thread does; selects its policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Owns the machine.
    Control,
    /// Serves HTTP.
    Api,
    /// Runs guest code.
    Vcpu,
    /// Serves a disk.
    Disk,
    /// Makes a disk's transfers, where that is left to a pool of threads.
    Pool,
    /// Serves a network queue pair.
    Net,
    /// Serves a slow device.
    Slow,
    /// Serves the guest's sockets.
    Vsock,
    /// Speaks with the back end of a vhost-user device.
    VhostUser,
}

impl Role {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Control,
        Self::Api,
        Self::Vcpu,
        Self::Disk,
        Self::Pool,
        Self::Net,
        Self::Slow,
        Self::Vsock,
        Self::VhostUser,
    ];

    fn code(self) -> &'static [u8] {
        match self {
            Self::Control => include_bytes!(concat!(env!("OUT_DIR"), "/seccomp-control")),
            Self::Api => include_bytes!(concat!(env!("OUT_DIR"), "/seccomp-api")),
            Self::Vcpu => include_bytes!(concat!(env!("OUT_DIR"), "/seccomp-vcpu")),
            Self::Disk => include_bytes!(concat!(env!("OUT_DIR"), "/seccomp-disk")),
            Self::Pool => include_bytes!(concat!(env!("OUT_DIR"), "/seccomp-pool")),
            Self::Net => include_bytes!(concat!(env!("OUT_DIR"), "/seccomp-net")),
            Self::Slow => include_bytes!(concat!(env!("OUT_DIR"), "/seccomp-slow")),
            Self::Vsock => include_bytes!(concat!(env!("OUT_DIR"), "/seccomp-vsock")),
            Self::VhostUser => include_bytes!(concat!(env!("OUT_DIR"), "/seccomp-vhost_user")),
        }
    }
}

impl From<ThreadRole> for Role {
    fn from(role: ThreadRole) -> Self {
        match role {
            ThreadRole::Disk => Self::Disk,
            ThreadRole::Net => Self::Net,
            ThreadRole::Slow => Self::Slow,
            ThreadRole::Vsock => Self::Vsock,
            ThreadRole::VhostUser => Self::VhostUser,
        }
    }
}

/// What happens to a thread that makes a system call outside its policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Sandbox {
    /// The process is killed (SIGSYS).
    #[default]
    Enforce,
    /// The kernel logs the call and lets it pass, to find out what a policy lacks.
    Log,
    /// No policies.
    Off,
}

/// Bytes of stack of each thread. Only what is touched takes memory.
const STACK_BYTES: usize = 256 << 10;
/// The API's thread reads definitions, which nest.
const API_STACK_BYTES: usize = 2 << 20;

/// Size of one BPF instruction (struct sock_filter).
const INSTRUCTION: usize = 8;
/// BPF_RET | BPF_K: return a constant.
const BPF_RET_K: u16 = 0x06;
const SECCOMP_RET_KILL_PROCESS: u32 = 0x8000_0000;
const SECCOMP_RET_LOG: u32 = 0x7ffc_0000;

fn program(role: Role, sandbox: Sandbox) -> BpfProgram {
    let decode = |bytes: &[u8; INSTRUCTION]| {
        let k = u32::from_ne_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        let code = u16::from_ne_bytes([bytes[0], bytes[1]]);
        let relaxed = sandbox == Sandbox::Log && code == BPF_RET_K && k == SECCOMP_RET_KILL_PROCESS;
        let k = if relaxed { SECCOMP_RET_LOG } else { k };
        sock_filter {
            code,
            jt: bytes[2],
            jf: bytes[3],
            k,
        }
    };
    role.code()
        .as_chunks::<INSTRUCTION>()
        .0
        .iter()
        .map(decode)
        .collect()
}

/// Narrows the calling thread to `role`, and forbids it new privileges.
///
/// # Errors
/// The kernel refused the filter.
pub fn narrow(role: Role, sandbox: Sandbox) -> io::Result<()> {
    if sandbox == Sandbox::Off {
        return Ok(());
    }
    seccompiler::apply_filter(&program(role, sandbox)).map_err(|error| {
        io::Error::other(format!(
            "cannot install the {role:?} seccomp policy: {error}"
        ))
    })
}

/// Starts threads that narrow themselves before they do anything else.
#[derive(Clone, Copy, Debug, Default)]
pub struct ThreadStarter {
    sandbox: Sandbox,
}

impl ThreadStarter {
    /// Threads under `sandbox`.
    pub fn new(sandbox: Sandbox) -> Self {
        Self { sandbox }
    }

    /// What each thread of a disk's pool does first: it narrows itself. The process ends where that fails, since the pool would go on
    /// without a policy.
    pub fn pool_start(&self) -> ThreadStart {
        let sandbox = self.sandbox;
        ThreadStart::new(move || {
            if let Err(error) = narrow(Role::Pool, sandbox) {
                tracing::error!(%error, "a disk's thread cannot be narrowed");
                std::process::abort();
            }
        })
    }

    /// Starts `body` on a thread called `name` (at most 15 bytes are kept).
    ///
    /// # Errors
    /// The thread could not be started.
    pub fn start(
        &self,
        name: &str,
        role: Role,
        body: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let sandbox = self.sandbox;
        Builder::new()
            .name(name.to_owned())
            .stack_size(if role == Role::Api {
                API_STACK_BYTES
            } else {
                STACK_BYTES
            })
            .spawn(move || {
                if let Err(error) = narrow(role, sandbox) {
                    // Going on without the policy would be worse than a thread that is not there: whoever waits for it says so.
                    tracing::error!(%error, "a thread did not start");
                    return;
                }
                body();
            })
    }
}

impl Threads for ThreadStarter {
    fn spawn(
        &self,
        name: &str,
        role: ThreadRole,
        body: Box<dyn FnOnce() + Send>,
    ) -> io::Result<JoinHandle<()>> {
        self.start(name, role.into(), body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_kills_by_default_and_only_relaxes_to_logging_when_asked() {
        for role in Role::ALL {
            let last = |sandbox| program(role, sandbox).last().map(|last| last.k);
            let program = program(role, Sandbox::Enforce);
            assert!(program.len() > 10, "{role:?}");
            assert!(
                program
                    .iter()
                    .any(|i| i.code == BPF_RET_K && i.k == SECCOMP_RET_KILL_PROCESS)
            );
            assert_eq!(
                last(Sandbox::Enforce),
                Some(SECCOMP_RET_KILL_PROCESS),
                "{role:?}"
            );
            assert_eq!(last(Sandbox::Log), Some(SECCOMP_RET_LOG), "{role:?}");
        }
    }

    #[test]
    fn a_narrowed_thread_still_ends_cleanly_in_every_role() {
        for role in Role::ALL {
            let thread = ThreadStarter::new(Sandbox::Enforce)
                .start("narrowed", role, || {
                    drop(std::hint::black_box(vec![0u8; 1 << 20]));
                })
                .unwrap();
            thread.join().unwrap();
        }
    }
}
