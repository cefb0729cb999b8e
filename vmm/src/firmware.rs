//! Boot through stock UEFI firmware: its files, and what it is told through the firmware configuration device.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use drover_api::definition::{BootConfig, FirmwareConfig};
use drover_arch::acpi::loader::{LOADER_FILE, LoadableTables, RSDP_FILE, TABLES_FILE};
use drover_arch::acpi::{AcpiConfig, AcpiError};
use drover_arch::layout::RamLayout;
use drover_arch::smbios::{SmbiosConfig, SmbiosTables};
use drover_devices::platform::fw_cfg::{FwCfgError, FwCfgItems, Item, number};
use kvm_ioctls::VcpuFd;
use rustix::fs::{FlockOperation, flock};

use crate::boot::{OpenError, open};
use crate::kvm::KvmError;
use crate::vcpu::BootState;

/// Bytes of a flash chip, a power of two or not; both chips together end at 4 GiB and begin above every other device.
const FLASH_UNIT: u64 = 4096;
/// The most bytes of both chips.
const FLASH_MOST: u64 = 8 << 20;
/// What the tables may take; promised before they are made.
const TABLES_BYTES: u32 = 128 << 10;
const LOADER_BYTES: u32 = 4096;
const RSDP_BYTES: u32 = 36;
/// A bzImage says here how many sectors of set-up code follow the first one (kernel, `Documentation/arch/x86/boot.rst`).
const SETUP_SECTS: u64 = 0x1f1;

/// The files of a firmware boot, open and checked.
pub struct FirmwareFiles {
    /// Contents of the code.
    pub code: Vec<u8>,
    /// Contents of the variables.
    pub vars: Vec<u8>,
    /// The variables' file, locked.
    pub vars_file: File,
    /// Where debug output goes.
    pub log: Option<File>,
    /// Kernel, initial RAM disk and command line to hand over.
    kernel: Option<KernelFiles>,
}

struct KernelFiles {
    kernel: File,
    kernel_bytes: u32,
    setup_bytes: u32,
    initrd: Option<(File, u32)>,
    cmdline: String,
}

fn refuse(field: &'static str, path: &Path, why: String) -> OpenError {
    OpenError {
        field,
        path: path.to_owned(),
        source: io::Error::new(io::ErrorKind::InvalidInput, why),
    }
}

/// Builds that rely on system management mode, by the names that distributions give them.
fn needs_smm(path: &Path) -> Option<&'static str> {
    // A link's own name says less than that of what it leads to.
    let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    [path, &target].into_iter().find_map(|path| {
        let name = path.file_name()?.to_str()?;
        [".secboot.", ".ms.", ".snakeoil.", ".smm."]
            .into_iter()
            .find(|mark| name.contains(mark))
            .map(|mark| mark.trim_matches('.'))
    })
}

impl FirmwareFiles {
    /// Opens what `firmware` and the rest of `boot` name.
    ///
    /// # Errors
    /// A file is missing, in use, or not what it should be.
    pub fn open(firmware: &FirmwareConfig, boot: &BootConfig) -> Result<Self, OpenError> {
        const CODE: &str = "boot.firmware.code";
        const VARS: &str = "boot.firmware.vars";
        const LOG: &str = "boot.firmware.log";
        if let Some(mark) = needs_smm(&firmware.code) {
            let why = format!(
                "a build for secure boot ({mark}), which needs system management mode, and this machine has none: \
                 use the plain build (OVMF_CODE_4M.fd)"
            );
            return Err(refuse(CODE, &firmware.code, why));
        }
        let code = contents(CODE, &firmware.code, open(CODE, &firmware.code)?)?;
        let vars_error = |source| OpenError {
            field: VARS,
            path: firmware.vars.clone(),
            source,
        };
        let vars_file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&firmware.vars)
            .map_err(vars_error)?;
        flock(&vars_file, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            let why = "in use by another virtual machine: each needs its own copy";
            refuse(VARS, &firmware.vars, why.to_owned())
        })?;
        let vars = contents(
            VARS,
            &firmware.vars,
            vars_file.try_clone().map_err(vars_error)?,
        )?;
        let total = code.len() as u64 + vars.len() as u64;
        if total > FLASH_MOST {
            let why =
                format!("{total} bytes with the variables, but a flash has {FLASH_MOST} at most");
            return Err(refuse(CODE, &firmware.code, why));
        }
        let log = firmware.log.as_ref().map(|path| {
            let created = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(path);
            created.map_err(|source| OpenError {
                field: LOG,
                path: path.clone(),
                source,
            })
        });
        Ok(Self {
            code,
            vars,
            vars_file,
            log: log.transpose()?,
            kernel: KernelFiles::open(boot)?,
        })
    }
}

fn contents(field: &'static str, path: &Path, file: File) -> Result<Vec<u8>, OpenError> {
    let host = |source| OpenError {
        field,
        path: path.to_owned(),
        source,
    };
    let length = file.metadata().map_err(host)?.len();
    if length == 0 || !length.is_multiple_of(FLASH_UNIT) || length > FLASH_MOST {
        let why = format!(
            "{length} bytes are no flash image: a multiple of {FLASH_UNIT}, at most {FLASH_MOST}"
        );
        return Err(refuse(field, path, why));
    }
    let mut bytes = Vec::with_capacity(length as usize);
    let read = file.take(length).read_to_end(&mut bytes).map_err(host)?;
    if (read as u64) < length {
        return Err(refuse(field, path, "has just become shorter".to_owned()));
    }
    Ok(bytes)
}

impl KernelFiles {
    fn open(boot: &BootConfig) -> Result<Option<Self>, OpenError> {
        use std::os::unix::fs::FileExt;
        let Some(path) = &boot.kernel else {
            return Ok(None);
        };
        let kernel = open("boot.kernel", path)?;
        let kernel_bytes = length("boot.kernel", path, &kernel)?;
        let mut sectors = [0];
        let read = kernel.read_exact_at(&mut sectors, SETUP_SECTS);
        read.map_err(|_| {
            let why = "not a bzImage, which is what firmware starts".to_owned();
            refuse("boot.kernel", path, why)
        })?;
        let [sectors] = sectors;
        // 0 means 4, for the sake of kernels that are older than this field.
        let sectors = if sectors == 0 { 4 } else { sectors };
        let setup_bytes = ((u32::from(sectors) + 1) * 512).min(kernel_bytes);
        let initrd = boot.initrd.as_ref().map(|path| {
            let file = open("boot.initrd", path)?;
            let bytes = length("boot.initrd", path, &file)?;
            Ok((file, bytes))
        });
        Ok(Some(Self {
            kernel,
            kernel_bytes,
            setup_bytes,
            initrd: initrd.transpose()?,
            cmdline: boot.cmdline.clone(),
        }))
    }

    fn add_to(self, items: &mut FwCfgItems) -> io::Result<()> {
        let setup = self.kernel.try_clone()?;
        let setup = Item::File {
            file: setup,
            from: 0,
            length: self.setup_bytes,
        };
        items.set(number::SETUP_SIZE, Item::u32(self.setup_bytes));
        items.set(number::SETUP_DATA, setup);
        let rest = self.kernel_bytes - self.setup_bytes;
        items.set(number::KERNEL_SIZE, Item::u32(rest));
        let kernel = Item::File {
            file: self.kernel,
            from: self.setup_bytes.into(),
            length: rest,
        };
        items.set(number::KERNEL_DATA, kernel);
        if let Some((file, length)) = self.initrd {
            items.set(number::INITRD_SIZE, Item::u32(length));
            let initrd = Item::File {
                file,
                from: 0,
                length,
            };
            items.set(number::INITRD_DATA, initrd);
        }
        let mut cmdline = self.cmdline.into_bytes();
        cmdline.push(0);
        items.set(number::COMMAND_LINE_SIZE, Item::u32(cmdline.len() as u32));
        items.set(number::COMMAND_LINE, Item::Bytes(cmdline));
        Ok(())
    }
}

fn length(field: &'static str, path: &Path, file: &File) -> Result<u32, OpenError> {
    let host = |source| OpenError {
        field,
        path: path.to_owned(),
        source,
    };
    let bytes = file.metadata().map_err(host)?.len();
    u32::try_from(bytes).map_err(|_| refuse(field, path, format!("{bytes} bytes are too many")))
}

/// What firmware cannot be told.
#[derive(Debug, thiserror::Error)]
pub enum ItemsError {
    /// The ACPI tables contradict each other.
    #[error(transparent)]
    Acpi(#[from] AcpiError),
    /// The SMBIOS tables cannot be said.
    #[error(transparent)]
    Smbios(#[from] drover_arch::smbios::SmbiosError),
    /// The device takes no such file.
    #[error(transparent)]
    Device(#[from] FwCfgError),
    /// The host refused.
    #[error(transparent)]
    Host(#[from] io::Error),
}

/// Everything that firmware is told: RAM, processors, tables and, where there is one, the kernel. `acpi` says what the machine looks
/// like at the moment, and is asked when the firmware fetches its tables.
///
/// # Errors
/// [`ItemsError`].
pub fn items(
    files: &mut FirmwareFiles,
    ram: &RamLayout,
    smbios: &SmbiosConfig,
    acpi: impl Fn() -> AcpiConfig + Send + Sync + 'static,
) -> Result<FwCfgItems, ItemsError> {
    let mut items = FwCfgItems::new();
    let cpus = smbios.topology.count().try_into().unwrap_or(u16::MAX);
    items.set(number::CPU_COUNT, Item::u16(cpus));
    items.set(number::MAX_CPUS, Item::u16(cpus));
    items.set(number::BOOT_MENU, Item::u16(0));
    items.add_file("etc/e820", Item::Bytes(e820(ram)))?;
    let smbios = SmbiosTables::build(smbios, 0..u64::from(u16::MAX))?;
    let (anchor, tables) = smbios.into_parts();
    items.add_file("etc/smbios/smbios-anchor", Item::Bytes(anchor))?;
    items.add_file("etc/smbios/smbios-tables", Item::Bytes(tables))?;

    // What is wrong with the tables now would be wrong later, too; what firmware does meanwhile only moves windows.
    LoadableTables::build(&acpi())?;
    let acpi = Arc::new(acpi);
    let table = |length, part: fn(LoadableTables) -> Vec<u8>| {
        let acpi = acpi.clone();
        Item::built(length, move || match LoadableTables::build(&acpi()) {
            Ok(tables) => part(tables),
            Err(error) => {
                tracing::error!(%error, "firmware gets no ACPI tables");
                Vec::new()
            }
        })
    };
    items.add_file(RSDP_FILE, table(RSDP_BYTES, |tables| tables.rsdp))?;
    items.add_file(TABLES_FILE, table(TABLES_BYTES, |tables| tables.tables))?;
    items.add_file(LOADER_FILE, table(LOADER_BYTES, |tables| tables.loader))?;
    if let Some(kernel) = files.kernel.take() {
        kernel.add_to(&mut items)?;
    }
    Ok(items)
}

/// The memory map as firmware reads it: packed entries of base, length (64 bits) and kind (32 bits).
fn e820(ram: &RamLayout) -> Vec<u8> {
    let mut bytes = Vec::new();
    for entry in ram.firmware_e820() {
        bytes.extend_from_slice(&entry.base.to_le_bytes());
        bytes.extend_from_slice(&entry.size_bytes.to_le_bytes());
        bytes.extend_from_slice(&(entry.kind as u32).to_le_bytes());
    }
    bytes
}

/// Processors start at the reset vector, in the state in which KVM makes them.
pub struct ResetVector;

impl BootState for ResetVector {
    fn apply(&self, _index: u8, _vcpu: &VcpuFd) -> Result<(), KvmError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file(folder: &Path, name: &str, bytes: usize) -> std::path::PathBuf {
        let path = folder.join(name);
        File::create(&path)
            .and_then(|mut file| file.write_all(&vec![0xff; bytes]))
            .unwrap();
        path
    }

    fn open_with(code: &Path, vars: &Path) -> Result<FirmwareFiles, String> {
        let firmware = FirmwareConfig {
            code: code.to_owned(),
            vars: vars.to_owned(),
            log: None,
        };
        FirmwareFiles::open(&firmware, &BootConfig::default()).map_err(|e| e.to_string())
    }

    #[test]
    fn builds_for_secure_boot_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let vars = file(folder.path(), "vars.fd", 4096);
        let code = file(folder.path(), "OVMF_CODE_4M.secboot.fd", 4096);
        let link = folder.path().join("OVMF_CODE_4M.fd");
        std::os::unix::fs::symlink(&code, &link).unwrap();
        for code in [&code, &link] {
            let error = open_with(code, &vars).err().unwrap();
            assert!(error.contains("secboot"), "{error}");
            assert!(error.contains("OVMF_CODE_4M.fd"), "{error}");
        }
    }

    #[test]
    fn variables_have_one_user_and_the_size_of_a_flash() {
        let folder = tempfile::tempdir().unwrap();
        let code = file(folder.path(), "code.fd", 8192);
        let vars = file(folder.path(), "vars.fd", 4096);
        let held = open_with(&code, &vars).unwrap();
        assert_eq!((held.code.len(), held.vars.len()), (8192, 4096));
        let error = open_with(&code, &vars).err().unwrap();
        assert!(error.contains("in use"), "{error}");
        drop(held);
        for bytes in [0, 1000, (FLASH_MOST as usize) + 4096] {
            let odd = file(folder.path(), "odd.fd", bytes);
            let error = open_with(&code, &odd).err().unwrap();
            assert!(error.starts_with("boot.firmware.vars"), "{error}");
        }
    }

    #[test]
    fn the_memory_map_has_packed_entries() {
        let map = e820(&RamLayout::new(3 << 30));
        assert_eq!(map.len() % 20, 0);
        assert_eq!(map[..8], [0; 8]);
        assert_eq!(map[8..16], (2u64 << 30).to_le_bytes());
        assert_eq!(map[16..20], [1, 0, 0, 0]);
    }
}
