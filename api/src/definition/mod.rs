//! What a VM is: the one schema behind `vm.yaml`, `PUT /v1/vm` and the command line. Unknown fields are errors; nothing is probed.
//!
//! | step | where | finds |
//! |---|---|---|
//! | text to a document | [`parse`] | syntax errors, duplicate keys |
//! | document to types | [`parse`] and the types here | unknown fields, wrong types, unknown variants |
//! | single values | [`VmConfig::validate`] | ranges, names, uniqueness |
//! | combinations | the table in `conflicts` | features that exclude each other |
//!
//! Every error is a [`DefinitionError`]: one line that names the source and the field's path.

mod conflicts;
mod disk;
mod document;
mod error;
mod mac;
mod parse;
#[cfg(feature = "server")]
mod schema;
mod size;
mod validate;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

pub use disk::{
    BackingConfig, Burst, CacheMode, DetectZeroes, DiscardMode, DiskConfig, ErrorConfig,
    ImageFormat, IoMode, LimitGroup, LimitsConfig, OnError, RateLimit, VhostUserDiskConfig,
};
pub use error::DefinitionError;
pub use mac::{MacAddress, MacAddressError};
pub use parse::{parse, parse_as};
pub use size::{ByteSize, ByteSizeError};
pub(crate) use validate::check_path;
pub use validate::limits;

/// One virtual machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct VmConfig {
    /// Its name: a DNS label of 1 to 63 characters.
    #[cfg_attr(
        feature = "server",
        schema(pattern = "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
    )]
    pub name: String,
    /// SMBIOS system UUID; derived from the name where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "server", schema(value_type = Option<String>, pattern = "^[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$"))]
    pub uuid: Option<Uuid>,
    /// Processors.
    #[serde(default)]
    pub cpus: CpuConfig,
    /// RAM.
    pub memory: MemoryConfig,
    /// What it boots.
    pub boot: BootConfig,
    /// Disks, in the order in which the guest sees them.
    #[serde(default)]
    pub disks: Vec<DiskConfig>,
    /// Disks that another process serves, which the guest sees after the others. Need `memory.shared`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vhost_user_disks: Vec<VhostUserDiskConfig>,
    /// Limits that several disks keep to together.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limit_groups: Vec<LimitGroup>,
    /// Network cards, in the order in which the guest sees them.
    #[serde(default)]
    pub nets: Vec<NetConfig>,
    /// Where ttyS0 goes.
    #[serde(default)]
    pub serial: SerialConfig,
    /// The entropy device; on unless false.
    #[serde(default = "yes")]
    pub rng: bool,
}

fn yes() -> bool {
    true
}

fn one() -> u16 {
    1
}

fn queue_size() -> u16 {
    256
}

/// Processors of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CpuConfig {
    /// How many, 1 to 64.
    #[cfg_attr(feature = "server", schema(minimum = 1, maximum = 64))]
    pub count: u8,
    /// How they are arranged; one socket of `count` single-threaded cores where absent. The product must be `count`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<Topology>,
    /// Which processor the guest sees.
    #[serde(default)]
    pub model: CpuModel,
}

impl Default for CpuConfig {
    fn default() -> Self {
        Self {
            count: 1,
            topology: None,
            model: CpuModel::Host,
        }
    }
}

/// Arrangement of processors; each at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Sockets.
    #[cfg_attr(feature = "server", schema(minimum = 1, maximum = 64))]
    pub sockets: u8,
    /// Dies in a socket.
    #[cfg_attr(feature = "server", schema(minimum = 1, maximum = 64))]
    pub dies: u8,
    /// Cores in a die.
    #[cfg_attr(feature = "server", schema(minimum = 1, maximum = 64))]
    pub cores: u8,
    /// Threads of a core.
    #[cfg_attr(feature = "server", schema(minimum = 1, maximum = 64))]
    pub threads: u8,
}

/// Which processor the guest sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum CpuModel {
    /// The host's, as KVM offers it.
    #[default]
    Host,
}

/// RAM of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MemoryConfig {
    /// How much: 32 MiB to 1 TiB, a multiple of 2 MiB.
    pub size: ByteSize,
    /// Take it from hugetlbfs pages of this size (2MiB or 1GiB).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hugepages: Option<ByteSize>,
    /// Touch all of it before the guest starts.
    #[serde(default)]
    pub prefault: bool,
    /// Back it by a memfd that other processes can map.
    #[serde(default)]
    pub shared: bool,
    /// Allow more than the host has available now.
    #[serde(default)]
    pub overcommit: bool,
}

/// What the machine starts: a kernel, firmware, or firmware that is handed a kernel.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct BootConfig {
    /// An ELF kernel with a PVH note (vmlinux), or a bzImage (vmlinuz); a bzImage if there is firmware.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "server", schema(value_type = Option<String>, min_length = 1, max_length = 4095))]
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk; only with `kernel`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "server", schema(value_type = Option<String>, min_length = 1, max_length = 4095))]
    pub initrd: Option<PathBuf>,
    /// Kernel command line, at most 2047 bytes; only with `kernel`.
    #[serde(default)]
    #[cfg_attr(feature = "server", schema(max_length = 2047))]
    pub cmdline: String,
    /// Stock UEFI firmware, which boots from the disks. Without it the kernel is started directly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware: Option<FirmwareConfig>,
}

/// UEFI firmware as distributions package it (OVMF, the builds without SMM).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct FirmwareConfig {
    /// The code (`OVMF_CODE_4M.fd`), shared by all VMs and never written.
    #[cfg_attr(feature = "server", schema(value_type = String, min_length = 1, max_length = 4095))]
    pub code: PathBuf,
    /// The VM's own copy of the variables that belong to the code (`OVMF_VARS_4M.fd`), written by the guest.
    #[cfg_attr(feature = "server", schema(value_type = String, min_length = 1, max_length = 4095))]
    pub vars: PathBuf,
    /// Where the firmware's debug output goes; replaced when the VM is created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "server", schema(value_type = Option<String>, min_length = 1, max_length = 4095))]
    pub log: Option<PathBuf>,
}

/// A network card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct NetConfig {
    /// Its name in the API and in messages, unique in the VM.
    #[cfg_attr(
        feature = "server",
        schema(pattern = "^[A-Za-z0-9][-A-Za-z0-9_.]{0,31}$")
    )]
    pub id: String,
    /// The host side.
    pub tap: TapConfig,
    /// MAC address (`52:54:00:12:34:56`); derived from VM name and id where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacAddress>,
    /// MTU offered to the guest, 68 to 65521; not offered where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "server", schema(minimum = 68, maximum = 65521))]
    pub mtu: Option<u16>,
    /// Pairs of receive and transmit queues, 1 to 16.
    #[serde(default = "one")]
    #[cfg_attr(feature = "server", schema(minimum = 1, maximum = 16))]
    pub queue_pairs: u16,
    /// Entries of a queue: a power of two, 2 to 1024.
    #[serde(default = "queue_size")]
    #[cfg_attr(feature = "server", schema(minimum = 2, maximum = 1024))]
    pub queue_size: u16,
    /// Offer checksum and segmentation offloads.
    #[serde(default = "yes")]
    pub offloads: bool,
}

/// The host side of a network card; exactly one field.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum TapConfig {
    /// An existing tap interface, opened by name.
    Name(String),
    /// Open descriptors of a tap, one a queue pair, inherited by the process.
    Fds(Vec<i32>),
    /// A tap to create under this name, gone with the process.
    Create(String),
}

/// Where the first serial port goes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "mode", rename_all = "lowercase", try_from = "SerialFields")]
pub enum SerialConfig {
    /// Nowhere.
    #[default]
    None,
    /// The process's standard input and output.
    Stdio,
    /// Output appended to a file.
    File {
        /// The file, made with mode 0600 where absent.
        path: PathBuf,
    },
    /// A new pseudo-terminal, whose path `GET /v1/vm` tells.
    Pty,
    /// A unix socket that serves one client at a time; it is first sent what it missed.
    Socket {
        /// The socket.
        path: PathBuf,
        /// How much output is kept for the next client, at most 16 MiB; 64 KiB where absent.
        scrollback: ByteSize,
    },
}

/// [`SerialConfig`] as it is written: serde drops unknown fields and paths of internally tagged enums, this does not.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SerialFields {
    mode: SerialMode,
    path: Option<PathBuf>,
    scrollback: Option<ByteSize>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum SerialMode {
    None,
    Stdio,
    File,
    Pty,
    Socket,
}

impl TryFrom<SerialFields> for SerialConfig {
    type Error = String;

    fn try_from(fields: SerialFields) -> Result<Self, String> {
        match (fields.mode, fields.path, fields.scrollback) {
            (SerialMode::None, None, None) => Ok(Self::None),
            (SerialMode::Stdio, None, None) => Ok(Self::Stdio),
            (SerialMode::Pty, None, None) => Ok(Self::Pty),
            (SerialMode::File, Some(path), None) => Ok(Self::File { path }),
            (SerialMode::Socket, Some(path), scrollback) => Ok(Self::Socket {
                path,
                scrollback: scrollback.unwrap_or(DEFAULT_SCROLLBACK),
            }),
            (SerialMode::File | SerialMode::Socket, None, _) => {
                Err("missing field `path`: modes file and socket need one".into())
            }
            (SerialMode::File, Some(_), Some(_)) | (_, None, Some(_)) => {
                Err("field `scrollback` is for the mode socket only".into())
            }
            (_, Some(_), _) => Err("field `path` is for the modes file and socket only".into()),
        }
    }
}

const DEFAULT_SCROLLBACK: ByteSize = ByteSize(64 << 10);

impl VmConfig {
    /// The SMBIOS system UUID: the one stated, or one that is the same for every VM of this name (RFC 9562, version 5).
    #[must_use]
    pub fn system_uuid(&self) -> Uuid {
        self.uuid
            .unwrap_or_else(|| Uuid::new_v5(&NAMESPACE, self.name.as_bytes()))
    }

    /// The MAC address of `net`: the one stated, or one derived from the names of the VM and of the card.
    #[must_use]
    pub fn mac_of(&self, net: &NetConfig) -> MacAddress {
        net.mac
            .unwrap_or_else(|| MacAddress::derived(&self.name, &net.id))
    }
}

/// The name space of derived identities, chosen at random once.
const NAMESPACE: Uuid = Uuid::from_u128(0x6a1d_0c5e_93b4_4f0e_8b52_7f2c_d1a9_e604);
