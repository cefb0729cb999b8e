//! The KVM side of one VM: the file descriptors, the in-kernel interrupt chips, and what devices need of them.
//!
//! | module | what |
//! |---|---|
//! | here | opening /dev/kvm with an error that says what to do, creating the VM with its PIC, I/O APIC, LAPICs and PIT |
//! | [`irq`] | interrupt lines and MSI vectors over the GSI routing table |
//! | [`doorbell`] | guest writes turned into event descriptors inside the kernel |
//!
//! Interface: Documentation/virt/kvm/api.rst of the kernel.

pub mod doorbell;
pub mod irq;

use std::io;
use std::sync::Arc;

use drover_arch::layout;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};

/// Why KVM could not be used.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// There is no /dev/kvm.
    #[error(
        "/dev/kvm does not exist: enable virtualisation in the firmware set-up and load the module \
         (modprobe kvm_intel, or modprobe kvm_amd)"
    )]
    Missing,
    /// /dev/kvm is there, and not for this user.
    #[error(
        "/dev/kvm: permission denied: add the user to the group kvm (usermod -aG kvm USER) or chmod 666 /dev/kvm"
    )]
    Permission,
    /// /dev/kvm cannot be opened for another reason.
    #[error("/dev/kvm: {0}")]
    Open(#[source] io::Error),
    /// The kernel speaks another version of the interface.
    #[error("/dev/kvm: API version {0}, but 12 is needed")]
    ApiVersion(i32),
    /// The kernel lacks something that Drover cannot work without.
    #[error("/dev/kvm: this kernel lacks {0}; Linux 5.10 or newer is needed")]
    Lacks(&'static str),
    /// The kernel refused a step.
    #[error("KVM: cannot {step}: {source}")]
    Step {
        /// What was tried.
        step: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// Turns the kernel's answer into [`KvmError::Step`].
pub(crate) fn step(step: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> KvmError {
    move |errno| KvmError::Step {
        step,
        source: errno.into(),
    }
}

const NEEDED: [(Cap, &str); 9] = [
    (Cap::Irqchip, "the in-kernel interrupt controller"),
    (Cap::Pit2, "the in-kernel timer (PIT2)"),
    (Cap::UserMemory, "user memory regions"),
    (Cap::SetTssAddr, "KVM_SET_TSS_ADDR"),
    (Cap::ExtCpuid, "KVM_GET_SUPPORTED_CPUID"),
    (Cap::Irqfd, "irqfd"),
    (Cap::Ioeventfd, "ioeventfd"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    (Cap::IoeventfdNoLength, "ioeventfd of any length"),
];

/// One KVM VM, its interrupt chips created and no vCPU yet.
pub struct Vm {
    kvm: Kvm,
    fd: Arc<VmFd>,
}

impl Vm {
    /// Opens /dev/kvm and creates a VM.
    ///
    /// # Errors
    /// [`KvmError`], each with its remedy where there is one.
    pub fn create() -> Result<Self, KvmError> {
        let kvm = Kvm::new().map_err(|errno| match io::Error::from(errno) {
            error if error.kind() == io::ErrorKind::NotFound => KvmError::Missing,
            error if error.raw_os_error() == Some(libc::ENXIO) => KvmError::Missing,
            error if error.raw_os_error() == Some(libc::ENODEV) => KvmError::Missing,
            error if error.kind() == io::ErrorKind::PermissionDenied => KvmError::Permission,
            error => KvmError::Open(error),
        })?;
        let version = kvm.get_api_version();
        if version != 12 {
            return Err(KvmError::ApiVersion(version));
        }
        // A signal interrupts it while the kernel starts a thread of its own for the VM, and so does what io_uring has to tell this
        // thread; nothing was made then.
        let fd = loop {
            match kvm.create_vm() {
                Err(error) if error.errno() == libc::EINTR => {}
                made => break made.map_err(step("create a VM"))?,
            }
        };
        for (cap, name) in NEEDED {
            if !fd.check_extension(cap) {
                return Err(KvmError::Lacks(name));
            }
        }
        // Needed by VMX hosts without unrestricted guests; harmless elsewhere, so always set. The identity map goes first.
        fd.set_identity_map_address(layout::KVM_IDENTITY_MAP)
            .map_err(step("place the identity map page"))?;
        fd.set_tss_address(layout::KVM_TSS as usize)
            .map_err(step("place the TSS pages"))?;
        fd.create_irq_chip()
            .map_err(step("create the interrupt chips"))?;
        let pit = kvm_pit_config {
            flags: KVM_PIT_SPEAKER_DUMMY,
            ..Default::default()
        };
        fd.create_pit2(pit).map_err(step("create the timer"))?;
        Ok(Self {
            kvm,
            fd: Arc::new(fd),
        })
    }

    /// The VM's descriptor.
    pub fn fd(&self) -> &Arc<VmFd> {
        &self.fd
    }

    /// The CPUID leaves that KVM can show to a guest on this host.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn supported_cpuid(&self) -> Result<CpuId, KvmError> {
        self.kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(step("read the supported CPUID"))
    }

    /// The model specific registers that make up a vCPU's state.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn msr_indices(&self) -> Result<Vec<u32>, KvmError> {
        let list = self
            .kvm
            .get_msr_index_list()
            .map_err(step("list the MSRs"))?;
        Ok(list.as_slice().to_vec())
    }

    /// The most vCPUs that a VM may have on this host.
    pub fn max_vcpus(&self) -> usize {
        self.kvm.get_max_vcpus()
    }

    /// Creates the vCPU with this x2APIC id.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn create_vcpu(&self, apic_id: u32) -> Result<VcpuFd, KvmError> {
        self.fd
            .create_vcpu(u64::from(apic_id))
            .map_err(step("create a vCPU"))
    }
}
