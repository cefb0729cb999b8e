//! The page that a vCPU shares with the kernel (struct kvm_run), as far as more than the running thread needs it, and the signal that
//! brings a vCPU out of the guest.
//!
//! Kicking a vCPU takes both: `immediate_exit` covers the moment before KVM_RUN, the signal covers the guest itself. Neither alone is
//! free of a race. The signal's handler does nothing; that it arrived is all that matters.

use std::ffi::{c_int, c_void};
use std::io;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use kvm_bindings::kvm_run;
use kvm_ioctls::VcpuFd;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

/// Details of KVM_EXIT_INTERNAL_ERROR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InternalError {
    /// KVM_INTERNAL_ERROR_…
    pub suberror: u32,
    /// The kernel's first datum, if it gave any.
    pub data: Option<u64>,
}

/// Where a vCPU's kvm_run page is, for as long as the vCPU exists: what other threads need to kick it. While no vCPU is attached, kicks do
/// nothing.
#[derive(Default)]
pub struct RunPage {
    page: Mutex<Option<NonNull<kvm_run>>>,
}

// SAFETY: other threads reach the page only through `request_exit`, which touches one byte of it atomically and under the lock that
// the page's owner takes before the page goes away.
unsafe impl Send for RunPage {}
// SAFETY: as above.
unsafe impl Sync for RunPage {}

impl RunPage {
    fn set(&self, page: Option<NonNull<kvm_run>>) {
        *self.page.lock().unwrap_or_else(PoisonError::into_inner) = page;
    }

    /// Makes the next (or the present) KVM_RUN return, if the signal reaches the thread too.
    pub fn request_exit(&self) {
        let page = self.page.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(page) = *page {
            immediate_exit(page).store(1, Ordering::SeqCst);
        }
    }
}

fn immediate_exit<'a>(page: NonNull<kvm_run>) -> &'a AtomicU8 {
    // SAFETY: callers hold the page mapped (see `RunPage` and `PageView`), so the field's address is in bounds.
    let field = unsafe { &raw mut (*page.as_ptr()).immediate_exit };
    // SAFETY: a byte is always aligned, and both sides, this process and the kernel, access it as a single byte.
    unsafe { AtomicU8::from_ptr(field) }
}

/// A vCPU whose page others may reach through a [`RunPage`] until this value is dropped.
pub struct Attached<'a> {
    shared: &'a RunPage,
    page: NonNull<kvm_run>,
    fd: VcpuFd,
}

impl<'a> Attached<'a> {
    /// Attaches `fd` to `shared`.
    pub fn new(mut fd: VcpuFd, shared: &'a RunPage) -> Self {
        let page = NonNull::from(fd.get_kvm_run());
        shared.set(Some(page));
        Self { shared, page, fd }
    }

    /// The vCPU.
    pub fn fd(&self) -> &VcpuFd {
        &self.fd
    }

    /// The vCPU to run, and its page to look at while an exit is handled.
    pub fn split(&mut self) -> (&mut VcpuFd, PageView<'_>) {
        (
            &mut self.fd,
            PageView {
                page: self.page,
                _vcpu: PhantomData,
            },
        )
    }
}

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        // Before the descriptor, and with it the mapping, goes.
        self.shared.set(None);
    }
}

/// The running thread's view of its own vCPU's page.
pub struct PageView<'a> {
    page: NonNull<kvm_run>,
    _vcpu: PhantomData<&'a VcpuFd>,
}

impl PageView<'_> {
    /// Takes back [`RunPage::request_exit`]; call after KVM_RUN came back with EINTR and before looking for the reason.
    pub fn clear_exit_request(&self) {
        immediate_exit(self.page).store(0, Ordering::SeqCst);
    }

    /// Width in bytes of one access of the port exit that KVM_RUN just returned with: a string instruction hands over several at once.
    pub fn port_access_width(&self) -> usize {
        // SAFETY: the page is mapped as long as the view lives, and the thread that has the view is the one that ran the vCPU, so
        // nobody writes.
        let page = unsafe { self.page.as_ref() };
        // SAFETY: the exit was a port's, for which this field of the union holds the data; any bits are valid.
        let io = unsafe { page.__bindgen_anon_1.io };
        usize::from(io.size).clamp(1, 4)
    }

    /// Details of the internal error that KVM_RUN just returned with.
    pub fn internal_error(&self) -> InternalError {
        // SAFETY: as in `port_access_width`.
        let page = unsafe { self.page.as_ref() };
        // SAFETY: the exit was an internal error, for which this field of the union holds the data; any bits are valid.
        let internal = unsafe { page.__bindgen_anon_1.internal };
        InternalError {
            suberror: internal.suberror,
            data: (internal.ndata > 0).then_some(internal.data[0]),
        }
    }
}

/// The signal that kicks vCPU threads.
pub fn kick_signal() -> c_int {
    SIGRTMIN()
}

extern "C" fn do_nothing(_signal: c_int, _info: *mut libc::siginfo_t, _context: *mut c_void) {}

/// Makes the kick signal interrupt system calls instead of ending the process. Once a process, before the first vCPU runs.
///
/// # Errors
/// The kernel refused.
pub fn install_kick_handler() -> io::Result<()> {
    Ok(register_signal_handler(kick_signal(), do_nothing)?)
}
