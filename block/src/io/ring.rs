//! The io_uring back end.
//!
//! A ring bypasses seccomp, so it is made disabled, loses by a restriction everything but the transfers of this engine on the
//! files registered with it, and is enabled for good. Whoever holds it afterwards needs `io_uring_enter` and nothing else.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode, squeue, types};

use super::sys::{Action, Call, MAX_SLICES};

/// Calls that the kernel takes at once; more wait here.
const ENTRIES: u32 = 256;
/// `IOSQE_FIXED_FILE`, as restrictions want it.
const FIXED_FILE: u8 = 1;

pub(super) struct Ring {
    ring: IoUring,
    /// What was registered, by index.
    files: Vec<RawFd>,
}

impl Ring {
    /// A ring for transfers on `files`, which stay open as long as it.
    pub(super) fn new(files: &[RawFd]) -> io::Result<Self> {
        let ring = IoUring::builder()
            .setup_r_disabled()
            .setup_clamp()
            .build(ENTRIES)?;
        let submitter = ring.submitter();
        if !files.is_empty() {
            submitter.register_files(files)?;
        }
        let codes = [
            opcode::Readv::CODE,
            opcode::Writev::CODE,
            opcode::Fsync::CODE,
            opcode::Fallocate::CODE,
        ];
        let mut allowed: Vec<_> = codes.into_iter().map(Restriction::sqe_op).collect();
        allowed.push(Restriction::sqe_flags_allowed(FIXED_FILE));
        allowed.push(Restriction::sqe_flags_required(FIXED_FILE));
        submitter.register_restrictions(&mut allowed)?;
        submitter.register_enable_rings()?;
        Ok(Self {
            ring,
            files: files.to_vec(),
        })
    }

    /// The ring itself can be polled for completions.
    pub(super) fn event(&self) -> RawFd {
        self.ring.as_raw_fd()
    }

    /// Queues a call; false if there is no room before the next [`Ring::submit`]. Its memory must stay valid until its result
    /// is there, which [`super::queue`] sees to.
    pub(super) fn push(&mut self, token: u64, call: &Call) -> io::Result<bool> {
        let Some(index) = self.files.iter().position(|fd| *fd == call.fd()) else {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        };
        let file = types::Fixed(u32::try_from(index).unwrap_or(u32::MAX));
        let entry = entry(file, call.action()).user_data(token);
        // SAFETY: the slices and their memory stay valid until the call is over (`Call::new`).
        Ok(unsafe { self.ring.submission().push(&entry) }.is_ok())
    }

    /// Hands queued calls to the kernel and collects results; with `wait` not before there is one.
    pub(super) fn submit(&mut self, wait: bool, results: &mut Vec<(u64, i32)>) -> io::Result<()> {
        let ready = !self.ring.completion().is_empty();
        let queued = !self.ring.submission().is_empty();
        if queued || (wait && !ready) || self.ring.submission().cq_overflow() {
            let want = usize::from(wait && !ready);
            match self.ring.submit_and_wait(want) {
                Ok(_) => {}
                Err(error)
                    if matches!(
                        error.raw_os_error(),
                        Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)
                    ) => {}
                Err(error) => return Err(error),
            }
        }
        let completions = self.ring.completion();
        results.extend(completions.map(|entry| (entry.user_data(), entry.result())));
        Ok(())
    }
}

fn entry(file: types::Fixed, action: &Action) -> squeue::Entry {
    let pieces = |count: usize| u32::try_from(count.min(MAX_SLICES)).unwrap_or(u32::MAX);
    match *action {
        Action::Read { at, slices, count } => {
            opcode::Readv::new(file, slices.cast(), pieces(count))
                .offset(at)
                .build()
        }
        Action::Write { at, slices, count } => {
            opcode::Writev::new(file, slices.cast(), pieces(count))
                .offset(at)
                .build()
        }
        Action::Sync => opcode::Fsync::new(file)
            .flags(types::FsyncFlags::DATASYNC)
            .build(),
        Action::Allocate { mode, at, length } => opcode::Fallocate::new(file, length)
            .offset(at)
            .mode(mode.bits().cast_signed())
            .build(),
    }
}
