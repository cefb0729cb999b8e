//! Buses and the devices that every machine has: host bridge, LPC bridge with power management, serial port, clock, ways to reset.

use std::sync::Arc;
use std::time::Duration;

use drover_arch::layout::{
    self, PCI_IO, PCI_MMIO32_HIGH, PCI_MMIO32_LOW, RamLayout, gsi, pci_mmio64,
};
use drover_devices::bus::{Bus, BusDevice};
use drover_devices::interrupt::InterruptController;
use drover_devices::pci::PciBus;
use drover_devices::pci::assign::{BarWindows, assign_bars};
use drover_devices::pci::host::HostBridge;
use drover_devices::pci::lpc::Lpc;
use drover_devices::pci::ports::{CONFIG_ADDRESS_PORT, ConfigPorts};
use drover_devices::platform::PowerSink;
use drover_devices::platform::debugcon::DebugConsole;
use drover_devices::platform::fw_cfg::FwCfg;
use drover_devices::platform::i8042::KeyboardController;
use drover_devices::platform::pm::PowerManagement;
use drover_devices::platform::port92::SystemControlPortA;
use drover_devices::platform::reset::ResetControl;
use drover_devices::platform::rtc::Rtc;
use drover_devices::platform::serial::SerialPort;

use kvm_ioctls::VmFd;

use super::BuildError;
use super::tables::Facts;
use crate::firmware::{self, FirmwareFiles};
use crate::flash::FirmwareFlash;
use crate::kvm::irq::KvmInterrupts;
use crate::memory::Memory;

/// How long devices may take to let go of guest memory when the machine resets. A disk finishes what is under way.
const DEVICE_RESET_TIMEOUT: Duration = Duration::from_secs(30);

/// The chipset, and the buses that everything hangs on.
pub(super) struct Chipset {
    pub(super) ports: Arc<Bus>,
    pub(super) mmio: Arc<Bus>,
    pub(super) pci: Arc<PciBus>,
    pub(super) serial: Arc<SerialPort>,
    pub(super) pm: Arc<PowerManagement>,
    config_ports: Arc<ConfigPorts>,
    reset_control: Arc<ResetControl>,
    port_92: Arc<SystemControlPortA>,
    keyboard: Arc<KeyboardController>,
    windows: BarWindows,
    host_bridge: Arc<HostBridge>,
    lpc: Arc<Lpc>,
    fw_cfg: Option<Arc<FwCfg>>,
}

impl Chipset {
    pub(super) fn new(
        ram: &RamLayout,
        phys_bits: u8,
        interrupts: &KvmInterrupts,
        power: &Arc<dyn PowerSink>,
    ) -> Result<Self, BuildError> {
        let (ports, mmio) = (Arc::new(Bus::new()), Arc::new(Bus::new()));
        let pci = PciBus::new(mmio.clone(), ports.clone());
        let pm = Arc::new(PowerManagement::new(
            interrupts.line(gsi::SCI),
            power.clone(),
        ));
        let reset_control = Arc::new(ResetControl::new(power.clone()));
        let port_92 = Arc::new(SystemControlPortA::new(power.clone()));
        let keyboard = Arc::new(KeyboardController::new(power.clone()));
        let irq = interrupts.edge(gsi::SERIAL).map_err(BuildError::host)?;
        let serial = Arc::new(SerialPort::new(irq).map_err(BuildError::host)?);
        let high_ram = ram.high.as_ref().map_or(0, |high| high.end - high.start);
        let rtc = Arc::new(Rtc::new(ram.low.end, high_ram));

        let host_bridge = HostBridge::attach(&pci).map_err(BuildError::host)?;
        let lpc = Lpc::attach(&pci, pm.clone()).map_err(BuildError::host)?;
        let config_ports =
            ConfigPorts::attach(&pci, &ports, reset_control.clone()).map_err(BuildError::host)?;
        let fixed: [(u16, u16, Arc<dyn BusDevice>); 4] = [
            (SerialPort::COM1, SerialPort::LEN, serial.clone()),
            (
                KeyboardController::PORT,
                KeyboardController::LEN,
                keyboard.clone(),
            ),
            (Rtc::PORT, Rtc::LEN, rtc),
            (SystemControlPortA::PORT, 1, port_92.clone()),
        ];
        for (base, length, device) in fixed {
            ports
                .insert(base.into(), length.into(), device)
                .map_err(BuildError::host)?;
        }
        let windows = BarWindows {
            memory32: vec![PCI_MMIO32_HIGH, PCI_MMIO32_LOW],
            memory64: Some(pci_mmio64(phys_bits)),
            io: Some(u64::from(PCI_IO.start)..u64::from(PCI_IO.end)),
        };
        debug_assert!(ram.low.end <= layout::LOW_RAM_LIMIT);
        Ok(Self {
            ports,
            mmio,
            pci,
            serial,
            pm,
            config_ports,
            reset_control,
            port_92,
            keyboard,
            windows,
            host_bridge,
            lpc,
            fw_cfg: None,
        })
    }

    /// Adds what firmware runs from and asks: its flash, the configuration device, and the port for its debug output.
    pub(super) fn attach_firmware(
        &mut self,
        mut files: FirmwareFiles,
        facts: &Facts<'_>,
        memory: &Memory,
        vm: &Arc<VmFd>,
    ) -> Result<FirmwareFlash, BuildError> {
        let acpi = facts.as_programmed(&self.pci, &self.host_bridge, &self.lpc);
        let items = firmware::items(&mut files, facts.ram, &facts.smbios(), acpi)
            .map_err(BuildError::host)?;
        let fw_cfg = FwCfg::new(items, memory.guest().clone());
        self.ports
            .insert(FwCfg::PORT.into(), FwCfg::LEN.into(), fw_cfg.clone())
            .map_err(BuildError::host)?;
        self.fw_cfg = Some(fw_cfg);
        if let Some(log) = files.log {
            let console = Arc::new(DebugConsole::new(log));
            self.ports
                .insert(DebugConsole::PORT.into(), 1, console)
                .map_err(BuildError::host)?;
        }
        FirmwareFlash::new(&files.code, &files.vars, files.vars_file, vm, &self.mmio)
            .map_err(BuildError::host)
    }

    /// Gives every PCI function its addresses, as firmware would have.
    pub(super) fn assign_bars(&self) -> Result<(), BuildError> {
        assign_bars(&self.pci, &self.windows).map_err(BuildError::host)
    }

    /// Returns every device to its power-on state, while no vCPU runs.
    pub(super) fn reset(&self) -> Result<(), BuildError> {
        self.pci
            .reset_all(DEVICE_RESET_TIMEOUT)
            .map_err(BuildError::host)?;
        self.config_ports.set_address(0);
        self.pm.reset();
        self.serial.reset();
        self.reset_control.reset();
        self.port_92.reset();
        self.keyboard.reset();
        if let Some(fw_cfg) = &self.fw_cfg {
            fw_cfg.reset();
        }
        Ok(())
    }
}

impl Drop for Chipset {
    /// Takes everything off the buses. Bridges and configuration ports work through the very buses that hold them, so nothing would
    /// ever be dropped otherwise, disks and taps included.
    fn drop(&mut self) {
        for (at, _) in self.pci.functions() {
            // Found a moment ago, and nobody else removes functions.
            let _ = self.pci.remove(at);
        }
        let _ = self.ports.remove(CONFIG_ADDRESS_PORT);
    }
}
