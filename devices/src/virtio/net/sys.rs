//! The system calls on /dev/net/tun and on an interface by name, as `linux/if_tun.h` and netdevice(7) define them.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `TUNSETIFF`, and the other request numbers of `linux/if_tun.h` on x86-64.
pub(super) const TUNSETIFF: u64 = 0x4004_54ca;
pub(super) const TUNSETOFFLOAD: u64 = 0x4004_54d0;
pub(super) const TUNGETIFF: u64 = 0x8004_54d2;
pub(super) const TUNSETVNETHDRSZ: u64 = 0x4004_54d8;
pub(super) const TUNSETQUEUE: u64 = 0x4004_54d9;

pub(super) const IFF_TAP: u16 = 0x0002;
pub(super) const IFF_MULTI_QUEUE: u16 = 0x0100;
pub(super) const IFF_ATTACH_QUEUE: u16 = 0x0200;
pub(super) const IFF_DETACH_QUEUE: u16 = 0x0400;
pub(super) const IFF_NO_PI: u16 = 0x1000;
pub(super) const IFF_VNET_HDR: u16 = 0x4000;

/// What a tap may hand to us (`TUN_F_…`).
pub(super) const TUN_F_CSUM: u32 = 0x01;
pub(super) const TUN_F_TSO4: u32 = 0x02;
pub(super) const TUN_F_TSO6: u32 = 0x04;
pub(super) const TUN_F_TSO_ECN: u32 = 0x08;
pub(super) const TUN_F_UFO: u32 = 0x10;
pub(super) const TUN_F_USO4: u32 = 0x20;
pub(super) const TUN_F_USO6: u32 = 0x40;

/// The longest interface name, without its end mark.
pub(super) const MAX_NAME_BYTES: usize = 15;

/// `struct ifreq` with the member of its union that holds small integers.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Ifreq {
    name: [u8; MAX_NAME_BYTES + 1],
    value: [u8; 24],
}

impl Ifreq {
    /// A request about the interface `name`; none if no interface can be called so.
    pub(super) fn named(name: &str) -> Option<Self> {
        let usable = !name.is_empty()
            && name.len() <= MAX_NAME_BYTES
            && name
                .bytes()
                .all(|byte| byte.is_ascii_graphic() && !b"/:%".contains(&byte));
        let mut request = Self::default();
        request
            .name
            .get_mut(..name.len())?
            .copy_from_slice(name.as_bytes());
        usable.then_some(request)
    }

    pub(super) fn with_flags(mut self, flags: u16) -> Self {
        let [low, high] = flags.to_ne_bytes();
        self.value[0] = low;
        self.value[1] = high;
        self
    }

    pub(super) fn flags(&self) -> u16 {
        u16::from_ne_bytes([self.value[0], self.value[1]])
    }

    pub(super) fn with_int(mut self, value: i32) -> Self {
        let (head, _) = self.value.split_at_mut(4);
        head.copy_from_slice(&value.to_ne_bytes());
        self
    }

    pub(super) fn int(&self) -> i32 {
        i32::from_ne_bytes([self.value[0], self.value[1], self.value[2], self.value[3]])
    }

    pub(super) fn name(&self) -> String {
        let end = self
            .name
            .iter()
            .position(|byte| *byte == 0)
            .unwrap_or(self.name.len());
        String::from_utf8_lossy(self.name.get(..end).unwrap_or_default()).into_owned()
    }
}

/// An ioctl that takes and returns a `struct ifreq`.
pub(super) fn ioctl_ifreq(file: BorrowedFd<'_>, request: u64, ifreq: &mut Ifreq) -> io::Result<()> {
    // SAFETY: every request that this module's callers use reads and writes at most a `struct ifreq` of 40 bytes, which `ifreq` is.
    check(unsafe { libc::ioctl(file.as_raw_fd(), request, std::ptr::from_mut(ifreq)) })
}

/// An ioctl that takes a pointer to an `int`.
pub(super) fn ioctl_int(file: BorrowedFd<'_>, request: u64, mut value: i32) -> io::Result<()> {
    // SAFETY: TUNSETVNETHDRSZ, the one such request used here, reads an `int` that lives until the call returns.
    check(unsafe { libc::ioctl(file.as_raw_fd(), request, &raw mut value) })
}

/// An ioctl that takes its argument by value.
pub(super) fn ioctl_value(file: BorrowedFd<'_>, request: u64, value: u32) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD, the one such request used here, takes a bit set and touches no memory.
    check(unsafe { libc::ioctl(file.as_raw_fd(), request, libc::c_ulong::from(value)) })
}

/// Whether an interface of this name exists in the network namespace of the calling thread; its number then.
pub(super) fn interface_index(request: Ifreq) -> io::Result<Option<i32>> {
    let socket = socket()?;
    let mut request = request;
    match ioctl_ifreq(
        std::os::fd::AsFd::as_fd(&socket),
        libc::SIOCGIFINDEX,
        &mut request,
    ) {
        Ok(()) => Ok(Some(request.int())),
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Sets the interface's MTU.
pub(super) fn set_mtu(request: Ifreq, mtu: u16) -> io::Result<()> {
    let socket = socket()?;
    let mut request = request.with_int(mtu.into());
    ioctl_ifreq(
        std::os::fd::AsFd::as_fd(&socket),
        libc::SIOCSIFMTU,
        &mut request,
    )
}

/// Brings the interface up.
pub(super) fn set_up(request: Ifreq) -> io::Result<()> {
    let socket = socket()?;
    let mut request = request;
    let file = std::os::fd::AsFd::as_fd(&socket);
    ioctl_ifreq(file, libc::SIOCGIFFLAGS, &mut request)?;
    let up = u16::try_from(libc::IFF_UP).unwrap_or_default();
    let mut request = request.with_flags(request.flags() | up);
    ioctl_ifreq(file, libc::SIOCSIFFLAGS, &mut request)
}

/// A socket for requests about interfaces; any family does.
fn socket() -> io::Result<std::os::fd::OwnedFd> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    socket_with(
        AddressFamily::UNIX,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(Into::into)
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
