//! Doorbells: a guest write at an address signals an event descriptor without leaving the kernel (KVM_IOEVENTFD).

use std::io;
use std::sync::Arc;

use drover_devices::bus::Doorbells;
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::EventFd;

/// [`Doorbells`] over KVM. Length 0 matches every width and lets KVM skip decoding the instruction where the processor tells the address.
pub struct KvmDoorbells {
    vm: Arc<VmFd>,
}

impl KvmDoorbells {
    /// Doorbells of `vm`.
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self { vm }
    }
}

impl Doorbells for KvmDoorbells {
    fn attach(&self, address: u64, event: &EventFd) -> io::Result<()> {
        let address = IoEventAddress::Mmio(address);
        Ok(self.vm.register_ioevent(event, &address, NoDatamatch)?)
    }

    fn detach(&self, address: u64, event: &EventFd) -> io::Result<()> {
        let address = IoEventAddress::Mmio(address);
        Ok(self.vm.unregister_ioevent(event, &address, NoDatamatch)?)
    }
}
