//! The firmware's flash in the guest's memory: code that is only read, and variables that a file keeps.
//!
//! ```text
//!  4 GiB - code - vars   variables   read-only slot while the chip shows its array, no slot while it takes commands
//!  4 GiB - code          code        read-only slot; writes go nowhere
//!  4 GiB                 ── end, with the reset vector 16 bytes below
//! ```

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use drover_devices::bus::{Bus, BusDevice};
use drover_devices::platform::pflash::{Flash, Store, Window};
use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;
use vm_memory::{Bytes, MmapRegion, VolatileMemory, VolatileSlice};

/// KVM's numbers for the two slots; RAM has those from 0 on.
const CODE_SLOT: u32 = 16;
const VARS_SLOT: u32 = 17;
/// Where the flash ends.
const END: u64 = 1 << 32;

/// Memory that the guest can read and only we can write.
struct Rom {
    memory: MmapRegion<()>,
    guest_address: u64,
    slot: u32,
    vm: Arc<VmFd>,
}

impl Rom {
    fn new(bytes: &[u8], guest_address: u64, slot: u32, vm: Arc<VmFd>) -> io::Result<Self> {
        let memory = MmapRegion::new(bytes.len()).map_err(io::Error::other)?;
        memory
            .as_volatile_slice()
            .write_slice(bytes, 0)
            .map_err(io::Error::other)?;
        Ok(Self {
            memory,
            guest_address,
            slot,
            vm,
        })
    }

    fn size(&self) -> u64 {
        self.memory.size() as u64
    }

    fn bytes(&self) -> VolatileSlice<'_> {
        self.memory.as_volatile_slice()
    }

    /// Gives the guest the memory, or takes it away; its accesses are exits then.
    #[expect(unsafe_code, reason = "a KVM memory slot is an address")]
    fn map(&self, mapped: bool) -> io::Result<()> {
        let region = kvm_userspace_memory_region {
            slot: self.slot,
            flags: KVM_MEM_READONLY,
            guest_phys_addr: self.guest_address,
            memory_size: if mapped { self.size() } else { 0 },
            userspace_addr: self.memory.as_ptr() as u64,
        };
        // SAFETY: the mapping is this value's, and no Rust reference points into it. Its owner is dropped after the vCPUs, so that KVM
        // never looks at it once it is gone.
        unsafe { self.vm.set_user_memory_region(region) }.map_err(Into::into)
    }
}

struct Shown(Arc<Rom>);

impl Window for Shown {
    fn as_memory(&mut self, memory: bool) -> io::Result<()> {
        self.0.map(memory)
    }
}

/// The variables: in memory for the guest, in the file for the next start.
struct Variables {
    rom: Arc<Rom>,
    file: File,
}

impl Store for Variables {
    fn len(&self) -> u64 {
        self.rom.size()
    }

    fn read(&self, at: u64, bytes: &mut [u8]) {
        // Callers stay inside.
        let _ = self.rom.bytes().read_slice(bytes, at as usize);
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, at)?;
        let memory = self.rom.bytes();
        memory
            .write_slice(bytes, at as usize)
            .map_err(io::Error::other)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// Writes to the code, which go nowhere.
struct ReadOnly;

impl BusDevice for ReadOnly {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

/// Both chips.
pub struct FirmwareFlash {
    _code: Rom,
    vars: Arc<Flash>,
}

impl FirmwareFlash {
    /// Puts `code` at the end of the first 4 GiB and the contents of `vars` (`file`) before it.
    ///
    /// # Errors
    /// The hypervisor refused, or a size is no multiple of a flash block.
    pub fn new(
        code: &[u8],
        vars: &[u8],
        file: File,
        vm: &Arc<VmFd>,
        mmio: &Bus,
    ) -> io::Result<Self> {
        let code_start = END - code.len() as u64;
        let vars_start = code_start - vars.len() as u64;
        let code = Rom::new(code, code_start, CODE_SLOT, vm.clone())?;
        code.map(true)?;
        let rom = Arc::new(Rom::new(vars, vars_start, VARS_SLOT, vm.clone())?);
        let store = Variables {
            rom: rom.clone(),
            file,
        };
        let flash = Flash::new(Box::new(store), Box::new(Shown(rom)))?;
        let insert = |start, length, device| {
            let inserted = mmio.insert(start, length, device);
            inserted.map_err(io::Error::other)
        };
        insert(code_start, code.size(), Arc::new(ReadOnly))?;
        insert(vars_start, vars.len() as u64, flash.clone())?;
        Ok(Self {
            _code: code,
            vars: flash,
        })
    }

    /// Returns both to their power-on state; the variables stay.
    ///
    /// # Errors
    /// The hypervisor refused.
    pub fn reset(&self) -> io::Result<()> {
        self.vars.reset()
    }
}
