//! Direct kernel boot: the opened files, and the state in which the processors start.

use std::fs::File;
use std::path::{Path, PathBuf};

use drover_api::definition::BootConfig;
use drover_arch::boot::{self, BootError, EntryPoint, RamContent};
use drover_arch::layout::E820Entry;
use drover_arch::{Gpa, msr};
use drover_devices::GuestMemory;
use kvm_bindings::Msrs;
use kvm_ioctls::VcpuFd;

use crate::kvm::{KvmError, step};
use crate::vcpu::BootState;

/// Kernel and initial RAM disk, open for as long as the VM lives: a reboot loads the files that the VM was made from, even if their
/// names mean something else by then.
pub struct BootFiles {
    config: BootConfig,
    kernel_path: PathBuf,
    kernel: File,
    initrd: Option<File>,
}

/// A file of the boot section cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("{field}: {}: {source}", path.display())]
pub struct OpenError {
    /// The definition's field.
    pub field: &'static str,
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub source: std::io::Error,
}

/// Opens a regular file for reading.
pub(crate) fn open(field: &'static str, path: &Path) -> Result<File, OpenError> {
    let file = File::open(path).and_then(|file| {
        if file.metadata()?.is_file() {
            Ok(file)
        } else {
            Err(std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                "not a regular file",
            ))
        }
    });
    file.map_err(|source| OpenError {
        field,
        path: path.to_owned(),
        source,
    })
}

impl BootFiles {
    /// Opens what `config` names; `kernel` is its kernel.
    ///
    /// # Errors
    /// A file is missing or not readable.
    pub fn open(kernel: &Path, config: &BootConfig) -> Result<Self, OpenError> {
        let initrd = config
            .initrd
            .as_deref()
            .map(|path| open("boot.initrd", path))
            .transpose()?;
        Ok(Self {
            kernel: open("boot.kernel", kernel)?,
            kernel_path: kernel.to_owned(),
            initrd,
            config: config.clone(),
        })
    }

    /// The kernel's file.
    pub fn kernel_path(&self) -> &Path {
        &self.kernel_path
    }

    /// The initial RAM disk's file.
    pub fn initrd_path(&self) -> Option<&Path> {
        self.config.initrd.as_deref()
    }

    /// Loads everything into guest RAM.
    ///
    /// # Errors
    /// The kernel is none, or does not fit.
    pub fn load(
        &mut self,
        memory: &GuestMemory,
        e820: &[E820Entry],
        rsdp: u64,
        content: RamContent,
    ) -> Result<EntryPoint, BootError> {
        boot::load(
            &**memory,
            &mut self.kernel,
            self.initrd.as_mut(),
            &self.config.cmdline,
            e820,
            Gpa(rsdp),
            content,
        )
    }
}

/// Where a loaded kernel is entered.
pub struct DirectBoot {
    entry: EntryPoint,
}

impl DirectBoot {
    /// Starts at `entry`.
    pub fn new(entry: EntryPoint) -> Self {
        Self { entry }
    }
}

impl BootState for DirectBoot {
    fn apply(&self, index: u8, vcpu: &VcpuFd) -> Result<(), KvmError> {
        let entries = msr::boot_msrs();
        let msrs = Msrs::from_entries(&entries).map_err(|error| KvmError::Step {
            step: "list the boot MSRs",
            source: std::io::Error::other(format!("{error:?}")),
        })?;
        let set = vcpu.set_msrs(&msrs).map_err(step("set the boot MSRs"))?;
        if let Some(refused) = entries.get(set) {
            // MISC_ENABLE and MTRRs exist on every processor that KVM runs on; a paravirtual host may still refuse some.
            tracing::warn!(
                msr = format_args!("{:#x}", refused.index),
                "the host refuses a boot MSR"
            );
        }
        if index > 0 {
            // Application processors wait for the boot processor's INIT and SIPI.
            return Ok(());
        }
        let mut sregs = vcpu.get_sregs().map_err(step("read system registers"))?;
        boot::apply_sregs(&self.entry, &mut sregs);
        vcpu.set_sregs(&sregs)
            .map_err(step("set system registers"))?;
        vcpu.set_regs(&boot::regs(&self.entry))
            .map_err(step("set registers"))
    }
}
