//! The bus, configuration access, BARs and the chipset functions, driven as a guest would.

use std::io;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proptest::prelude::*;

use super::assign::{BarWindows, assign_bars};
use super::config::{BarKind, ConfigSpace, ConfigSpaceState, ConfigStateError, Identity};
use super::host::{HOST_BRIDGE, HostBridge};
use super::lpc::{LPC, Lpc};
use super::msix::{MessageControl, Msix, MsixState};
use super::ports::ConfigPorts;
use super::*;
use crate::interrupt::{MsiMessage, MsiVector};

/// A function with BARs whose bytes read as the low byte of their offset; remembers where it was told its BARs are.
struct Function {
    config: Mutex<ConfigSpace>,
    moves: Mutex<Vec<Option<u64>>>,
}

impl Function {
    fn new(bars: &[(u8, BarKind, u64)]) -> Arc<Function> {
        let mut config = ConfigSpace::new(IDENTITY);
        for (index, kind, size) in bars {
            config.add_bar(*index, *kind, *size).unwrap();
        }
        config.set_interrupt_pin(IntxPin::B);
        Arc::new(Function {
            config: Mutex::new(config),
            moves: Mutex::default(),
        })
    }
}

const IDENTITY: Identity = Identity {
    vendor: 0x1234,
    device: 0x5678,
    revision: 9,
    class: 0x01_02_03,
    subsystem_vendor: 0xaaaa,
    subsystem: 0xbbbb,
};

impl PciDevice for Function {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        self.config.lock().unwrap().read(offset, data);
    }

    fn config_write(&self, offset: u16, data: &[u8]) -> ConfigWrite {
        self.config.lock().unwrap().write(offset, data);
        ConfigWrite::RegionsChanged
    }

    fn regions(&self) -> Vec<Region> {
        self.config.lock().unwrap().decoded_bars()
    }

    fn region_read(&self, _number: u8, offset: u64, data: &mut [u8]) {
        data.fill(offset as u8);
    }

    fn region_write(&self, _number: u8, _offset: u64, _data: &[u8]) {}

    fn region_moved(&self, _number: u8, base: Option<u64>) {
        self.moves.lock().unwrap().push(base);
    }

    fn reset(&self) -> Option<Box<dyn Pending>> {
        self.config.lock().unwrap().reset();
        None
    }
}

/// A register that remembers the byte written to it.
#[derive(Default)]
struct Byte(AtomicU64);

impl BusDevice for Byte {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(self.0.load(Ordering::Relaxed) as u8 + offset as u8);
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        self.0.store(data[0].into(), Ordering::Relaxed);
    }
}

struct Machine {
    memory: Arc<Bus>,
    io: Arc<Bus>,
    bus: Arc<PciBus>,
    bridge: Arc<HostBridge>,
    ports: Arc<ConfigPorts>,
    pm: Arc<Byte>,
    reset: Arc<Byte>,
}

fn machine() -> Machine {
    let (memory, io) = (Arc::new(Bus::new()), Arc::new(Bus::new()));
    let bus = PciBus::new(Arc::clone(&memory), Arc::clone(&io));
    let bridge = HostBridge::attach(&bus).unwrap();
    let (pm, reset) = (Arc::new(Byte::default()), Arc::new(Byte::default()));
    Lpc::attach(&bus, pm.clone()).unwrap();
    let ports = ConfigPorts::attach(&bus, &io, reset.clone()).unwrap();
    Machine {
        memory,
        io,
        bus,
        bridge,
        ports,
        pm,
        reset,
    }
}

fn read32(bus: &Bus, address: u64) -> u32 {
    let mut data = [0; 4];
    bus.read(address, &mut data);
    u32::from_le_bytes(data)
}

fn slot(device: u8) -> BusDeviceFunction {
    BusDeviceFunction::new(0, device, 0).unwrap()
}

impl Machine {
    fn read(&self, at: BusDeviceFunction, offset: u16) -> u32 {
        let mut data = [0; 4];
        self.bus.config_read(at, offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&self, at: BusDeviceFunction, offset: u16, value: u32) {
        self.bus.config_write(at, offset, &value.to_le_bytes());
    }

    fn byte(&self, address: u64) -> u8 {
        let mut data = [0];
        self.memory.read(address, &mut data);
        data[0]
    }
}

#[test]
fn configuration_ports_and_ecam_show_the_same_registers() {
    let machine = machine();
    machine.io.write(0xcf8, &0x8000_f800_u32.to_le_bytes());
    assert_eq!(read32(&machine.io, 0xcfc), 0x2918_8086);
    assert_eq!(
        read32(&machine.memory, 0xe000_0000 + (0x1f << 15)),
        0x2918_8086
    );
    let mut half = [0; 2];
    machine.io.read(0xcfe, &mut half);
    assert_eq!(half, [0x18, 0x29]);
}

#[test]
fn a_function_that_does_not_exist_reads_all_ones_on_both_ways() {
    let machine = machine();
    machine.io.write(0xcf8, &0x8000_0800_u32.to_le_bytes());
    assert_eq!(read32(&machine.io, 0xcfc), u32::MAX);
    assert_eq!(read32(&machine.memory, 0xe000_0000 + (1 << 15)), u32::MAX);
    assert_eq!(read32(&machine.memory, 0xe000_0000 + (1 << 20)), u32::MAX);
}

#[test]
fn configuration_data_needs_the_enable_bit_and_an_access_within_one_register() {
    let machine = machine();
    machine.io.write(0xcf8, &0x0000_0000_u32.to_le_bytes());
    assert_eq!(read32(&machine.io, 0xcfc), u32::MAX);
    machine.io.write(0xcf8, &0x8000_0000_u32.to_le_bytes());
    assert_eq!(read32(&machine.io, 0xcfc), 0x29c0_8086);
    assert_eq!(read32(&machine.io, 0xcfd), u32::MAX);
    assert_eq!(machine.ports.address(), 0x8000_0000);
}

#[test]
fn a_byte_at_0xcf9_is_the_reset_register_and_a_word_at_0xcf8_is_not() {
    let machine = machine();
    machine.io.write(0xcf8, &0x8000_0000_u32.to_le_bytes());
    machine.io.write(0xcf9, &[6]);
    assert_eq!(machine.reset.0.load(Ordering::Relaxed), 6);
    assert_eq!(machine.ports.address(), 0x8000_0000);
    machine.io.write(0xcf8, &[0, 0]);
    assert_eq!(machine.ports.address(), 0x8000_0000);
}

#[test]
fn ecam_follows_pciexbar_and_leaves_its_old_place() {
    let machine = machine();
    machine.write(HOST_BRIDGE, 0x60, 0xb000_0001);
    assert_eq!(read32(&machine.memory, 0xb000_0000), 0x29c0_8086);
    assert_eq!(read32(&machine.memory, 0xe000_0000), u32::MAX);
    let ecam = machine.bridge.ecam().unwrap();
    assert_eq!((ecam.base, ecam.size), (0xb000_0000, 256 << 20));

    machine.write(HOST_BRIDGE, 0x60, 0xb400_0005);
    assert_eq!(machine.bridge.ecam().unwrap().size, 64 << 20);
    assert_eq!(read32(&machine.memory, 0xb400_0000), 0x29c0_8086);

    machine.write(HOST_BRIDGE, 0x60, 0);
    assert_eq!(machine.bridge.ecam(), None);
    assert_eq!(read32(&machine.memory, 0xb400_0000), u32::MAX);
}

#[test]
fn an_ecam_window_moves_by_a_write_that_came_through_itself() {
    let machine = machine();
    machine
        .memory
        .write(0xe000_0060, &0xc000_0001_u32.to_le_bytes());
    assert_eq!(read32(&machine.memory, 0xc000_0000), 0x29c0_8086);
}

#[test]
fn the_power_management_block_is_where_pmbase_says_while_acpi_is_enabled() {
    let machine = machine();
    let mut data = [0];
    machine.io.write(0x600, &[0x40]);
    machine.io.read(0x608, &mut data);
    assert_eq!(data, [0x48]);

    machine.write(LPC, 0x40, 0xb000);
    machine.io.read(0xb008, &mut data);
    assert_eq!(data, [0x48]);
    machine.io.read(0x608, &mut data);
    assert_eq!(data, [0xff]);
    assert_eq!(machine.read(LPC, 0x40), 0xb001, "bit 0 says I/O space");

    machine.write(LPC, 0x44, 0);
    machine.io.read(0xb008, &mut data);
    assert_eq!(data, [0xff]);
    assert_eq!(machine.pm.0.load(Ordering::Relaxed), 0x40);
}

#[test]
fn a_bar_is_sized_by_writing_ones_and_decodes_only_when_command_says_so() {
    let machine = machine();
    let function = Function::new(&[(0, BarKind::Memory64, 0x1_0000), (2, BarKind::Io, 0x20)]);
    machine.bus.add(slot(1), function.clone()).unwrap();
    for offset in [0x10, 0x14, 0x18] {
        machine.write(slot(1), offset, u32::MAX);
    }
    assert_eq!(machine.read(slot(1), 0x10), 0xffff_0004);
    assert_eq!(machine.read(slot(1), 0x14), 0xffff_ffff);
    assert_eq!(machine.read(slot(1), 0x18), 0xffff_ffe1);
    assert_eq!(machine.read(slot(1), 0x1c), 0);

    machine.write(slot(1), 0x10, 0x8000_0000);
    machine.write(slot(1), 0x14, 0x1);
    machine.write(slot(1), 0x18, 0x6000);
    assert_eq!(machine.byte(0x1_8000_0033), 0xff);
    machine.write(slot(1), 0x04, 0x2);
    assert_eq!(machine.byte(0x1_8000_0033), 0x33);
    assert_eq!(read32(&machine.io, 0x6000), u32::MAX);
    machine.write(slot(1), 0x04, 0x3);
    assert_eq!(read32(&machine.io, 0x6001), 0x0101_0101);

    machine.write(slot(1), 0x10, 0x9000_0000);
    assert_eq!(machine.byte(0x1_8000_0033), 0xff);
    assert_eq!(machine.byte(0x1_9000_0033), 0x33);
    machine.write(slot(1), 0x04, 0);
    assert_eq!(machine.byte(0x1_9000_0033), 0xff);
    assert_eq!(function.moves.lock().unwrap().last(), Some(&None));
}

#[test]
fn a_bar_put_over_another_appears_once_the_other_has_moved_away() {
    let machine = machine();
    for device in [1, 2] {
        let function = Function::new(&[(0, BarKind::Memory32, 0x1000)]);
        machine.bus.add(slot(device), function).unwrap();
        machine.write(slot(device), 0x10, 0x9000_0000);
        machine.write(slot(device), 0x04, 0x2);
    }
    let base = |device| machine.bus.mapped_region(slot(device), 0).map(|r| r.base);
    assert_eq!(base(1), Some(0x9000_0000));
    assert_eq!(base(2), None);
    machine.write(slot(1), 0x10, 0x9100_0000);
    assert_eq!(base(1), Some(0x9100_0000));
    assert_eq!(base(2), Some(0x9000_0000));
}

#[test]
fn a_removed_function_takes_its_addresses_along_and_its_place_can_be_taken() {
    let machine = machine();
    let function = Function::new(&[(0, BarKind::Memory32, 0x1000)]);
    machine.bus.add(slot(1), function.clone()).unwrap();
    machine.write(slot(1), 0x10, 0x9000_0000);
    machine.write(slot(1), 0x04, 0x2);
    assert_eq!(
        machine.bus.add(slot(1), function),
        Err(PciError::Occupied(slot(1)))
    );
    machine.bus.remove(slot(1)).unwrap();
    assert_eq!(machine.byte(0x9000_0000), 0xff);
    assert_eq!(machine.read(slot(1), 0), u32::MAX);
    assert!(matches!(
        machine.bus.remove(slot(1)),
        Err(PciError::Empty(_))
    ));
}

#[test]
fn a_reset_returns_every_function_and_the_chipset_to_power_on() {
    let machine = machine();
    let function = Function::new(&[(0, BarKind::Memory32, 0x1000)]);
    machine.bus.add(slot(1), function).unwrap();
    machine.write(slot(1), 0x10, 0x9000_0000);
    machine.write(slot(1), 0x04, 0x2);
    machine.write(HOST_BRIDGE, 0x60, 0xb000_0001);
    machine.bus.reset_all(Duration::from_secs(1)).unwrap();
    assert_eq!(machine.byte(0x9000_0000), 0xff);
    assert_eq!(read32(&machine.memory, 0xe000_0000), 0x29c0_8086);
    assert_eq!(machine.read(slot(1), 0x04) & 0xffff, 0);
}

#[test]
fn assigned_bars_lie_aligned_and_disjoint_in_their_windows() {
    let machine = machine();
    let windows = BarWindows::from_layout(40);
    for device in 1..=8 {
        let function = Function::new(&[
            (0, BarKind::Memory64, 0x1000 << device),
            (2, BarKind::Memory32, 0x10),
            (3, BarKind::Io, 0x20),
            (4, BarKind::Memory64Prefetchable, 1 << 30),
        ]);
        machine.bus.add(slot(device), function).unwrap();
    }
    assign_bars(&machine.bus, &windows).unwrap();
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for device in 1..=8 {
        assert_eq!(
            machine.read(slot(device), 0x3c),
            0x0200 | (16 + (u32::from(device) + 1) % 8)
        );
        machine.write(slot(device), 0x04, 0x3);
        for number in [0, 2, 3, 4] {
            let region = machine.bus.mapped_region(slot(device), number).unwrap();
            assert!(region.base.is_multiple_of(region.size));
            let range = region.base..region.base + region.size;
            let inside = |w: &Range<u64>| w.start <= range.start && range.end <= w.end;
            match region.space {
                Space::Io => assert!(windows.io.iter().any(inside)),
                Space::Memory => {
                    let mut all = windows.memory32.iter().chain(&windows.memory64);
                    assert!(all.any(inside), "{range:x?}");
                    ranges.push(range);
                }
            }
        }
    }
    ranges.sort_by_key(|range| range.start);
    assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
    assert!(
        ranges.last().unwrap().end > 1 << 32,
        "what does not fit below goes above"
    );
}

#[test]
fn a_bar_without_room_is_named() {
    let machine = machine();
    let function = Function::new(&[(1, BarKind::Memory32, 1 << 31)]);
    machine.bus.add(slot(3), function).unwrap();
    assert_eq!(
        assign_bars(&machine.bus, &BarWindows::from_layout(40)),
        Err(PciError::NoRoom {
            at: slot(3),
            bar: 1,
            size: 1 << 31
        })
    );
}

#[test]
fn a_machine_that_is_dropped_drops_its_functions() {
    let machine = machine();
    let function = Function::new(&[(0, BarKind::Memory32, 0x1000)]);
    machine.bus.add(slot(1), function.clone()).unwrap();
    machine.write(slot(1), 0x10, 0x9000_0000);
    machine.write(slot(1), 0x04, 0x2);
    drop(machine);
    assert_eq!(Arc::strong_count(&function), 1);
}

#[test]
fn routing_ids_are_bus_device_function() {
    let at = BusDeviceFunction::new(2, 0x1f, 7).unwrap();
    assert_eq!((at.routing_id(), at.to_string()), (0x2ff, "02:1f.7".into()));
    assert_eq!(BusDeviceFunction::new(0, 32, 0), None);
    assert_eq!(BusDeviceFunction::new(0, 0, 8), None);
}

#[test]
fn bars_and_capabilities_that_do_not_fit_are_refused() {
    let mut config = ConfigSpace::new(IDENTITY);
    assert!(config.add_bar(5, BarKind::Memory64, 0x1000).is_err());
    assert!(config.add_bar(0, BarKind::Memory32, 0x1001).is_err());
    assert!(config.add_bar(0, BarKind::Io, 512).is_err());
    config.add_bar(0, BarKind::Memory64, 0x1000).unwrap();
    assert!(config.add_bar(1, BarKind::Memory32, 0x1000).is_err());
    assert_eq!(config.add_capability(9, &[0; 62], &[]).unwrap(), 0x40);
    assert_eq!(config.add_capability(9, &[0; 62], &[]).unwrap(), 0x80);
    assert!(config.add_capability(9, &[0; 63], &[]).is_err());
    assert_eq!(config.add_capability(9, &[0; 62], &[]).unwrap(), 0xc0);
    assert!(config.add_capability(9, &[], &[]).is_err());
}

#[test]
fn a_configuration_space_survives_saving_and_refuses_another_functions() {
    let mut config = ConfigSpace::new(IDENTITY);
    config.add_bar(0, BarKind::Memory32, 0x1000).unwrap();
    config.write(0x04, &0x0006_u16.to_le_bytes());
    config.write(0x10, &0x9000_0000_u32.to_le_bytes());
    config.set_interrupt_status(true);
    let text = serde_json::to_string(&config.save()).unwrap();
    let state: ConfigSpaceState = serde_json::from_str(&text).unwrap();

    let mut restored = ConfigSpace::new(IDENTITY);
    restored.add_bar(0, BarKind::Memory32, 0x1000).unwrap();
    restored.restore(&state).unwrap();
    assert_eq!(restored.save(), state);
    assert_eq!(restored.decoded_bars(), config.decoded_bars());

    let mut other = ConfigSpace::new(Identity {
        device: 1,
        ..IDENTITY
    });
    let fresh = other.save();
    assert_eq!(
        other.restore(&state),
        Err(ConfigStateError::OtherFunction(2))
    );
    assert_eq!(other.save(), fresh);
    let short = ConfigSpaceState { bytes: vec![0; 3] };
    assert_eq!(other.restore(&short), Err(ConfigStateError::Length(3)));
}

/// A vector that counts, and that can be told to refuse routes.
#[derive(Default)]
struct Counter {
    fired: AtomicU64,
    routes: Mutex<Vec<MsiMessage>>,
    refuse: AtomicBool,
}

impl Counter {
    fn fired(&self) -> u64 {
        self.fired.load(Ordering::SeqCst)
    }
}

impl MsiVector for Counter {
    fn route(&self, message: MsiMessage) -> io::Result<()> {
        if self.refuse.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.routes.lock().unwrap().push(message);
        Ok(())
    }

    fn trigger(&self) -> io::Result<()> {
        self.fired.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

const ON: MessageControl = MessageControl {
    enabled: true,
    function_masked: false,
};
const ON_MASKED: MessageControl = MessageControl {
    enabled: true,
    function_masked: true,
};

fn msix(count: usize) -> (Msix, Vec<Arc<Counter>>) {
    let counters: Vec<_> = (0..count).map(|_| Arc::new(Counter::default())).collect();
    let vectors = counters.iter().map(|c| Arc::clone(c) as Arc<dyn MsiVector>);
    (Msix::new(vectors.collect()), counters)
}

fn program(msix: &Msix, index: u64, data: u32) {
    let entry = index * 16;
    msix.write_table(entry, &0xfee0_1000_u64.to_le_bytes());
    msix.write_table(entry + 8, &data.to_le_bytes());
    msix.write_table(entry + 12, &0_u32.to_le_bytes());
}

fn mask(msix: &Msix, index: u64, masked: bool) {
    msix.write_table(index * 16 + 12, &u32::from(masked).to_le_bytes());
}

fn pba(msix: &Msix) -> u64 {
    let mut data = [0; 8];
    msix.read_pba(0, &mut data);
    u64::from_le_bytes(data)
}

#[test]
fn a_masked_vector_waits_in_the_pending_bits_and_fires_once_when_unmasked() {
    let (msix, counters) = msix(3);
    msix.set_control(ON);
    program(&msix, 2, 0x41);
    mask(&msix, 2, true);
    msix.trigger(2);
    msix.trigger(2);
    assert_eq!((counters[2].fired(), pba(&msix)), (0, 0b100));
    mask(&msix, 2, false);
    assert_eq!((counters[2].fired(), pba(&msix)), (1, 0));
    msix.trigger(2);
    assert_eq!(counters[2].fired(), 2);
}

#[test]
fn the_function_mask_holds_back_every_vector() {
    let (msix, counters) = msix(2);
    msix.set_control(ON_MASKED);
    program(&msix, 0, 0x41);
    program(&msix, 1, 0x42);
    msix.trigger(0);
    msix.trigger(1);
    assert_eq!(pba(&msix), 0b11);
    msix.set_control(ON);
    assert_eq!(counters.iter().map(|c| c.fired()).sum::<u64>(), 2);
    assert_eq!(pba(&msix), 0);
}

#[test]
fn a_vector_is_routed_once_for_each_message_however_often_it_is_masked() {
    let (msix, counters) = msix(1);
    msix.set_control(ON);
    program(&msix, 0, 0x41);
    for _ in 0..5 {
        mask(&msix, 0, true);
        mask(&msix, 0, false);
    }
    mask(&msix, 0, true);
    program(&msix, 0, 0x51);
    let routes = counters[0].routes.lock().unwrap().clone();
    let message = |data| MsiMessage {
        address: 0xfee0_1000,
        data,
    };
    assert_eq!(routes, [message(0x41), message(0x51)]);
}

#[test]
fn a_vector_whose_route_is_refused_stays_pending_until_a_route_is_accepted() {
    let (msix, counters) = msix(1);
    counters[0].refuse.store(true, Ordering::SeqCst);
    msix.set_control(ON);
    program(&msix, 0, 0x41);
    msix.trigger(0);
    assert_eq!((counters[0].fired(), pba(&msix)), (0, 1));
    counters[0].refuse.store(false, Ordering::SeqCst);
    mask(&msix, 0, true);
    mask(&msix, 0, false);
    assert_eq!(counters[0].fired(), 1);
}

#[test]
fn disabling_msix_drops_what_was_pending() {
    let (msix, counters) = msix(1);
    msix.set_control(ON_MASKED);
    program(&msix, 0, 0x41);
    msix.trigger(0);
    msix.set_control(MessageControl::default());
    msix.set_control(ON);
    assert_eq!(counters[0].fired(), 0);
}

#[test]
fn table_reads_give_back_what_was_written_and_narrow_writes_are_ignored() {
    let (msix, _) = msix(2);
    program(&msix, 1, 0xdead_beef);
    msix.write_table(16, &[0xff]);
    msix.write_table(18, &[0xff; 4]);
    msix.write_table(1 << 40, &[0xff; 4]);
    let mut data = [0; 16];
    msix.read_table(16, &mut data);
    assert_eq!(data[..8], 0xfee0_1000_u64.to_le_bytes());
    assert_eq!(data[8..12], 0xdead_beef_u32.to_le_bytes());
    assert_eq!(data[12..], [0; 4]);
    msix.read_table(0, &mut data);
    assert_eq!(data[12..], 1_u32.to_le_bytes(), "masked at power-on");
}

#[test]
fn no_interrupt_is_lost_or_doubled_when_masking_races_with_triggering() {
    const ROUNDS: u64 = 20_000;
    let (msix, counters) = msix(1);
    msix.set_control(ON);
    program(&msix, 0, 0x41);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                mask(&msix, 0, true);
                mask(&msix, 0, false);
            }
        });
        for round in 0..ROUNDS {
            let before = counters[0].fired();
            msix.trigger(0);
            while counters[0].fired() == before {
                std::thread::yield_now();
            }
            assert_eq!(counters[0].fired(), round + 1);
        }
        done.store(true, Ordering::SeqCst);
    });
    assert_eq!(counters[0].fired(), ROUNDS);
}

#[test]
fn an_msix_table_survives_saving_with_its_pending_bits() {
    let (old, _) = msix(2);
    old.set_control(ON);
    program(&old, 0, 0x41);
    program(&old, 1, 0x42);
    mask(&old, 1, true);
    old.trigger(1);
    let text = serde_json::to_string(&old.save()).unwrap();
    let state: MsixState = serde_json::from_str(&text).unwrap();

    let (new, counters) = msix(2);
    new.restore(&state, ON).unwrap();
    assert_eq!(new.save(), state);
    new.trigger(0);
    mask(&new, 1, false);
    assert_eq!((counters[0].fired(), counters[1].fired()), (1, 1));
    let (smaller, _) = msix(1);
    assert!(smaller.restore(&state, ON).is_err());
}

/// Every bit that reads the same before and after writing zeros and ones everywhere is read-only.
fn read_only_bits(machine: &Machine, at: BusDeviceFunction) -> Vec<(u16, u8, u8)> {
    let read = |offset| {
        let mut byte = [0];
        machine.bus.config_read(at, offset, &mut byte);
        byte[0]
    };
    (0..256)
        .map(|offset| {
            let original = read(offset);
            machine.bus.config_write(at, offset, &[0]);
            let zeros = read(offset);
            machine.bus.config_write(at, offset, &[0xff]);
            let ones = read(offset);
            machine.bus.config_write(at, offset, &[original]);
            (offset, !(zeros ^ ones), original)
        })
        .collect()
}

proptest! {
    #[test]
    fn read_only_bits_never_change_whatever_is_written(
        accesses in prop::collection::vec((0_u16..4096, prop::collection::vec(any::<u8>(), 1..9)), 1..60),
        device in prop::sample::select(vec![0_u8, 1, 0x1f]),
    ) {
        let machine = machine();
        let function = Function::new(&[(0, BarKind::Memory64, 0x1_0000), (2, BarKind::Io, 0x20)]);
        machine.bus.add(slot(1), function).unwrap();
        let constant = read_only_bits(&machine, slot(device));
        for (offset, data) in &accesses {
            machine.bus.config_write(slot(device), *offset, data);
        }
        for (offset, mask, original) in constant {
            let mut byte = [0];
            machine.bus.config_read(slot(device), offset, &mut byte);
            prop_assert_eq!(byte[0] & mask, original & mask, "offset {:#x}", offset);
        }
    }
}
