//! A tap interface of the host, with the virtio header in front of each frame (Documentation/networking/tuntap.rst of Linux).
//!
//! A [`Tap`] is one queue of the interface: one descriptor. A network card with several queue pairs has as many of them; those beyond
//! what its driver uses are detached, so that the kernel spreads no flow to them.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use crate::virtio::net::bits::{HEADER_BYTES, feature};
use crate::virtio::net::sys;

/// Why a tap cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The name can be no interface's.
    #[error(
        "tap {0:?}: not an interface name (1 to 15 printable characters other than '/', ':' and '%')"
    )]
    Name(String),
    /// There is none.
    #[error("tap {0} does not exist")]
    Missing(String),
    /// There is one already, which would have been created.
    #[error("tap {0} exists already")]
    Exists(String),
    /// All its queues are taken.
    #[error("tap {0} is in use by another process")]
    Busy(String),
    /// It is no tap, or was made for another number of queues.
    #[error("{0} is not a tap interface with {1}")]
    Kind(String, &'static str),
    /// The process may not.
    #[error(
        "no permission for tap {0}: it must belong to this user, or the process needs CAP_NET_ADMIN"
    )]
    Permission(String),
    /// /dev/net/tun is not usable.
    #[error("/dev/net/tun: {0}")]
    Device(#[source] io::Error),
    /// The descriptor is not one of a tap.
    #[error("descriptor {0} is not an open tap: {1}")]
    NotATap(i32, #[source] io::Error),
    /// The descriptor's tap was opened without IFF_NO_PI or IFF_VNET_HDR, or is a tun.
    #[error(
        "descriptor {0} is of {1}, which was not opened with IFF_TAP, IFF_NO_PI and IFF_VNET_HDR"
    )]
    Flags(i32, String),
    /// The host refused something else.
    #[error("tap {0}: {1}: {2}")]
    Host(String, &'static str, #[source] io::Error),
}

/// One queue of a tap interface.
#[derive(Debug)]
pub struct Tap {
    file: File,
    name: String,
    multi_queue: bool,
}

impl Tap {
    /// Opens `queues` queues of an interface that exists.
    ///
    /// # Errors
    /// There is none of this name, it is no tap, it is busy, has not that many queues, or the process may not open it.
    pub fn open_named(name: &str, queues: u16) -> Result<Vec<Self>, TapError> {
        let request = request(name)?;
        // TUNSETIFF would create the interface if it did not exist, so it is looked up first …
        let index = index(name, request)?.ok_or_else(|| TapError::Missing(name.into()))?;
        let multi_queue = queues > 1;
        let taps = match attach_all(name, request, queues, multi_queue) {
            // An interface made for several queues wants to be opened as such, even for one.
            Err(TapError::Kind(..)) if !multi_queue => attach_all(name, request, queues, true),
            other => other,
        }?;
        // … and compared now, for the case that it vanished in between.
        if self::index(name, request)? != Some(index) {
            return Err(TapError::Missing(name.into()));
        }
        Ok(taps)
    }

    /// Creates an interface with `queues` queues, which is gone when all of them are closed, and brings it up.
    ///
    /// # Errors
    /// The name is taken, or the process may not create interfaces (CAP_NET_ADMIN).
    pub fn create(name: &str, queues: u16, mtu: Option<u16>) -> Result<Vec<Self>, TapError> {
        let request = request(name)?;
        if index(name, request)?.is_some() {
            return Err(TapError::Exists(name.into()));
        }
        let taps = attach_all(name, request, queues, queues > 1)?;
        if let Some(mtu) = mtu {
            sys::set_mtu(request, mtu).map_err(|e| refused(name, "setting its MTU", e))?;
        }
        sys::set_up(request).map_err(|e| refused(name, "bringing it up", e))?;
        Ok(taps)
    }

    /// Takes over an open queue of a tap.
    ///
    /// # Errors
    /// The descriptor is not of a tap that was opened with IFF_TAP, IFF_NO_PI and IFF_VNET_HDR.
    pub fn from_fd(file: OwnedFd) -> Result<Self, TapError> {
        let number = std::os::fd::AsRawFd::as_raw_fd(&file);
        let mut request = sys::Ifreq::default();
        sys::ioctl_ifreq(file.as_fd(), sys::TUNGETIFF, &mut request)
            .map_err(|e| TapError::NotATap(number, e))?;
        let name = request.name();
        let needed = sys::IFF_TAP | sys::IFF_NO_PI | sys::IFF_VNET_HDR;
        if request.flags() & needed != needed {
            return Err(TapError::Flags(number, name));
        }
        rustix::io::ioctl_fionbio(&file, true)
            .map_err(|e| refused(&name, "making it non-blocking", e.into()))?;
        let multi_queue = request.flags() & sys::IFF_MULTI_QUEUE != 0;
        Self {
            file: File::from(file),
            name,
            multi_queue,
        }
        .prepared()
    }

    /// The interface's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Lets the kernel send and expect flows on this queue, or not. A tap with one queue is always attached.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn set_attached(&self, attached: bool) -> io::Result<()> {
        if !self.multi_queue {
            return Ok(());
        }
        let flag = if attached {
            sys::IFF_ATTACH_QUEUE
        } else {
            sys::IFF_DETACH_QUEUE
        };
        let mut request = sys::Ifreq::default().with_flags(flag);
        match sys::ioctl_ifreq(self.file.as_fd(), sys::TUNSETQUEUE, &mut request) {
            // It is in that state already.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            other => other,
        }
    }

    /// Which frames the kernel may hand over unsegmented or without checksum: the offloads among the virtio `features` of the
    /// driver's side. Holds for all queues of the interface.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn set_guest_offloads(&self, features: u64) -> io::Result<()> {
        sys::ioctl_value(
            self.file.as_fd(),
            sys::TUNSETOFFLOAD,
            offload_bits(features),
        )
    }

    /// The offloads, as virtio features of both sides, that this host's kernel has.
    #[must_use]
    pub fn supported_offloads(&self) -> u64 {
        use feature::{
            CSUM, GUEST_CSUM, GUEST_ECN, GUEST_TSO4, GUEST_TSO6, GUEST_UFO, GUEST_USO4, GUEST_USO6,
            HOST_ECN, HOST_TSO4, HOST_TSO6, HOST_UFO, HOST_USO,
        };
        let families = [
            (
                GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN,
                HOST_TSO4 | HOST_TSO6 | HOST_ECN,
            ),
            (GUEST_UFO, HOST_UFO),
            (GUEST_USO4 | GUEST_USO6, HOST_USO),
        ];
        let mut supported = CSUM;
        if self.set_guest_offloads(GUEST_CSUM).is_ok() {
            supported |= GUEST_CSUM;
            for (guest, host) in families {
                if self.set_guest_offloads(GUEST_CSUM | guest).is_ok() {
                    supported |= guest | host;
                }
            }
        }
        // Nothing is negotiated yet. A kernel that refuses offloads one by one does not refuse none.
        if let Err(error) = self.set_guest_offloads(0) {
            tracing::warn!(tap = self.name, "offloads cannot be switched off: {error}");
        }
        supported
    }

    /// States the size of the header before each frame and leaves all offloads off.
    fn prepared(self) -> Result<Self, TapError> {
        let size = i32::try_from(HEADER_BYTES).unwrap_or(i32::MAX);
        sys::ioctl_int(self.file.as_fd(), sys::TUNSETVNETHDRSZ, size)
            .map_err(|e| refused(&self.name, "setting the virtio header's size", e))?;
        self.set_guest_offloads(0)
            .map_err(|e| refused(&self.name, "switching offloads off", e))?;
        Ok(self)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The kernel's bits for the driver's offloads. Checksums are what everything else stands on, and UDP segmentation is one switch for
/// both versions of IP; where the driver took less, the kernel segments itself.
fn offload_bits(features: u64) -> u32 {
    let has = |bits: u64| features & bits == bits;
    if !has(feature::GUEST_CSUM) {
        return 0;
    }
    [
        (feature::GUEST_TSO4, sys::TUN_F_TSO4),
        (feature::GUEST_TSO6, sys::TUN_F_TSO6),
        (feature::GUEST_UFO, sys::TUN_F_UFO),
        (
            feature::GUEST_USO4 | feature::GUEST_USO6,
            sys::TUN_F_USO4 | sys::TUN_F_USO6,
        ),
    ]
    .into_iter()
    .filter(|(feature, _)| has(*feature))
    .fold(sys::TUN_F_CSUM, |bits, (_, bit)| bits | bit)
        | if has(feature::GUEST_ECN) && features & (feature::GUEST_TSO4 | feature::GUEST_TSO6) != 0
        {
            sys::TUN_F_TSO_ECN
        } else {
            0
        }
}

fn request(name: &str) -> Result<sys::Ifreq, TapError> {
    sys::Ifreq::named(name).ok_or_else(|| TapError::Name(name.into()))
}

fn index(name: &str, request: sys::Ifreq) -> Result<Option<i32>, TapError> {
    sys::interface_index(request).map_err(|e| refused(name, "looking it up", e))
}

fn refused(name: &str, what: &'static str, error: io::Error) -> TapError {
    TapError::Host(name.into(), what, error)
}

fn attach_all(
    name: &str,
    request: sys::Ifreq,
    queues: u16,
    multi_queue: bool,
) -> Result<Vec<Tap>, TapError> {
    (0..queues)
        .map(|_| attach(name, request, multi_queue))
        .collect()
}

fn attach(name: &str, request: sys::Ifreq, multi_queue: bool) -> Result<Tap, TapError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")
        .map_err(TapError::Device)?;
    let kind = if multi_queue { sys::IFF_MULTI_QUEUE } else { 0 };
    let mut request = request.with_flags(sys::IFF_TAP | sys::IFF_NO_PI | sys::IFF_VNET_HDR | kind);
    sys::ioctl_ifreq(file.as_fd(), sys::TUNSETIFF, &mut request).map_err(|error| {
        let name = name.to_owned();
        match error.raw_os_error() {
            Some(libc::EBUSY) => TapError::Busy(name),
            Some(libc::EPERM) => TapError::Permission(name),
            Some(libc::EINVAL) if multi_queue => TapError::Kind(name, "multi_queue"),
            Some(libc::EINVAL) => TapError::Kind(name, "one queue"),
            Some(libc::E2BIG) => TapError::Busy(name),
            _ => TapError::Host(name, "opening it", error),
        }
    })?;
    Tap {
        file,
        name: name.to_owned(),
        multi_queue,
    }
    .prepared()
}
