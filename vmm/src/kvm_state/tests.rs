//! Tiny real-mode guests on /dev/kvm: a few bytes of code that count, are saved, and go on counting in another VM.

use drover_arch::cpuid::CpuidPolicy;
use drover_arch::topology::Topology;
use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, kvm_msr_entry, kvm_pit_config, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::vm::{Clock, ClockReference};
use super::*;
use crate::testing::kvm_or_skip;

const RAM: usize = 64 << 10;
const CODE: u64 = 0x1000;
const COUNTER: u64 = 0x2000;
const PORT: u16 = 0x10;
/// Offset of XMM3 in the XSAVE area.
const XMM3: usize = 160 + 3 * 16;
/// `next: inc word [0x2000]; inc ax; out 0x10, ax; jmp next`
const COUNT: [u8; 9] = [0xFF, 0x06, 0x00, 0x20, 0x40, 0xE7, 0x10, 0xEB, 0xF7];

/// A VM with vCPUs in real mode at [`CODE`].
struct Guest {
    // Dropped in this order: nothing runs any more when the memory goes.
    vcpus: Vec<VcpuFd>,
    vm: VmFd,
    memory: GuestMemoryMmap<()>,
    msr_indices: Vec<u32>,
}

impl Guest {
    fn new(code: &[u8], vcpus: u32) -> Self {
        let kvm = Kvm::new().unwrap();
        let vm = kvm.create_vm().unwrap();
        vm.set_identity_map_address(drover_arch::layout::KVM_IDENTITY_MAP)
            .unwrap();
        vm.set_tss_address(drover_arch::layout::KVM_TSS as usize)
            .unwrap();
        vm.create_irq_chip().unwrap();
        vm.create_pit2(kvm_pit_config::default()).unwrap();
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RAM)]).unwrap();
        let region = kvm_userspace_memory_region {
            memory_size: RAM as u64,
            userspace_addr: memory.get_host_address(GuestAddress(0)).unwrap() as u64,
            ..Default::default()
        };
        // SAFETY: the memory is mapped for as long as the VM lives, see the order of fields.
        unsafe { vm.set_user_memory_region(region) }.unwrap();
        memory.write_slice(code, GuestAddress(CODE)).unwrap();

        let topology = Topology::flat(vcpus).unwrap();
        let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        let policy = CpuidPolicy::host(supported.as_slice(), topology, None).unwrap();
        let vcpus = (0..vcpus)
            .map(|index| {
                let vcpu = vm.create_vcpu(u64::from(topology.apic_id(index))).unwrap();
                let leaves = policy.for_vcpu(index);
                vcpu.set_cpuid2(&CpuId::from_entries(&leaves).unwrap())
                    .unwrap();
                let mut sregs = vcpu.get_sregs().unwrap();
                (sregs.cs.base, sregs.cs.selector) = (0, 0);
                vcpu.set_sregs(&sregs).unwrap();
                let mut regs = vcpu.get_regs().unwrap();
                (regs.rip, regs.rflags) = (CODE, 2);
                vcpu.set_regs(&regs).unwrap();
                vcpu
            })
            .collect();
        let msr_indices = kvm.get_msr_index_list().unwrap().as_slice().to_vec();
        Self {
            vcpus,
            vm,
            memory,
            msr_indices,
        }
    }

    /// Runs the first vCPU to its next write to [`PORT`], and completes that instruction.
    fn next_output(&mut self) -> u16 {
        let output = loop {
            match self.vcpus[0].run().unwrap() {
                VcpuExit::IoOut(PORT, data) => break u16::from_le_bytes(data.try_into().unwrap()),
                VcpuExit::Intr => {}
                other => panic!("{other:?}"),
            }
        };
        self.vcpus[0].set_kvm_immediate_exit(1);
        assert_eq!(self.vcpus[0].run().unwrap_err().errno(), libc::EINTR);
        self.vcpus[0].set_kvm_immediate_exit(0);
        output
    }

    fn save(&self) -> KvmState {
        KvmState::save(&self.vm, &self.vcpus, &self.msr_indices).unwrap()
    }

    /// A new VM with this one's memory and `state`.
    fn restored(&self, state: &KvmState) -> Self {
        let guest = Self::new(&[], self.vcpus.len() as u32);
        let mut memory = vec![0; RAM];
        self.memory
            .read_slice(&mut memory, GuestAddress(0))
            .unwrap();
        guest.memory.write_slice(&memory, GuestAddress(0)).unwrap();
        state
            .restore(&guest.vm, &guest.vcpus, TimeInGuest::Stopped)
            .unwrap();
        for vcpu in &guest.vcpus {
            vcpu::mark_paused(vcpu).unwrap();
        }
        guest
    }

    fn counter(&self) -> u16 {
        self.memory.read_obj(GuestAddress(COUNTER)).unwrap()
    }
}

/// What time does not change.
fn without_time(mut state: KvmState) -> KvmState {
    state.vm.clock = Clock {
        clock: 0,
        tsc_stable: false,
        realtime: None,
        host_tsc: None,
    };
    for channel in &mut state.vm.pit.channels {
        channel.count_load_time = 0;
    }
    for vcpu in &mut state.vcpus {
        (vcpu.tsc, vcpu.tsc_offset) = (None, None);
    }
    state
}

#[test]
fn a_counting_guest_goes_on_counting_in_another_vm() {
    if !kvm_or_skip() {
        return;
    }
    let mut guest = Guest::new(&COUNT, 1);
    for expected in 1..=5 {
        assert_eq!(guest.next_output(), expected);
    }
    let state = guest.save();
    let mut restored = guest.restored(&state);
    drop(guest);
    assert_eq!(restored.counter(), 5);
    for expected in 6..=9 {
        assert_eq!(restored.next_output(), expected);
        assert_eq!(restored.counter(), expected);
    }
}

#[test]
fn a_guest_survives_serialisation() {
    if !kvm_or_skip() {
        return;
    }
    let mut guest = Guest::new(&COUNT, 1);
    assert_eq!(guest.next_output(), 1);
    let state = guest.save();
    let text = serde_json::to_string(&state).unwrap();
    let read: KvmState = serde_json::from_str(&text).unwrap();
    assert_eq!(read, state);
    let mut restored = guest.restored(&read);
    assert_eq!(restored.next_output(), 2);
}

#[test]
fn every_piece_of_two_vcpus_arrives_in_the_other_vm() {
    if !kvm_or_skip() {
        return;
    }
    let guest = Guest::new(&COUNT, 2);
    for (index, vcpu) in guest.vcpus.iter().enumerate() {
        let mark = 0x11 * (index as u8 + 1);
        let mut regs = vcpu.get_regs().unwrap();
        (regs.rbx, regs.r15) = (u64::from(mark) << 32, u64::from(mark));
        vcpu.set_regs(&regs).unwrap();
        let mut sregs = vcpu.get_sregs().unwrap();
        (sregs.cr2, sregs.ds.base) = (u64::from(mark) << 12, u64::from(mark) << 4);
        vcpu.set_sregs(&sregs).unwrap();
        let mut xsave = raw::get_xsave(&guest.vm, vcpu).unwrap();
        // XMM3, and the header's word that says that x87 and SSE state is not the initial one (Intel SDM 1 §13.4).
        xsave[XMM3..XMM3 + 16].fill(mark);
        xsave[512] |= 3;
        raw::set_xsave(&guest.vm, vcpu, &xsave).unwrap();
        let mut debug = vcpu.get_debug_regs().unwrap();
        debug.db[1] = u64::from(mark) << 8;
        vcpu.set_debug_regs(&debug).unwrap();
        let mut lapic = vcpu.get_lapic().unwrap();
        // Task priority.
        lapic.regs[0x80] = 0x20;
        vcpu.set_lapic(&lapic).unwrap();
        // IA32_SYSENTER_EIP and IA32_KERNEL_GS_BASE.
        for index in [0x176, 0xC000_0102] {
            let entry = kvm_msr_entry {
                index,
                data: u64::from(mark) << 16,
                ..Default::default()
            };
            let msrs = kvm_bindings::Msrs::from_entries(&[entry]).unwrap();
            assert_eq!(vcpu.set_msrs(&msrs).unwrap(), 1);
        }
    }
    guest.vm.set_irq_line(4, true).unwrap();

    let state = guest.save();
    for (index, vcpu) in state.vcpus.iter().enumerate() {
        let mark = 0x11 * (index as u64 + 1);
        assert_eq!(vcpu.registers.r15, mark);
        assert_eq!(vcpu.special.to_sregs().cr2, mark << 12);
        assert_eq!(vcpu.debug.db[1], mark << 8);
        assert_eq!(vcpu.xsave[XMM3], mark as u8);
        assert_eq!(vcpu.lapic[0x80], 0x20);
        assert!(vcpu.msrs.contains(&msrs::Msr {
            index: 0x176,
            data: mark << 16
        }));
    }
    let restored = guest.restored(&state);
    assert_eq!(without_time(restored.save()), without_time(state));
}

#[test]
fn the_clock_stands_still_between_save_and_restore_or_advances_as_asked() {
    if !kvm_or_skip() {
        return;
    }
    let guest = Guest::new(&COUNT, 1);
    let state = guest.save();
    std::thread::sleep(std::time::Duration::from_secs(1));
    let clock_after = |time| {
        let other = Guest::new(&COUNT, 1);
        state.restore(&other.vm, &other.vcpus, time).unwrap();
        let now = other.save();
        now.vm.clock.clock - state.vm.clock.clock
    };
    let stopped = clock_after(TimeInGuest::Stopped);
    assert!(stopped < 900_000_000, "{stopped} ns passed");
    let elapsed = clock_after(TimeInGuest::Elapses);
    if state.vm.clock.realtime.is_some() {
        assert!(elapsed >= 1_000_000_000, "only {elapsed} ns passed");
    } else {
        println!("skipped: this kernel's clock does not know the real time");
    }
}

#[test]
fn what_a_host_refuses_is_found_by_probing() {
    if !kvm_or_skip() {
        return;
    }
    let guest = Guest::new(&COUNT, 1);
    let refused = msrs::probe_refused(&guest.vcpus[0], &guest.msr_indices).unwrap();
    println!("refused by this host: {refused:x?}");
    assert!(
        !refused.contains(&0x176),
        "IA32_SYSENTER_EIP can be set everywhere"
    );
    let read = msrs::read(&guest.vcpus[0], &guest.msr_indices).unwrap();
    assert!(read.len() > 10);
    msrs::write(&guest.vcpus[0], &read).unwrap();
}

#[test]
fn a_register_that_does_not_exist_is_named() {
    if !kvm_or_skip() {
        return;
    }
    let guest = Guest::new(&COUNT, 1);
    let unknown = msrs::Msr {
        index: 0xDEAD_0000,
        data: 1,
    };
    // Beside a good one before and behind, which arrive.
    let good = |index| msrs::Msr {
        index,
        data: 0x1234,
    };
    let error = msrs::write(&guest.vcpus[0], &[good(0x175), unknown, good(0x176)]).unwrap_err();
    let StateError::Msrs(refused) = &error else {
        panic!("{error}")
    };
    assert_eq!((refused.len(), refused[0].index), (1, 0xDEAD_0000));
    assert!(
        error.to_string().contains("MSR 0xdead0000 = 0x1"),
        "{error}"
    );
    let written = msrs::read(&guest.vcpus[0], &[0x175, 0xDEAD_0000, 0x176]).unwrap();
    assert_eq!(written, [good(0x175), good(0x176)]);
}

#[test]
fn damaged_state_is_refused_before_anything_changes() {
    if !kvm_or_skip() {
        return;
    }
    let guest = Guest::new(&COUNT, 1);
    let state = guest.save();
    let before = without_time(guest.save());
    let refusal = |change: fn(&mut KvmState)| {
        let mut damaged = state.clone();
        change(&mut damaged);
        damaged
            .vcpus
            .iter_mut()
            .for_each(|vcpu| vcpu.registers.rax = 99);
        damaged
            .restore(&guest.vm, &guest.vcpus, TimeInGuest::Stopped)
            .unwrap_err()
            .to_string()
    };
    assert!(refusal(|state| state.version = 9).contains("version 9"));
    assert!(refusal(|state| state.vcpus[0].lapic.truncate(7)).contains("local APIC: has 7 bytes"));
    assert!(refusal(|state| state.vcpus[0].xsave.truncate(4095)).contains("XSAVE"));
    assert!(refusal(|state| state.vcpus[0].xsave.resize(32 << 10, 0)).contains("this host takes"));
    assert!(refusal(|state| state.vcpus[0].cpuid.clear()).contains("CPUID"));
    assert!(refusal(|state| state.vcpus.clear()).contains("0 saved, the VM has 1"));
    assert_eq!(without_time(guest.save()), before);
}

#[test]
fn the_orders_name_every_piece_once() {
    let (mut saved, mut restored) = (vcpu::SAVE_ORDER.to_vec(), vcpu::RESTORE_ORDER.to_vec());
    saved.sort_by_key(|part| *part as u8);
    restored.sort_by_key(|part| *part as u8);
    assert_eq!(saved, restored);
    saved.dedup();
    assert_eq!(saved.len(), vcpu::SAVE_ORDER.len());
    let before = |first, second| {
        let place = |part| vcpu::RESTORE_ORDER.iter().position(|other| *other == part);
        assert!(
            place(first) < place(second),
            "{first:?} must come before {second:?}"
        );
    };
    use vcpu::Part;
    before(Part::Cpuid, Part::Msrs);
    before(Part::Special, Part::Lapic);
    before(Part::Lapic, Part::TscDeadline);
    before(Part::TscOffset, Part::TscDeadline);
    before(Part::Registers, Part::Events);
}

#[test]
fn a_tsc_advances_exactly_as_the_guests_clock_did() {
    // Host TSC 1000 before, 9000 now on another host; 2 us of guest time at 1 GHz are 2000 ticks.
    let reference = ClockReference {
        guest_before: 5_000,
        host_tsc_before: 1_000,
        guest_now: 7_000,
        host_tsc_now: 9_000,
    };
    let saved_offset = 500_u64;
    let offset = reference.tsc_offset(saved_offset, 1_000_000);
    assert_eq!(9_000_u64.wrapping_add(offset), 1_000 + saved_offset + 2_000);
    // A guest younger than its host has a negative offset.
    let negative = reference.tsc_offset(900_u64.wrapping_neg(), 1_000_000);
    assert_eq!(9_000_u64.wrapping_add(negative), 100 + 2_000);
}
