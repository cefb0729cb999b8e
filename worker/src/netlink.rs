//! The three things done to host network interfaces, as rtnetlink messages (rtnetlink(7)): one request, one acknowledgement.
//!
//! ```text
//! nlmsghdr 16 bytes | ifinfomsg 16 bytes | rtattr 4 bytes + value 4 bytes ...
//! ```

use std::io;
use std::path::Path;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with,
};

mod spec {
    pub(super) const NLMSG_ERROR: u16 = 2;
    pub(super) const RTM_DELLINK: u16 = 17;
    pub(super) const RTM_SETLINK: u16 = 19;
    pub(super) const NLM_F_REQUEST: u16 = 1;
    pub(super) const NLM_F_ACK: u16 = 4;
    pub(super) const IFF_UP: u32 = 1;
    pub(super) const IFLA_MTU: u16 = 4;
    pub(super) const IFLA_MASTER: u16 = 10;
    pub(super) const HEADER: usize = 16;
}

/// Whether this host has an interface `name`.
#[must_use]
pub(crate) fn exists(name: &str) -> bool {
    Path::new("/sys/class/net").join(name).exists()
}

/// Whether this host has a bridge `name`.
#[must_use]
pub(crate) fn is_bridge(name: &str) -> bool {
    Path::new("/sys/class/net")
        .join(name)
        .join("bridge")
        .exists()
}

/// Puts `interface` on `bridge`, gives it `mtu` if any, and sets it up.
pub(crate) fn attach(interface: &str, bridge: &str, mtu: Option<u16>) -> io::Result<()> {
    let bridge = index(bridge)?;
    let mut attributes = vec![(spec::IFLA_MASTER, bridge)];
    attributes.extend(mtu.map(|mtu| (spec::IFLA_MTU, u32::from(mtu))));
    request(
        spec::RTM_SETLINK,
        index(interface)?,
        spec::IFF_UP,
        &attributes,
    )
}

/// Removes `interface`.
pub(crate) fn remove(interface: &str) -> io::Result<()> {
    request(spec::RTM_DELLINK, index(interface)?, 0, &[])
}

fn index(name: &str) -> io::Result<u32> {
    let path = Path::new("/sys/class/net").join(name).join("ifindex");
    let text = std::fs::read_to_string(path)?;
    text.trim()
        .parse()
        .map_err(|_| io::ErrorKind::InvalidData.into())
}

fn message(kind: u16, index: u32, flags: u32, attributes: &[(u16, u32)]) -> Vec<u8> {
    let length = u32::try_from(2 * spec::HEADER + 8 * attributes.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(64);
    bytes.extend(length.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend((spec::NLM_F_REQUEST | spec::NLM_F_ACK).to_ne_bytes());
    bytes.extend([0; 8]); // sequence number, port id
    bytes.extend([0; 4]); // family, padding, device type
    bytes.extend(index.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes()); // which flags change
    for (attribute, value) in attributes {
        bytes.extend(8u16.to_ne_bytes());
        bytes.extend(attribute.to_ne_bytes());
        bytes.extend(value.to_ne_bytes());
    }
    bytes
}

fn request(kind: u16, index: u32, flags: u32, attributes: &[(u16, u32)]) -> io::Result<()> {
    // Protocol 0 is NETLINK_ROUTE.
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None,
    )?;
    sendto(
        &socket,
        &message(kind, index, flags, attributes),
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )?;
    let mut reply = [0; 4096];
    let (length, _) = recv(&socket, &mut reply, RecvFlags::empty())?;
    acknowledgement(reply.get(..length).unwrap_or_default())
}

/// The result in an acknowledgement: a negative errno, or 0.
fn acknowledgement(reply: &[u8]) -> io::Result<()> {
    let kind = reply
        .get(4..6)
        .and_then(|bytes| bytes.try_into().ok())
        .map(u16::from_ne_bytes);
    let code = reply
        .get(spec::HEADER..spec::HEADER + 4)
        .and_then(|bytes| bytes.try_into().ok())
        .map(i32::from_ne_bytes);
    match (kind, code) {
        (Some(spec::NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(spec::NLMSG_ERROR), Some(code)) => {
            Err(io::Error::from_raw_os_error(code.saturating_neg()))
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_that_is_not_there_is_not_found() {
        assert!(!exists("drv-none") && !is_bridge("lo") && exists("lo"));
        assert_eq!(
            remove("drv-none").unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }

    #[test]
    fn the_kernels_refusal_comes_back_as_its_errno() {
        // No interface has this index, whoever asks.
        let error = request(spec::RTM_SETLINK, 0x7fff_ffff, 0, &[]).unwrap_err();
        assert!(
            matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EPERM)),
            "{error}"
        );
    }
}
