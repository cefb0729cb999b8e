//! One connection to a back end: what is asked of it, in order.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use rustix::fs::OFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight};
use vhost::vhost_user::{
    Frontend, VhostUserFrontend, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};
use vmm_sys_util::eventfd::EventFd;
use zerocopy::{FromBytes, IntoBytes};

use super::VhostUserBlkOptions;
use crate::GuestMemory;
use crate::virtio::block::bits::{Config, feature};
use crate::virtio::queue::RING_FEATURES;

/// Why a back end cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BackEndError {
    /// Nobody listens, or the listener has no room.
    #[error("{}: no vhost-user back end answers: {source}", path.display())]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It takes the connection, but says nothing. It may be serving somebody else.
    #[error("{}: the vhost-user back end does not answer; does it serve another VM?", .0.display())]
    Silent(PathBuf),
    /// It refused a message, or went away.
    #[error("{}: the vhost-user back end failed to {what}: {source}", path.display())]
    Protocol {
        /// The socket.
        path: PathBuf,
        /// What was asked.
        what: &'static str,
        /// What came of it.
        source: vhost::Error,
    },
    /// It lacks something that the device needs.
    #[error("{}: the vhost-user back end lacks {what}", path.display())]
    Lacks {
        /// The socket.
        path: PathBuf,
        /// What is missing.
        what: String,
    },
    /// The guest's memory cannot be shared.
    #[error("the guest's memory is not shared: set memory.shared to true")]
    PrivateMemory,
    /// This host refused something.
    #[error("{0}")]
    Host(#[source] io::Error),
}

/// All features of a disk that this front end hands through. The ring's own and those of the disk, but nothing that the transport or
/// the protocol decides.
pub(super) const DISK_FEATURES: u64 = RING_FEATURES
    | SIZE_MAX
    | GEOMETRY
    | feature::SEG_MAX
    | feature::RO
    | feature::BLK_SIZE
    | feature::FLUSH
    | feature::TOPOLOGY
    | feature::MQ
    | feature::DISCARD
    | feature::WRITE_ZEROES;
/// `size_max` holds (virtio 1.2 §5.2.3).
const SIZE_MAX: u64 = 1 << 1;
/// `geometry` holds.
const GEOMETRY: u64 = 1 << 4;

/// Where `idx` lies in the used ring (virtio 1.2 §2.7.8).
const USED_IDX_OFFSET: u64 = 2;

/// A connection whose two ends know each other.
pub(super) struct BackEnd {
    frontend: Frontend,
    path: PathBuf,
    /// Features that it offers and the device hands through.
    pub(super) features: u64,
    protocol: VhostUserProtocolFeatures,
    /// Its own features, as they have to be acknowledged.
    offered: u64,
    pub(super) config: Config,
}

/// The record of what is under way, kept from one back end to the next.
pub(super) struct Record {
    about: VhostUserInflight,
    file: File,
}

/// A queue as the back end gets it.
pub(super) struct Served {
    pub(super) index: u16,
    pub(super) queue: Queue,
    pub(super) kick: EventFd,
}

/// Connects without waiting for a place in the backlog.
pub(super) fn dial(path: &Path) -> Result<UnixStream, BackEndError> {
    let unreachable = |source: io::Error| BackEndError::Unreachable {
        path: path.into(),
        source,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|e| unreachable(e.into()))?;
    let address = SocketAddrUnix::new(path).map_err(|e| unreachable(e.into()))?;
    rustix::net::connect(&socket, &address).map_err(|e| unreachable(e.into()))?;
    let stream = UnixStream::from(socket);
    rustix::fs::fcntl_setfl(&stream, OFlags::RDWR).map_err(|e| unreachable(e.into()))?;
    Ok(stream)
}

impl BackEnd {
    /// Makes both ends known to each other.
    pub(super) fn greet(
        stream: UnixStream,
        options: &VhostUserBlkOptions,
    ) -> Result<Self, BackEndError> {
        let path = options.socket.clone();
        let mut frontend = Frontend::from_stream(stream, options.queues.into());
        let lacks = |what: String| BackEndError::Lacks {
            path: path.clone(),
            what,
        };
        let asked = |what| protocol(&path, what);
        let offered = frontend
            .get_features()
            .map_err(asked("tell its features"))?;
        let needed = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() | 1 << VIRTIO_F_VERSION_1;
        if offered & needed != needed {
            return Err(lacks("virtio 1 or the protocol features".into()));
        }
        let can = frontend
            .get_protocol_features()
            .map_err(asked("tell its protocol features"))?;
        let needed = VhostUserProtocolFeatures::CONFIG;
        if !can.contains(needed) {
            return Err(lacks("the protocol feature CONFIG".into()));
        }
        let wanted = needed
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        let can = can & wanted;
        frontend
            .set_protocol_features(can)
            .map_err(asked("take protocol features"))?;
        if can.contains(VhostUserProtocolFeatures::REPLY_ACK) {
            frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        frontend.set_owner().map_err(asked("take an owner"))?;
        let queues = if can.contains(VhostUserProtocolFeatures::MQ) {
            frontend
                .get_queue_num()
                .map_err(asked("tell its number of queues"))?
        } else {
            1
        };
        if queues < u64::from(options.queues) {
            return Err(lacks(format!(
                "queues: it has {queues}, but {} are wanted",
                options.queues
            )));
        }
        let mut features = offered & DISK_FEATURES;
        if options.queues == 1 {
            features &= !feature::MQ;
        } else if features & feature::MQ == 0 {
            return Err(lacks("the feature VIRTIO_BLK_F_MQ".into()));
        }
        let config = read_config(&mut frontend, options)
            .map_err(asked("tell its configuration"))?
            .ok_or_else(|| lacks("a configuration of virtio 1.1".into()))?;
        Ok(Self {
            frontend,
            path,
            features,
            protocol: can,
            offered,
            config,
        })
    }

    /// Hands over memory and queues and starts them where their rings say.
    pub(super) fn start(
        &mut self,
        memory: &GuestMemory,
        features: u64,
        queues: &[Served],
        calls: &[EventFd],
        record: &mut Option<Record>,
        queue_size: u16,
    ) -> Result<(), BackEndError> {
        let path = self.path.clone();
        let asked = |what| protocol(&path, what);
        let own = features & (DISK_FEATURES | 1 << VIRTIO_F_VERSION_1);
        let protocol_bit = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        self.frontend
            .set_features(own & self.offered | protocol_bit)
            .map_err(asked("take the negotiated features"))?;
        let regions: Vec<_> = memory
            .iter()
            .map(VhostUserMemoryRegionInfo::from_guest_region)
            .collect::<Result<_, _>>()
            .map_err(|_| BackEndError::PrivateMemory)?;
        self.frontend
            .set_mem_table(&regions)
            .map_err(asked("map the guest's memory"))?;
        if self
            .protocol
            .contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD)
        {
            self.share_record(record, calls.len(), queue_size)?;
        }
        for served in queues {
            self.start_queue(memory, served, calls)?;
        }
        Ok(())
    }

    fn share_record(
        &mut self,
        record: &mut Option<Record>,
        queues: usize,
        queue_size: u16,
    ) -> Result<(), BackEndError> {
        let path = self.path.clone();
        let asked = |what| protocol(&path, what);
        let record = match record {
            Some(record) => record,
            None => {
                let about = VhostUserInflight {
                    num_queues: u16::try_from(queues).unwrap_or(u16::MAX),
                    queue_size,
                    ..VhostUserInflight::default()
                };
                let (about, file) = self
                    .frontend
                    .get_inflight_fd(&about)
                    .map_err(asked("give its record of requests"))?;
                record.insert(Record { about, file })
            }
        };
        self.frontend
            .set_inflight_fd(&record.about, record.file.as_raw_fd())
            .map_err(asked("take the record of requests"))
    }

    /// Starts one queue.
    pub(super) fn start_queue(
        &mut self,
        memory: &GuestMemory,
        served: &Served,
        calls: &[EventFd],
    ) -> Result<(), BackEndError> {
        let path = self.path.clone();
        let asked = |what| protocol(&path, what);
        let number = usize::from(served.index);
        let queue = &served.queue;
        let host_address = |address: u64| {
            memory
                .get_host_address(GuestAddress(address))
                .map(|pointer| pointer as u64)
                .map_err(|error| BackEndError::Host(io::Error::other(error)))
        };
        let places = VringConfigData {
            queue_max_size: queue.size(),
            queue_size: queue.size(),
            flags: 0,
            desc_table_addr: host_address(queue.desc_table())?,
            used_ring_addr: host_address(queue.used_ring())?,
            avail_ring_addr: host_address(queue.avail_ring())?,
            log_addr: None,
        };
        // Everything before the first request that is not answered is done.
        let base: u16 = memory
            .load(
                GuestAddress(queue.used_ring() + USED_IDX_OFFSET),
                Ordering::Acquire,
            )
            .map_err(|error| BackEndError::Host(io::Error::other(error)))?;
        let call = calls
            .get(number)
            .ok_or_else(|| BackEndError::Host(io::ErrorKind::NotFound.into()))?;
        self.frontend
            .set_vring_num(number, queue.size())
            .map_err(asked("take a ring's size"))?;
        self.frontend
            .set_vring_base(number, base)
            .map_err(asked("take a ring's position"))?;
        self.frontend
            .set_vring_addr(number, &places)
            .map_err(asked("take a ring's addresses"))?;
        self.frontend
            .set_vring_call(number, call)
            .map_err(asked("take a ring's call"))?;
        self.frontend
            .set_vring_kick(number, &served.kick)
            .map_err(asked("take a ring's kick"))?;
        self.frontend
            .set_vring_enable(number, true)
            .map_err(asked("enable a ring"))?;
        // The driver may have rung before anybody listened.
        served.kick.write(1).map_err(BackEndError::Host)
    }

    /// Stops a queue; afterwards the back end does not touch it any more.
    pub(super) fn stop_queue(&mut self, index: u16) -> Result<(), BackEndError> {
        let number = usize::from(index);
        self.frontend
            .get_vring_base(number)
            .map(drop)
            .map_err(protocol(&self.path, "stop a ring"))?;
        self.frontend
            .set_vring_enable(number, false)
            .map_err(protocol(&self.path, "disable a ring"))
    }
}

impl AsRawFd for BackEnd {
    fn as_raw_fd(&self) -> RawFd {
        self.frontend.as_raw_fd()
    }
}

fn protocol<'a>(path: &'a Path, what: &'static str) -> impl Fn(vhost::Error) -> BackEndError + 'a {
    move |source| BackEndError::Protocol {
        path: path.into(),
        what,
        source,
    }
}

/// The configuration, with the number of queues that the guest is to see.
fn read_config(
    frontend: &mut Frontend,
    options: &VhostUserBlkOptions,
) -> Result<Option<Config>, vhost::Error> {
    let size = u32::try_from(size_of::<Config>()).unwrap_or_default();
    let blank = Config::default();
    let (_, bytes) =
        frontend.get_config(0, size, VhostUserConfigFlags::WRITABLE, blank.as_bytes())?;
    Ok(Config::read_from_bytes(&bytes).ok().map(|config| Config {
        num_queues: options.queues.to_le_bytes(),
        ..config
    }))
}
