//! What a VM is: the one schema behind `vm.yaml`, `PUT /v1/vm` and the command line. Unknown fields are errors; nothing is probed.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A number of bytes; written as an integer, or as a string with a binary unit (`"512MiB"`, `"4GiB"`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// One virtual machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmConfig {
    /// Its name: a DNS label of 1 to 63 characters.
    pub name: String,
    /// SMBIOS system UUID; derived from the name where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
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

/// Processors of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuConfig {
    /// How many, 1 to 64.
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
        Self { count: 1, topology: None, model: CpuModel::Host }
    }
}

/// Arrangement of processors; each at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Sockets.
    pub sockets: u8,
    /// Dies in a socket.
    pub dies: u8,
    /// Cores in a die.
    pub cores: u8,
    /// Threads of a core.
    pub threads: u8,
}

/// Which processor the guest sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CpuModel {
    /// The host's, as KVM offers it.
    #[default]
    Host,
}

/// RAM of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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

/// Direct kernel boot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootConfig {
    /// An ELF kernel with a PVH note (vmlinux), or a bzImage (vmlinuz).
    pub kernel: PathBuf,
    /// Initial RAM disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initrd: Option<PathBuf>,
    /// Kernel command line, at most 2047 bytes.
    #[serde(default)]
    pub cmdline: String,
}

/// The format of an image; always stated, never guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageFormat {
    /// Bytes as they are.
    Raw,
    /// QEMU's copy-on-write format, versions 2 and 3.
    Qcow2,
}

/// How an image file is cached on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// Past the host's page cache (O_DIRECT).
    Direct,
    /// Through the host's page cache.
    Buffered,
}

/// What a guest's discard does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiscardMode {
    /// Gives the space back to the host.
    #[default]
    Unmap,
    /// Not offered to the guest.
    Ignore,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// Its name in the API and in messages, unique in the VM.
    pub id: String,
    /// The image, or a block device.
    pub path: PathBuf,
    /// The image's format.
    pub format: ImageFormat,
    /// Refuse writes.
    #[serde(default)]
    pub read_only: bool,
    /// The layers below, nearest first. Replaces whatever the image's header says.
    #[serde(default)]
    pub backing: Vec<BackingConfig>,
    /// Allow the header to name backing files (plain paths below the image's own folder). Never with `backing`.
    #[serde(default)]
    pub allow_header_backing: bool,
    /// Cache of the top layer.
    #[serde(default = "direct")]
    pub cache: CacheMode,
    /// What a discard does.
    #[serde(default)]
    pub discard: DiscardMode,
    /// Serial number that the guest sees, at most 20 bytes; the id where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Request queues, 1 to 64.
    #[serde(default = "one")]
    pub queues: u16,
    /// Entries of a queue: a power of two, 2 to 1024.
    #[serde(default = "queue_size")]
    pub queue_size: u16,
}

fn direct() -> CacheMode {
    CacheMode::Direct
}

fn buffered() -> CacheMode {
    CacheMode::Buffered
}

fn one() -> u16 {
    1
}

fn queue_size() -> u16 {
    256
}

/// A read-only layer below a disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackingConfig {
    /// The image, or a block device.
    pub path: PathBuf,
    /// Its format.
    pub format: ImageFormat,
    /// Its cache; buffered where absent, so that VMs on one base share it.
    #[serde(default = "buffered")]
    pub cache: CacheMode,
}

/// A network card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetConfig {
    /// Its name in the API and in messages, unique in the VM.
    pub id: String,
    /// The host side.
    pub tap: TapConfig,
    /// MAC address (`52:54:00:12:34:56`); derived from VM name and id where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// MTU offered to the guest, 68 to 65521; not offered where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// Pairs of receive and transmit queues, 1 to 16.
    #[serde(default = "one")]
    pub queue_pairs: u16,
    /// Entries of a queue: a power of two, 2 to 1024.
    #[serde(default = "queue_size")]
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
#[serde(tag = "mode", rename_all = "lowercase", deny_unknown_fields)]
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
        /// How much output is kept for the next client, at most 16 MiB.
        #[serde(default = "scrollback")]
        scrollback: ByteSize,
    },
}

fn scrollback() -> ByteSize {
    ByteSize(64 << 10)
}
