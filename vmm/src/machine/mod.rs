//! A machine: everything that one VM consists of, built from its definition and owned by the control thread.
//!
//! ```text
//!  definition ─> open files ─> KVM VM ─> RAM ─> processors ─> chipset ─> devices ─> kernel and tables in RAM ─> vCPU threads, parked
//!                └────────────────────────── an error here leaves nothing behind ──────────────────────────────┘        │
//!                                                                                              run / pause / reset / stop
//! ```
//!
//! A reset happens in place: processors park, devices and chips return to their power-on state, the kernel is loaded again.

mod chipset;
pub mod devices;
pub mod disks;
mod error;
mod output;
mod power;
mod tables;

use std::path::PathBuf;
use std::sync::Arc;

use drover_api::definition::{DiskConfig, LimitsConfig, Topology as TopologyConfig, VmConfig};
use drover_arch::boot::{BootError, RamContent};
use drover_arch::cpuid::CpuidPolicy;
use drover_arch::layout::{E820Entry, RamLayout};
use drover_arch::topology::Topology;
use drover_devices::bus::Doorbells;
use drover_devices::interrupt::InterruptController;
use drover_devices::platform::PowerSink;
use kvm_bindings::CpuId;
use kvm_ioctls::VcpuFd;

use self::chipset::Chipset;
use self::devices::{Connected, Connections, Device, Opened};
use self::disks::{LiveDisk, Opener};
use self::output::SerialBackEnd;
use self::power::PowerGate;
use self::tables::FirmwareTables;
use crate::boot::{BootFiles, DirectBoot};
use crate::console::Console;
use crate::firmware::{FirmwareFiles, ResetVector};
use crate::flash::FirmwareFlash;
use crate::kvm::doorbell::KvmDoorbells;
use crate::kvm::irq::KvmInterrupts;
use crate::kvm::{self, KvmError, step};
use crate::kvm_state::vm::VmState;
use crate::mailbox::{Mailbox, Message};
use crate::memory::Memory;
use crate::metrics::MachineMetrics;
use crate::process::RawTerminal;
use crate::threads::ThreadStarter;
use crate::vcpu::{BootState, Surroundings, VcpuError, Vcpus};

pub use self::error::BuildError;

/// Fields drop in order: processors first, so that nothing runs while devices go; RAM last.
pub struct Machine {
    vcpus: Vcpus,
    devices: Vec<Device>,
    disks: Vec<LiveDisk>,
    console: Console,
    chipset: Chipset,
    power: Arc<PowerGate>,
    interrupts: Arc<KvmInterrupts>,
    chips: VmState,
    vm: kvm::Vm,
    start: Start,
    pty: Option<PathBuf>,
    _terminal: Option<RawTerminal>,
    config: VmConfig,
    memory: Memory,
}

/// How the machine starts, and starts again at a reset.
enum Start {
    /// We load a kernel and describe the machine to it.
    Kernel {
        boot: BootFiles,
        tables: FirmwareTables,
        e820: Vec<E820Entry>,
    },
    /// Firmware runs from its flash.
    Firmware(FirmwareFlash),
}

impl Start {
    /// Puts into RAM what has to be there, and says in which state the processors begin.
    fn prepare(
        &mut self,
        memory: &Memory,
        content: RamContent,
    ) -> Result<Arc<dyn BootState>, BuildError> {
        match self {
            Self::Kernel { boot, tables, e820 } => load(boot, tables, memory, e820, content),
            Self::Firmware(flash) => {
                flash.reset().map_err(BuildError::host)?;
                Ok(Arc::new(ResetVector))
            }
        }
    }
}

/// The opened files of either.
enum StartFiles {
    Kernel(BootFiles),
    Firmware(FirmwareFiles),
}

impl StartFiles {
    fn open(config: &VmConfig) -> Result<Self, BuildError> {
        let boot = &config.boot;
        let opened = match (&boot.firmware, &boot.kernel) {
            (Some(firmware), _) => FirmwareFiles::open(firmware, boot).map(Self::Firmware),
            (None, Some(kernel)) => BootFiles::open(kernel, boot).map(Self::Kernel),
            (None, None) => {
                return Err(BuildError::of("boot")("there is nothing to start".into()));
            }
        };
        opened.map_err(|error| {
            // The field is told apart from the message.
            let message = format!("{}: {}", error.path.display(), error.source);
            BuildError::of(error.field)(message.into())
        })
    }
}

impl Machine {
    /// Opens and builds all that `config` names. Its processors are parked afterwards.
    ///
    /// # Errors
    /// Something cannot be opened, or the host refuses; everything opened so far is closed again.
    pub fn build(
        config: VmConfig,
        mailbox: &Mailbox,
        threads: ThreadStarter,
    ) -> Result<Self, BuildError> {
        let files = StartFiles::open(&config)?;
        let mut opener = Opener::new(&config, threads.pool_start())?;
        let opened = Opened::open(&config, &mut opener, &threads)?;
        let serial = SerialBackEnd::open(&config.serial)?;
        let vm = kvm::Vm::create().map_err(BuildError::host)?;
        let memory = Memory::new(&config.memory).map_err(|error| match error.field() {
            Some(field) => BuildError::of(field)(error.into()),
            None => BuildError::host(error),
        })?;
        memory.register(vm.fd()).map_err(BuildError::host)?;
        let interrupts = Arc::new(KvmInterrupts::new(vm.fd().clone()));
        let chips = VmState::save(vm.fd()).map_err(BuildError::host)?;

        let topology = topology(&config)?;
        let ram = RamLayout::new(config.memory.size.0);
        let (vcpus, cpuid) = create_vcpus(&vm, topology)?;
        check_ram_fits(&ram, cpuid.phys_bits())?;

        let power = Arc::new(PowerGate::new(mailbox.clone()));
        let sink: Arc<dyn PowerSink> = power.clone();
        let mut chipset = Chipset::new(&ram, cpuid.phys_bits(), &interrupts, &sink)?;
        let doorbells: Arc<dyn Doorbells> = Arc::new(KvmDoorbells::new(vm.fd().clone()));
        let connections = Connections {
            pci: &chipset.pci,
            memory: memory.guest(),
            interrupts: &*interrupts as &dyn InterruptController,
            doorbells: &doorbells,
            threads: &threads,
        };
        let Connected {
            devices,
            disks,
            slots,
        } = opened.connect(&config, &connections)?;
        let console = Console::new(chipset.serial.clone(), serial.output);

        let facts = tables::Facts {
            config: &config,
            topology,
            ram: &ram,
            cpuid: &cpuid,
            pci_slots: slots,
        };
        let mut start = match files {
            StartFiles::Kernel(boot) => {
                chipset.assign_bars()?;
                Start::Kernel {
                    boot,
                    tables: facts.direct_boot()?,
                    e820: ram.e820(),
                }
            }
            StartFiles::Firmware(files) => {
                let flash = chipset.attach_firmware(files, &facts, &memory, vm.fd())?;
                Start::Firmware(flash)
            }
        };
        let state = start.prepare(&memory, RamContent::Zeroed)?;

        let crash_mailbox = mailbox.clone();
        let surroundings = Arc::new(Surroundings {
            vm: vm.fd().clone(),
            ports: chipset.ports.clone(),
            mmio: chipset.mmio.clone(),
            power: sink,
            park: power.closed(),
            crashed: Box::new(move |reason| crash_mailbox.send(Message::Crashed(reason))),
            msr_indices: vm.msr_indices().map_err(BuildError::host)?,
        });
        let vcpus =
            Vcpus::start(vcpus, &surroundings, &threads, &state).map_err(BuildError::host)?;
        Ok(Self {
            vcpus,
            devices,
            disks,
            console,
            chipset,
            power,
            interrupts,
            chips,
            vm,
            start,
            pty: serial.pty,
            _terminal: serial.terminal,
            config,
            memory,
        })
    }

    /// The definition that it was built from.
    pub fn config(&self) -> &VmConfig {
        &self.config
    }

    /// Its definition and its disks, in the definition's order, to be changed together.
    pub fn disks_mut(&mut self) -> (&mut VmConfig, &mut [LiveDisk]) {
        (&mut self.config, &mut self.disks)
    }

    /// Its disks, in the definition's order.
    pub fn disks(&self) -> &[LiveDisk] {
        &self.disks
    }

    /// What a disk may use: limits of its own, or those of its group.
    pub fn limits_of(&self, disk: &DiskConfig) -> Option<LimitsConfig> {
        let Some(wanted) = &disk.limit_group else {
            return disk.limits;
        };
        let mut groups = self.config.limit_groups.iter();
        groups
            .find(|group| group.id == *wanted)
            .map(|group| group.limits)
    }

    /// The pseudo-terminal of its serial port.
    pub fn pty(&self) -> Option<PathBuf> {
        self.pty.clone()
    }

    /// Its serial console.
    pub fn console(&mut self) -> &mut Console {
        &mut self.console
    }

    /// Lets the processors run.
    pub fn run(&mut self) {
        self.vcpus.run();
    }

    /// Lets the processors run on after [`Machine::stop`].
    pub fn resume(&mut self) {
        self.vcpus.resume();
    }

    /// Stops the processors.
    ///
    /// # Errors
    /// One of them did not stop in time.
    pub fn stop(&mut self) -> Result<(), VcpuError> {
        self.vcpus.pause()
    }

    /// Presses the power button; false if the guest does not listen to it.
    pub fn press_power_button(&self) -> bool {
        self.chipset.pm.press_power_button()
    }

    /// Returns the machine to its power-on state, loads the kernel again and, with `run`, lets it run.
    ///
    /// # Errors
    /// A processor or device did not stop in time, or the kernel file has changed for the worse.
    pub fn reset(&mut self, run: bool) -> Result<(), BuildError> {
        self.vcpus.pause().map_err(BuildError::host)?;
        self.chipset.reset()?;
        if let Start::Kernel { .. } = self.start {
            self.chipset.assign_bars()?;
        }
        self.chips
            .restore_chips(self.vm.fd())
            .map_err(BuildError::host)?;
        let state = self.start.prepare(&self.memory, RamContent::Used)?;
        self.vcpus.reset(&state).map_err(BuildError::host)?;
        self.power.open();
        if run {
            self.vcpus.run();
        }
        Ok(())
    }

    /// What it counts.
    pub fn metrics(&self) -> MachineMetrics<'_> {
        MachineMetrics {
            vcpus: self.vcpus.counters(),
            devices: &self.devices,
            disks: self
                .config
                .disks
                .iter()
                .zip(&self.disks)
                .filter_map(|(config, live)| {
                    let statistics = live.options.statistics.clone()?;
                    Some((format!("device=\"{}\"", config.id), statistics))
                })
                .collect(),
            route_writes: self.interrupts.route_writes(),
            console_dropped_bytes: self.console.dropped(),
            unclaimed_port_accesses: self.chipset.ports.misses(),
            unclaimed_mmio_accesses: self.chipset.mmio.misses(),
            ram_bytes: self.memory.slots().iter().map(|slot| slot.size_bytes).sum(),
        }
    }
}

fn topology(config: &VmConfig) -> Result<Topology, BuildError> {
    let topology = match config.cpus.topology {
        Some(TopologyConfig {
            sockets,
            dies,
            cores,
            threads,
        }) => Topology::new(sockets.into(), dies.into(), cores.into(), threads.into()),
        None => Topology::flat(config.cpus.count.into()),
    };
    topology.map_err(|error| BuildError::of("cpus")(error.into()))
}

/// Creates the processors and shows them what they are. Their number in KVM is their APIC id.
fn create_vcpus(
    vm: &kvm::Vm,
    topology: Topology,
) -> Result<(Vec<VcpuFd>, CpuidPolicy), BuildError> {
    let max = vm.max_vcpus();
    if topology.count() as usize > max {
        let why = format!(
            "{} processors, but this host's KVM allows {max}",
            topology.count()
        );
        return Err(BuildError::of("cpus.count")(why.into()));
    }
    let vcpus: Vec<VcpuFd> = topology
        .apic_ids()
        .map(|id| vm.create_vcpu(id))
        .collect::<Result<_, KvmError>>()
        .map_err(BuildError::host)?;
    let tsc_khz = vcpus.first().and_then(|vcpu| vcpu.get_tsc_khz().ok());
    let supported = vm.supported_cpuid().map_err(BuildError::host)?;
    let policy =
        CpuidPolicy::host(supported.as_slice(), topology, tsc_khz).map_err(BuildError::host)?;
    for (index, vcpu) in (0..).zip(&vcpus) {
        let leaves = CpuId::from_entries(&policy.for_vcpu(index))
            .map_err(|error| BuildError::host(format!("CPUID: {error:?}")))?;
        vcpu.set_cpuid2(&leaves)
            .map_err(step("set the CPUID"))
            .map_err(BuildError::host)?;
    }
    Ok((vcpus, policy))
}

/// RAM must end below the 64-bit PCI window.
fn check_ram_fits(ram: &RamLayout, phys_bits: u8) -> Result<(), BuildError> {
    let limit = drover_arch::layout::pci_mmio64(phys_bits).start;
    if ram.end() > limit {
        let why = format!(
            "does not fit the {phys_bits} physical address bits of this host's processors: \
             at most {} MiB",
            (limit >> 20) - 2048
        );
        return Err(BuildError::of("memory.size")(why.into()));
    }
    Ok(())
}

/// Puts tables and kernel into RAM, and says how to start.
fn load(
    boot: &mut BootFiles,
    tables: &FirmwareTables,
    memory: &Memory,
    e820: &[E820Entry],
    content: RamContent,
) -> Result<Arc<dyn BootState>, BuildError> {
    tables.write(memory.guest())?;
    let entry = boot
        .load(memory.guest(), e820, tables.rsdp(), content)
        .map_err(|error| boot_error(boot, &error))?;
    Ok(Arc::new(DirectBoot::new(entry)))
}

/// Names the field and the file that a boot error is about, instead of the word with which its message begins.
fn boot_error(boot: &BootFiles, error: &BootError) -> BuildError {
    let (field, file) = match error {
        BootError::ReadInitrd(_) | BootError::InitrdTooBig { .. } | BootError::InitrdEmpty => {
            ("boot.initrd", boot.initrd_path())
        }
        BootError::CommandLineTooLong { .. } | BootError::CommandLineNul => ("boot.cmdline", None),
        BootError::NoLowRam => ("memory.size", None),
        _ => ("boot.kernel", Some(boot.kernel_path())),
    };
    let message = error.to_string();
    let message = ["kernel: ", "initrd: ", "cmdline: "]
        .into_iter()
        .find_map(|word| message.strip_prefix(word))
        .unwrap_or(&message);
    let message = match file {
        Some(file) => format!("{}: {message}", file.display()),
        None => message.to_owned(),
    };
    BuildError::of(field)(message.into())
}
