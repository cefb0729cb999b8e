//! Everything about a worker that is known before anything is made: its record, its VM and its seed.
//!
//! All checks that can be made beforehand are made here, so that bad input leaves nothing to undo.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use drover_api::definition::{
    BackingConfig, BootConfig, ByteSize, CacheMode, DefinitionError, DiscardMode, DiskConfig,
    ImageFormat, IoMode, NetConfig, SerialConfig, TapConfig, VmConfig,
};
use drover_block::{Format, image};
use serde_json::Value;

use crate::definition::{NetworkConfig, WorkerConfig};
use crate::error::Error;
use crate::identity::Identity;
use crate::netlink;
use crate::secret::Secret;
use crate::seed::{self, SeedError};
use crate::state::{RECORD_VERSION, Record, StateDir, WorkerDir};
use crate::yaml;

/// Larger definitions and user-data files are not read.
const TEXT_MAX: u64 = 1 << 20;
/// How much of the console is kept for who looks later.
const SCROLLBACK: ByteSize = ByteSize(256 << 10);
/// Entries of the disk's and the card's queues.
const QUEUE_SIZE: u16 = 256;
/// Magic number of qcow2 images.
const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";

/// A definition as it was read.
#[derive(Debug)]
pub struct Definition {
    /// What it says.
    pub config: WorkerConfig,
    /// Where it is from, as messages name it.
    source: String,
    text: Secret<Vec<u8>>,
    user_data: Option<Secret<Vec<u8>>>,
}

impl Definition {
    /// Reads a definition, and the user-data file that it names.
    ///
    /// # Errors
    /// A file cannot be read, or the definition is wrong.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let source = path.display().to_string();
        let unreadable = |error| DefinitionError::whole(read_failure(&error)).with_source(&source);
        let text = read_bounded(path).map_err(unreadable)?;
        let config = WorkerConfig::parse(&text, &source)?;
        let user_data = match &config.user_data_file {
            None => None,
            Some(file) => Some(read_bounded(file).map_err(|error| {
                let reason = format!("{}: {}", file.display(), read_failure(&error));
                DefinitionError::new("user_data_file", reason).with_source(&source)
            })?),
        };
        Ok(Self {
            config,
            source,
            text: Secret::new(text),
            user_data: user_data.map(Secret::new),
        })
    }

    fn refuse(&self, field: &str, reason: impl Into<String>) -> Error {
        DefinitionError::new(field, reason)
            .with_source(&self.source)
            .into()
    }

    /// The VMM's complaint about a field of the VM, as one about the field of this definition that it came from.
    pub(crate) fn refused_by_vmm(&self, field: &str, reason: &str) -> Error {
        let network = if self
            .config
            .network
            .as_ref()
            .is_some_and(|network| network.tap.is_some())
        {
            "network.tap"
        } else {
            "network.bridge"
        };
        let fields = [
            ("disks[0].backing[0]", "base"),
            ("disks[0]", "disk"),
            ("nets[0].tap", network),
            ("nets[0]", "network"),
            ("boot", "boot"),
            ("memory", "memory"),
            ("cpus", "cpus"),
        ];
        let ours = fields.into_iter().find_map(|(theirs, ours)| {
            let rest = field.strip_prefix(theirs)?;
            (rest.is_empty() || rest.starts_with(['.', '['])).then(|| format!("{ours}{rest}"))
        });
        self.refuse(ours.as_deref().unwrap_or(field), reason)
    }
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?
        .take(TEXT_MAX + 1)
        .read_to_end(&mut text)?;
    if text.len() as u64 > TEXT_MAX {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(text)
}

fn read_failure(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::FileTooLarge => format!("is larger than {TEXT_MAX} bytes"),
        _ => format!("cannot be read: {error}"),
    }
}

/// What is to be made.
#[derive(Debug)]
pub struct Plan {
    /// What will be remembered.
    pub record: Record,
    /// What the VMM will be given.
    pub vm: VmConfig,
    pub(crate) dir: WorkerDir,
    pub(crate) seed: Secret<Vec<u8>>,
    pub(crate) base: PathBuf,
    pub(crate) base_format: Format,
    pub(crate) mtu: Option<u16>,
}

impl Plan {
    /// Plans the worker `name`.
    ///
    /// # Errors
    /// The definition, or something that it names, cannot be used.
    pub fn new(state: &StateDir, name: &str, definition: &Definition) -> Result<Self, Error> {
        let config = &definition.config;
        let dir = state.worker(name)?;
        if let Some(own) = config.name.as_deref().filter(|own| *own != name) {
            return Err(definition.refuse(
                "name",
                format!("is {own:?}, but the worker is to be called {name:?}"),
            ));
        }
        if dir.path().exists() {
            return Err(Error::Exists(name.to_owned()));
        }
        let user_data = definition
            .user_data
            .as_ref()
            .map(|text| text.expose().as_slice());
        let identity = Identity::derive(
            name,
            &[definition.text.expose(), user_data.unwrap_or_default()],
        )
        .map_err(|error| definition.refuse("network.mac", error.to_string()))?;
        let seed =
            seed::build(config, name, &identity, user_data).map_err(|error| match error {
                SeedError::UserData { field, reason } => definition.refuse(field, reason),
                SeedError::Iso(error) => definition.refuse("user_data", error.to_string()),
            })?;
        let base = check_base(definition)?;
        let boot = check_boot(definition)?;
        let net = config
            .network
            .as_ref()
            .map(|network| card(definition, network, &identity))
            .transpose()?;
        let vm = VmConfig {
            name: name.to_owned(),
            uuid: Some(identity.uuid),
            cpus: config.cpus.clone(),
            memory: config.memory.clone(),
            boot,
            disks: vec![root_disk(definition, &dir, &base)?, seed_disk(&dir)],
            limit_groups: Vec::new(),
            vhost_user_disks: Vec::new(),
            nets: net.into_iter().collect(),
            serial: SerialConfig::Socket {
                path: dir.console_socket(),
                scrollback: SCROLLBACK,
            },
            rng: true,
        };
        vm.validate().map_err(|error| match error.field() {
            Some(field) => definition.refused_by_vmm(field, error.reason()),
            None => error.into(),
        })?;
        let network = config.network.as_ref();
        let bridge = network.and_then(|network| network.bridge.clone());
        let record = Record {
            version: RECORD_VERSION,
            name: name.to_owned(),
            uuid: identity.uuid,
            created_ms: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| {
                    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
                }),
            hostname: config.hostname.clone().unwrap_or_else(|| name.to_owned()),
            base: base.clone(),
            disk_size_bytes: config.disk.size.0,
            cpus: config.cpus.count,
            memory_size_bytes: config.memory.size.0,
            mac: network.map(|network| network.mac.unwrap_or(identity.mac)),
            tap: bridge.is_some().then_some(identity.tap),
            bridge,
            joins: config.join.is_some(),
            instance_id: identity.instance_id,
        };
        Ok(Self {
            record,
            vm,
            dir,
            seed: Secret::new(seed),
            base,
            base_format: format(config.base.format),
            mtu: network.and_then(|network| network.mtu),
        })
    }
}

/// The block engine's word for a format.
#[must_use]
pub fn format(format: ImageFormat) -> Format {
    match format {
        ImageFormat::Raw => Format::Raw,
        ImageFormat::Qcow2 => Format::Qcow2,
    }
}

fn absolute(definition: &Definition, field: &str, path: &Path) -> Result<PathBuf, Error> {
    std::path::absolute(path)
        .map_err(|error| definition.refuse(field, format!("{}: {error}", path.display())))
}

/// Looks at the base as what the definition says it is; gives its absolute path.
fn check_base(definition: &Definition) -> Result<PathBuf, Error> {
    let base = &definition.config.base;
    let path = absolute(definition, "base.path", &base.path)?;
    let refuse = |field: &str, reason: &str| {
        definition.refuse(field, format!("{}: {reason}", path.display()))
    };
    let mut magic = [0; 4];
    let found = File::open(&path)
        .and_then(|mut file| file.read(&mut magic))
        .map_err(|error| refuse("base.path", &read_failure(&error)))?;
    let has_magic = found == magic.len() && magic == QCOW2_MAGIC;
    // What is found never decides how the base is opened; it only stops a mistake that would give every worker a useless disk.
    match base.format {
        ImageFormat::Raw if has_magic => {
            return Err(refuse("base.format", "is a qcow2 image, not a raw one"));
        }
        ImageFormat::Qcow2 if !has_magic => {
            return Err(refuse("base.format", "is not a qcow2 image"));
        }
        ImageFormat::Raw | ImageFormat::Qcow2 => {}
    }
    let info = image::info(&path, format(base.format))
        .map_err(|error| definition.refuse("base.path", error.to_string()))?;
    let header_names = info.qcow2.and_then(|qcow2| qcow2.backing_file);
    if let Some(below) = header_names.filter(|_| base.backing.is_empty()) {
        let reason = format!(
            "its header names the backing file {below:?}, which is not opened without permission: list it under base.backing"
        );
        return Err(refuse("base.path", &reason));
    }
    let size = definition.config.disk.size;
    if size.0 < info.size_bytes {
        let reason = format!(
            "{size} is smaller than the base, which has {}",
            ByteSize(info.size_bytes)
        );
        return Err(definition.refuse("disk.size", reason));
    }
    Ok(path)
}

fn check_boot(definition: &Definition) -> Result<BootConfig, Error> {
    let mut boot = definition.config.boot.clone();
    for (field, path) in [
        ("boot.kernel", boot.kernel.as_mut()),
        ("boot.initrd", boot.initrd.as_mut()),
    ] {
        let Some(path) = path else { continue };
        *path = absolute(definition, field, path)?;
        File::open(&*path).map_err(|error| {
            definition.refuse(
                field,
                format!("{}: {}", path.display(), read_failure(&error)),
            )
        })?;
    }
    Ok(boot)
}

fn card(
    definition: &Definition,
    network: &NetworkConfig,
    identity: &Identity,
) -> Result<NetConfig, Error> {
    let tap = match (&network.bridge, &network.tap) {
        (Some(bridge), _) => {
            if !netlink::is_bridge(bridge) {
                let reason = format!(
                    "{bridge} is not a bridge of this host (make it: ip link add {bridge} type bridge)"
                );
                return Err(definition.refuse("network.bridge", reason));
            }
            TapConfig::Create(identity.tap.clone())
        }
        (None, Some(TapConfig::Fds(_))) => {
            let reason =
                "descriptors cannot be given to a process that outlives this one: name the tap";
            return Err(definition.refuse("network.tap.fds", reason));
        }
        (None, Some(tap)) => tap.clone(),
        (None, None) => return Err(definition.refuse("network", "needs \"bridge\" or \"tap\"")),
    };
    Ok(NetConfig {
        id: "eth0".to_owned(),
        tap,
        mac: Some(network.mac.unwrap_or(identity.mac)),
        mtu: network.mtu,
        queue_pairs: network.queue_pairs,
        queue_size: QUEUE_SIZE,
        offloads: true,
    })
}

fn root_disk(definition: &Definition, dir: &WorkerDir, base: &Path) -> Result<DiskConfig, Error> {
    let config = &definition.config.base;
    let mut backing = vec![BackingConfig {
        path: base.to_path_buf(),
        format: config.format,
        cache: CacheMode::Buffered,
    }];
    for (index, layer) in config.backing.iter().enumerate() {
        let field = format!("base.backing[{index}].path");
        backing.push(BackingConfig {
            path: absolute(definition, &field, &layer.path)?,
            ..layer.clone()
        });
    }
    Ok(DiskConfig {
        backing,
        queue_size: QUEUE_SIZE,
        ..DiskConfig::new("root", dir.overlay(), ImageFormat::Qcow2)
    })
}

fn seed_disk(dir: &WorkerDir) -> DiskConfig {
    DiskConfig {
        read_only: true,
        cache: CacheMode::Buffered,
        discard: DiscardMode::Ignore,
        queue_size: QUEUE_SIZE,
        // Its few blocks are read while the guest boots: nothing is gained by having more than one under way.
        io: IoMode::Inline,
        ..DiskConfig::new("seed", dir.seed(), ImageFormat::Raw)
    }
}

/// The VM as `vm.yaml` holds it.
pub(crate) fn vm_yaml(vm: &VmConfig) -> Result<String, Error> {
    match serde_json::to_value(vm) {
        Ok(Value::Object(fields)) => Ok(yaml::document(&fields)),
        Ok(_) => Err(DefinitionError::whole("a VM is not a mapping").into()),
        Err(error) => Err(DefinitionError::whole(error.to_string()).into()),
    }
}

/// Puts the present definition of a worker's VM in place of the one that it is started from; durable when this returns.
///
/// # Errors
/// There is no such worker, or the host refuses; then the old one stays.
pub fn remember_vm(dir: &WorkerDir, vm: &VmConfig) -> Result<(), Error> {
    let path = dir.vm_config();
    let text = vm_yaml(vm)?;
    if fs::read(&path).is_ok_and(|present| present == text.as_bytes()) {
        return Ok(());
    }
    let fresh = path.with_extension(format!("yaml.{}", std::process::id()));
    let _ = fs::remove_file(&fresh);
    crate::state::write_durable(&fresh, text.as_bytes())?;
    fs::rename(&fresh, &path).map_err(Error::io("replace", &path))?;
    crate::state::sync_folder(dir.path())
}

/// Reads a `vm.yaml` that [`vm_yaml`] wrote.
pub(crate) fn read_vm_yaml(path: &Path) -> Result<VmConfig, Error> {
    let text = fs::read(path).map_err(Error::io("read", path))?;
    Ok(drover_api::definition::parse(
        &text,
        &path.display().to_string(),
    )?)
}
