//! The virtual machine monitor: one process, one VM, one owner.
//!
//! | module | what |
//! |---|---|
//! | [`control`] | the control thread: event loop, lifecycle, the one owner of the machine |
//! | [`lifecycle`] | the table of states and inputs |
//! | [`mailbox`], [`service`] | how the API reaches the control thread |
//! | [`machine`] | everything that a VM consists of; built, run, reset |
//! | [`memory`] | the guest's RAM |
//! | [`kvm`] | the VM's descriptors, interrupts, doorbells |
//! | [`kvm_state`] | everything that KVM keeps of a VM, as plain data, and the order of restoring it |
//! | [`vcpu`] | processors: threads, exits, pause and reset |
//! | [`boot`] | direct kernel boot |
//! | [`firmware`], [`flash`] | boot through stock firmware; its flash in the guest's memory |
//! | [`console`] | the serial console on the control thread |
//! | [`metrics`] | what is counted, in the Prometheus text format |
//! | [`threads`] | threads by role and their seccomp policies |
//! | [`process`] | signals, allocator, terminal |
//!
//! Invariants: only the control thread touches the [`machine::Machine`]; no data of the guest's disks and networks passes it; unsafe code
//! is in [`flash`], [`memory`], [`process`], [`vcpu::run_page`] and [`kvm_state::raw`] alone.

pub mod boot;
pub mod console;
pub mod control;
pub mod firmware;
pub mod flash;
pub mod kvm;
pub mod kvm_state;
pub mod lifecycle;
pub mod machine;
pub mod mailbox;
pub mod memory;
pub mod metrics;
pub mod process;
pub mod service;
pub mod threads;
pub mod vcpu;

#[cfg(test)]
mod testing;
