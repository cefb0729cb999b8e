//! What a definition must satisfy beyond its shape and before any look at the host: ranges, names, uniqueness. Combinations of
//! features are in [`super::conflicts`].

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::path::Path;

use super::{
    BootConfig, ByteSize, DefinitionError, DiskConfig, MemoryConfig, NetConfig, SerialConfig,
    TapConfig, Topology, VhostUserDiskConfig, VmConfig, conflicts,
};

/// The bounds of single values.
pub mod limits {
    use std::ops::RangeInclusive;

    use super::super::ByteSize;

    /// Processors.
    pub const CPUS: RangeInclusive<u64> = 1..=64;
    /// The least RAM.
    pub const MEMORY_MIN: ByteSize = ByteSize::mib(32);
    /// The most RAM.
    pub const MEMORY_MAX: ByteSize = ByteSize::gib(1024);
    /// RAM is a multiple of this.
    pub const MEMORY_STEP: ByteSize = ByteSize::mib(2);
    /// Bytes of a kernel command line (boot protocol 2.06: `COMMAND_LINE_SIZE` less the final NUL).
    pub const CMDLINE: usize = 2047;
    /// Bytes of a path (`PATH_MAX` less the final NUL).
    pub const PATH: usize = 4095;
    /// Bytes of a unix socket's path (`sockaddr_un` less the final NUL).
    pub const SOCKET_PATH: usize = 107;
    /// Characters of a device's id.
    pub const ID: usize = 32;
    /// Bytes of a disk's serial number (virtio 1.2 §5.2.6).
    pub const DISK_SERIAL: usize = 20;
    /// Layers below a disk.
    pub const BACKING: usize = 64;
    /// A limit's rate, a second.
    pub const RATE: RangeInclusive<u64> = 1..=1 << 50;
    /// How long a burst lasts.
    pub const BURST_SECONDS: RangeInclusive<u64> = 1..=86_400;
    /// Groups of limits.
    pub const LIMIT_GROUPS: usize = 30;
    /// Request queues of a disk.
    pub const DISK_QUEUES: RangeInclusive<u64> = 1..=64;
    /// Queue pairs of a network card.
    pub const QUEUE_PAIRS: RangeInclusive<u64> = 1..=16;
    /// Entries of a queue, powers of two only.
    pub const QUEUE_SIZE: RangeInclusive<u64> = 2..=1024;
    /// MTU of a network card.
    pub const MTU: RangeInclusive<u64> = 68..=65_521;
    /// Bytes of an interface's name (`IFNAMSIZ` less the final NUL).
    pub const INTERFACE_NAME: usize = 15;
    /// Kept serial output.
    pub const SCROLLBACK_MAX: ByteSize = ByteSize::mib(16);
    /// Disks, network cards and the entropy device together: slots 00:01.0 to 00:1e.0.
    pub const DEVICES: usize = 30;
}

type Result = std::result::Result<(), DefinitionError>;

impl VmConfig {
    /// Everything that can be said of a definition without a look at the host.
    ///
    /// # Errors
    /// The first value that is out of its range, or excludes another.
    pub fn validate(&self) -> Result {
        if !is_dns_label(&self.name) {
            return refuse(
                "name",
                format!(
                    "{:?} is no DNS label: 1 to 63 of a-z, 0-9 and inner hyphens",
                    self.name
                ),
            );
        }
        within("cpus.count", self.cpus.count, &limits::CPUS)?;
        if let Some(topology) = &self.cpus.topology {
            check_topology(topology)?;
        }
        self.memory.check()?;
        self.boot.check()?;
        for (index, disk) in self.disks.iter().enumerate() {
            disk.check(&format!("disks[{index}]"))?;
        }
        self.check_limit_groups()?;
        for (index, disk) in self.vhost_user_disks.iter().enumerate() {
            disk.check(&format!("vhost_user_disks[{index}]"))?;
        }
        for (index, net) in self.nets.iter().enumerate() {
            net.check(&format!("nets[{index}]"))?;
        }
        self.check_serial()?;
        self.check_uniqueness()?;
        let disks = self.disks.len() + self.vhost_user_disks.len();
        let devices = disks + self.nets.len() + usize::from(self.rng);
        if devices > limits::DEVICES {
            return Err(DefinitionError::whole(format!(
                "{devices} devices (disks, nets and rng) are too many, at most {}",
                limits::DEVICES
            )));
        }
        conflicts::check(self)
    }

    fn check_limit_groups(&self) -> Result {
        let groups = &self.limit_groups;
        if groups.len() > limits::LIMIT_GROUPS {
            return refuse(
                "limit_groups",
                format!(
                    "{} are too many, at most {}",
                    groups.len(),
                    limits::LIMIT_GROUPS
                ),
            );
        }
        for (index, group) in groups.iter().enumerate() {
            check_id(&format!("limit_groups[{index}].id"), &group.id)?;
            group
                .limits
                .check(&format!("limit_groups[{index}].limits"))?;
        }
        let ids = groups.iter().enumerate();
        unique(ids.map(|(i, group)| (format!("limit_groups[{i}].id"), &group.id)))?;
        for (index, disk) in self.disks.iter().enumerate() {
            let Some(wanted) = &disk.limit_group else {
                continue;
            };
            if !groups.iter().any(|group| group.id == *wanted) {
                return refuse(
                    format!("disks[{index}].limit_group"),
                    format!("there is no \"{wanted}\" among limit_groups"),
                );
            }
        }
        Ok(())
    }

    fn check_serial(&self) -> Result {
        match &self.serial {
            SerialConfig::None | SerialConfig::Stdio | SerialConfig::Pty => Ok(()),
            SerialConfig::File { path } => check_path("serial.path", path),
            SerialConfig::Socket { path, scrollback } => {
                check_socket("serial.path", path)?;
                if *scrollback > limits::SCROLLBACK_MAX {
                    return refuse(
                        "serial.scrollback",
                        format!(
                            "{scrollback} is too large, at most {}",
                            limits::SCROLLBACK_MAX
                        ),
                    );
                }
                Ok(())
            }
        }
    }

    fn check_uniqueness(&self) -> Result {
        let disk_ids = self
            .disks
            .iter()
            .enumerate()
            .map(|(i, d)| (format!("disks[{i}].id"), &d.id));
        let net_ids = self
            .nets
            .iter()
            .enumerate()
            .map(|(i, n)| (format!("nets[{i}].id"), &n.id));
        let served = self
            .vhost_user_disks
            .iter()
            .enumerate()
            .map(|(i, d)| (format!("vhost_user_disks[{i}].id"), &d.id));
        unique(disk_ids.chain(served).chain(net_ids))?;
        let sockets = self.vhost_user_disks.iter().enumerate();
        unique(sockets.map(|(i, d)| {
            let field = format!("vhost_user_disks[{i}].socket");
            (field, d.socket.to_string_lossy().into_owned())
        }))?;
        let macs = self.nets.iter().enumerate();
        unique(macs.map(|(i, net)| (format!("nets[{i}].mac"), self.mac_of(net))))?;
        let taps = self
            .nets
            .iter()
            .enumerate()
            .filter_map(|(i, net)| match &net.tap {
                TapConfig::Name(name) | TapConfig::Create(name) => {
                    Some((format!("nets[{i}].tap"), name))
                }
                TapConfig::Fds(_) => None,
            });
        unique(taps)?;
        unique(self.nets.iter().enumerate().flat_map(|(i, net)| {
            let fds: &[i32] = match &net.tap {
                TapConfig::Fds(fds) => fds,
                TapConfig::Name(_) | TapConfig::Create(_) => &[],
            };
            fds.iter()
                .enumerate()
                .map(move |(j, fd)| (format!("nets[{i}].tap.fds[{j}]"), fd))
        }))
    }
}

impl BootConfig {
    /// The checks of `boot`.
    ///
    /// # Errors
    /// There is nothing to start, or a path or the command line is none.
    pub fn check(&self) -> Result {
        let paths = [
            ("boot.kernel", self.kernel.as_deref()),
            ("boot.initrd", self.initrd.as_deref()),
            (
                "boot.firmware.code",
                self.firmware.as_ref().map(|firmware| &*firmware.code),
            ),
            (
                "boot.firmware.vars",
                self.firmware.as_ref().map(|firmware| &*firmware.vars),
            ),
            (
                "boot.firmware.log",
                self.firmware
                    .as_ref()
                    .and_then(|firmware| firmware.log.as_deref()),
            ),
        ];
        for (field, path) in paths {
            if let Some(path) = path {
                check_path(field, path)?;
            }
        }
        if self.kernel.is_none() {
            if self.firmware.is_none() {
                return refuse(
                    "boot",
                    "there is nothing to start: give \"kernel\" or \"firmware\"",
                );
            }
            if self.initrd.is_some() {
                return refuse("boot.initrd", "needs \"kernel\"");
            }
            if !self.cmdline.is_empty() {
                return refuse("boot.cmdline", "needs \"kernel\"");
            }
        }
        if let Some(firmware) = &self.firmware
            && firmware.code == firmware.vars
        {
            return refuse(
                "boot.firmware.vars",
                "is the code: the VM needs its own copy of the variables, such as OVMF_VARS_4M.fd",
            );
        }
        check_cmdline(&self.cmdline)
    }
}

impl MemoryConfig {
    fn check(&self) -> Result {
        let (size, field) = (self.size, "memory.size");
        if size < limits::MEMORY_MIN || size > limits::MEMORY_MAX {
            return refuse(
                field,
                format!(
                    "{size} is out of range, {} to {}",
                    limits::MEMORY_MIN,
                    limits::MEMORY_MAX
                ),
            );
        }
        multiple(field, size, limits::MEMORY_STEP)?;
        let Some(page) = self.hugepages else {
            return Ok(());
        };
        if page != ByteSize::mib(2) && page != ByteSize::gib(1) {
            return refuse(
                "memory.hugepages",
                format!("{page} is no huge page, use 2MiB or 1GiB"),
            );
        }
        multiple(field, size, page)
    }
}

impl DiskConfig {
    fn check(&self, at: &str) -> Result {
        check_id(&format!("{at}.id"), &self.id)?;
        check_path(&format!("{at}.path"), &self.path)?;
        if self.backing.len() > limits::BACKING {
            return refuse(
                format!("{at}.backing"),
                format!(
                    "{} layers are too many, at most {}",
                    self.backing.len(),
                    limits::BACKING
                ),
            );
        }
        for (index, layer) in self.backing.iter().enumerate() {
            check_path(&format!("{at}.backing[{index}].path"), &layer.path)?;
        }
        if let Some(serial) = &self.serial
            && (serial.len() > limits::DISK_SERIAL || !serial.bytes().all(|b| b.is_ascii_graphic()))
        {
            return refuse(
                format!("{at}.serial"),
                format!(
                    "{serial:?} is not at most {} printable ASCII characters without blanks",
                    limits::DISK_SERIAL
                ),
            );
        }
        if let Some(limits) = &self.limits {
            limits.check(&format!("{at}.limits"))?;
        }
        within(&format!("{at}.queues"), self.queues, &limits::DISK_QUEUES)?;
        check_queue_size(at, self.queue_size)
    }
}

impl VhostUserDiskConfig {
    fn check(&self, at: &str) -> Result {
        check_id(&format!("{at}.id"), &self.id)?;
        check_socket(&format!("{at}.socket"), &self.socket)?;
        within(&format!("{at}.queues"), self.queues, &limits::DISK_QUEUES)?;
        check_queue_size(at, self.queue_size)
    }
}

impl NetConfig {
    fn check(&self, at: &str) -> Result {
        check_id(&format!("{at}.id"), &self.id)?;
        if let Some(mtu) = self.mtu {
            within(&format!("{at}.mtu"), mtu, &limits::MTU)?;
        }
        within(
            &format!("{at}.queue_pairs"),
            self.queue_pairs,
            &limits::QUEUE_PAIRS,
        )?;
        check_queue_size(at, self.queue_size)?;
        match &self.tap {
            TapConfig::Name(name) => check_interface(&format!("{at}.tap.name"), name),
            TapConfig::Create(name) => check_interface(&format!("{at}.tap.create"), name),
            TapConfig::Fds(fds) => match fds.iter().position(|fd| *fd < 3) {
                Some(index) => refuse(
                    format!("{at}.tap.fds[{index}]"),
                    format!(
                        "{} is no descriptor to hand over, they begin at 3",
                        fds[index]
                    ),
                ),
                None => Ok(()),
            },
        }
    }
}

fn check_topology(topology: &Topology) -> Result {
    for (name, value) in [
        ("sockets", topology.sockets),
        ("dies", topology.dies),
        ("cores", topology.cores),
        ("threads", topology.threads),
    ] {
        within(&format!("cpus.topology.{name}"), value, &limits::CPUS)?;
    }
    Ok(())
}

fn check_cmdline(cmdline: &str) -> Result {
    if cmdline.len() > limits::CMDLINE {
        return refuse(
            "boot.cmdline",
            format!(
                "{} bytes are too many, at most {}",
                cmdline.len(),
                limits::CMDLINE
            ),
        );
    }
    match cmdline.chars().find(|c| c.is_control()) {
        Some(c) => refuse(
            "boot.cmdline",
            format!("the control character {c:?} is not allowed"),
        ),
        None => Ok(()),
    }
}

pub(crate) fn check_path(field: &str, path: &Path) -> Result {
    let bytes = path.as_os_str().as_encoded_bytes();
    if bytes.is_empty() {
        return refuse(field, "the path is empty");
    }
    if bytes.len() > limits::PATH {
        return refuse(
            field,
            format!(
                "{} bytes are too many, at most {}",
                bytes.len(),
                limits::PATH
            ),
        );
    }
    if bytes.contains(&0) {
        return refuse(field, "a path contains no NUL character");
    }
    Ok(())
}

fn check_socket(field: &str, path: &Path) -> Result {
    check_path(field, path)?;
    let length = path.as_os_str().len();
    if length > limits::SOCKET_PATH {
        return refuse(
            field,
            format!(
                "{length} bytes are too many for a socket's path, at most {}",
                limits::SOCKET_PATH
            ),
        );
    }
    Ok(())
}

fn check_id(field: &str, id: &str) -> Result {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    if id.len() <= limits::ID
        && id.bytes().all(allowed)
        && id.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
    {
        return Ok(());
    }
    refuse(
        field,
        format!(
            "{id:?} is no id: 1 to {} of A-Z, a-z, 0-9, '-', '_' and '.', the first a letter or digit",
            limits::ID
        ),
    )
}

/// What `dev_valid_name` of Linux accepts, without the `%` that asks the kernel to choose a number.
fn check_interface(field: &str, name: &str) -> Result {
    let allowed = |b: u8| b.is_ascii_graphic() && !matches!(b, b'/' | b':' | b'%');
    if (1..=limits::INTERFACE_NAME).contains(&name.len())
        && name.bytes().all(allowed)
        && name != "."
        && name != ".."
    {
        return Ok(());
    }
    refuse(
        field,
        format!(
            "{name:?} is no interface name: 1 to {} printable characters without blanks, '/', ':' and '%'",
            limits::INTERFACE_NAME
        ),
    )
}

fn check_queue_size(at: &str, entries: u16) -> Result {
    let field = format!("{at}.queue_size");
    within(&field, entries, &limits::QUEUE_SIZE)?;
    if entries.is_power_of_two() {
        return Ok(());
    }
    refuse(field, format!("{entries} is no power of two"))
}

fn is_dns_label(name: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=63).contains(&name.len())
        && name.bytes().all(inner)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

fn within(field: &str, value: impl Into<u64>, range: &RangeInclusive<u64>) -> Result {
    let value = value.into();
    if range.contains(&value) {
        return Ok(());
    }
    refuse(
        field,
        format!(
            "{value} is out of range, {} to {}",
            range.start(),
            range.end()
        ),
    )
}

fn multiple(field: &str, size: ByteSize, step: ByteSize) -> Result {
    if size.0.is_multiple_of(step.0) {
        return Ok(());
    }
    refuse(field, format!("{size} is no multiple of {step}"))
}

fn unique<T: Eq + std::hash::Hash + ToString>(values: impl Iterator<Item = (String, T)>) -> Result {
    let mut seen = HashMap::new();
    for (field, value) in values {
        let text = value.to_string();
        if let Some(first) = seen.insert(value, field.clone()) {
            return refuse(field, format!("\"{text}\" is taken already by {first}"));
        }
    }
    Ok(())
}

fn refuse(field: impl Into<String>, reason: impl Into<String>) -> Result {
    Err(DefinitionError::new(field, reason))
}
