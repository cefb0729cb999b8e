//! What a worker is: the schema of `worker.yaml`. Unknown fields are errors; nothing is probed.
//!
//! The text goes through [`drover_api::definition::parse_as`], so that messages have the same form as those about a VM:
//! one line, `worker.yaml: join.token: …`. What can be checked without the host is checked by [`WorkerConfig::validate`].

mod address;
mod join;
mod validate;

use std::path::PathBuf;

use drover_api::definition::{
    self, BackingConfig, BootConfig, ByteSize, CpuConfig, DefinitionError, ImageFormat, MacAddress,
    MemoryConfig, TapConfig,
};
use serde::Deserialize;
use serde_json::Value;

pub use address::{Address, InterfaceAddress, StaticAddress};
pub use join::{JoinConfig, KubeadmVersion, Taint, TaintEffect};
pub(crate) use validate::is_dns_label;

use crate::secret::Secret;

/// One worker.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerConfig {
    /// Its name, a DNS label of 1 to 63 characters. Where present it must be the name the worker is created under.
    #[serde(default)]
    pub name: Option<String>,
    /// The image that its disk starts from; never written.
    pub base: BaseConfig,
    /// Kernel, initial RAM disk and command line.
    pub boot: BootConfig,
    /// Its disk.
    pub disk: DiskSize,
    /// Processors.
    #[serde(default)]
    pub cpus: CpuConfig,
    /// RAM.
    pub memory: MemoryConfig,
    /// Its network card; none where absent.
    #[serde(default)]
    pub network: Option<NetworkConfig>,
    /// The guest's host name; the worker's name where absent.
    #[serde(default)]
    pub hostname: Option<String>,
    /// Public keys that may log in as the image's default user.
    #[serde(default)]
    pub ssh_authorized_keys: Vec<String>,
    /// More cloud-config: a mapping, or the text of one. Lists are appended to ours, other keys replace ours.
    #[serde(default)]
    pub user_data: Option<Secret<Value>>,
    /// The same, from a file. Never with `user_data`.
    #[serde(default)]
    pub user_data_file: Option<PathBuf>,
    /// How it joins its cluster; it joins none where absent.
    #[serde(default)]
    pub join: Option<JoinConfig>,
}

/// The image a worker's disk starts from.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseConfig {
    /// The image, or a block device.
    pub path: PathBuf,
    /// Its format.
    pub format: ImageFormat,
    /// The layers below it, nearest first; none where absent, whatever its header says.
    #[serde(default)]
    pub backing: Vec<BackingConfig>,
}

/// A worker's disk.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSize {
    /// How large the guest sees it: at least the base's size, a multiple of 1 MiB. The guest grows its root into it.
    pub size: ByteSize,
}

/// A worker's network card: on a bridge, or on a tap that exists.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkConfig {
    /// The bridge that a tap made for the worker is put on.
    #[serde(default)]
    pub bridge: Option<String>,
    /// Or the tap itself.
    #[serde(default)]
    pub tap: Option<TapConfig>,
    /// MAC address; derived from the worker's identity where absent.
    #[serde(default)]
    pub mac: Option<MacAddress>,
    /// MTU of both ends, 68 to 65521.
    #[serde(default)]
    pub mtu: Option<u16>,
    /// Pairs of queues, 1 to 16.
    #[serde(default = "one")]
    pub queue_pairs: u16,
    /// `dhcp`, or addresses.
    #[serde(default)]
    pub address: Address,
}

fn one() -> u16 {
    1
}

impl WorkerConfig {
    /// Reads a definition, YAML or JSON, and validates it. `source` (a file's name) begins the messages.
    ///
    /// # Errors
    /// The text is not YAML, does not have the shape of a definition, or says what cannot be.
    pub fn parse(text: &[u8], source: &str) -> Result<Self, DefinitionError> {
        let config: Self = definition::parse_as(text, source)?;
        config
            .validate()
            .map_err(|error| error.with_source(source))?;
        Ok(config)
    }
}
