//! Device models of the Drover machine.
//!
//! | module | what | specification |
//! |---|---|---|
//! | [`bus`] | port and MMIO address spaces, dispatch of vCPU exits | — |
//! | [`interrupt`] | what a device needs to interrupt the guest | — |
//! | [`pci`] | host bridge, configuration space, MSI-X | PCI Local Bus 3.0, PCI Express Base 4.0 |
//! | [`virtio`] | virtio-pci transport and the devices on it | virtio 1.2 |
//! | [`platform`] | serial port, RTC, power management, reset | ICH9 data sheet, ACPI 6.5 |
//! | [`vhost_user`] | disks served to other VMMs | vhost-user protocol of QEMU |
//! | [`termination`] | the signals that end a process, as a descriptor | — |
//! | [`seldom`] | log lines that a guest can cause, and cannot flood the log with | — |
//!
//! Nothing here knows KVM, HTTP or the definition of a VM: the VMM hands every device the traits it needs
//! ([`interrupt::InterruptController`], [`bus::Doorbells`], [`thread::Threads`]), so that each can be tested without a VM.

pub mod bus;
pub mod interrupt;
pub mod pci;
pub mod platform;
pub mod seldom;
pub mod termination;
pub mod thread;
pub mod vhost_user;
pub mod virtio;

/// The guest's RAM as every device sees it: cheap to clone, kept mapped while any clone lives.
pub type GuestMemory = std::sync::Arc<vm_memory::GuestMemoryMmap<()>>;
