//! KVM calls that take variable-sized structures, or that the kvm-ioctls crate does not have. All unsafe code of this module's parent
//! is here.

use std::ffi::c_ulong;
use std::mem::size_of;

use kvm_bindings::{
    KVM_CAP_SREGS2, KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, Xsave, kvm_device_attr, kvm_sregs2,
    kvm_xsave,
};
use kvm_ioctls::{Cap, Error, VcpuFd, VmFd};
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};

/// Request numbers (include/uapi/linux/kvm.h); the macros make a function of each, without a comment.
mod request {
    #![allow(missing_docs, unreachable_pub)]

    use kvm_bindings::{KVMIO, kvm_device_attr, kvm_sregs2};
    use vmm_sys_util::{ioctl_ior_nr, ioctl_iow_nr};

    ioctl_ior_nr!(KVM_GET_SREGS2, KVMIO, 0xcc, kvm_sregs2);
    ioctl_iow_nr!(KVM_SET_SREGS2, KVMIO, 0xcd, kvm_sregs2);
    ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
    ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xe2, kvm_device_attr);
    ioctl_iow_nr!(KVM_HAS_DEVICE_ATTR, KVMIO, 0xe3, kvm_device_attr);
}

use request::{
    KVM_GET_DEVICE_ATTR, KVM_GET_SREGS2, KVM_HAS_DEVICE_ATTR, KVM_SET_DEVICE_ATTR, KVM_SET_SREGS2,
};

fn check(result: i32) -> Result<(), Error> {
    if result == 0 {
        Ok(())
    } else {
        Err(Error::last())
    }
}

/// Whether the kernel has `KVM_GET_SREGS2`.
pub fn has_sregs2(vm: &VmFd) -> bool {
    vm.check_extension_raw(c_ulong::from(KVM_CAP_SREGS2)) > 0
}

/// `KVM_GET_SREGS2`.
///
/// # Errors
/// The kernel's.
pub fn get_sregs2(vcpu: &VcpuFd) -> Result<kvm_sregs2, Error> {
    let mut sregs = kvm_sregs2::default();
    // SAFETY: the kernel writes one kvm_sregs2, whose size is part of the request's number.
    check(unsafe { ioctl_with_mut_ref(vcpu, KVM_GET_SREGS2(), &mut sregs) })?;
    Ok(sregs)
}

/// `KVM_SET_SREGS2`.
///
/// # Errors
/// The kernel's.
pub fn set_sregs2(vcpu: &VcpuFd, sregs: &kvm_sregs2) -> Result<(), Error> {
    // SAFETY: the kernel reads one kvm_sregs2, whose size is part of the request's number.
    check(unsafe { ioctl_with_ref(vcpu, KVM_SET_SREGS2(), sregs) })
}

fn tsc_offset_attribute(value: &mut u64) -> kvm_device_attr {
    kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr: std::ptr::from_mut(value) as u64,
        flags: 0,
    }
}

/// The vCPU's TSC minus the host's; none where the kernel (before 5.16) does not tell.
///
/// # Errors
/// The kernel's.
pub fn get_tsc_offset(vcpu: &VcpuFd) -> Result<Option<u64>, Error> {
    let mut offset = 0;
    let attribute = tsc_offset_attribute(&mut offset);
    // SAFETY: the kernel reads one kvm_device_attr and nothing else.
    if check(unsafe { ioctl_with_ref(vcpu, KVM_HAS_DEVICE_ATTR(), &attribute) }).is_err() {
        return Ok(None);
    }
    // SAFETY: the attribute points at a u64 that outlives the call, which is what the kernel writes for this attribute.
    check(unsafe { ioctl_with_ref(vcpu, KVM_GET_DEVICE_ATTR(), &attribute) })?;
    Ok(Some(offset))
}

/// Sets what [`get_tsc_offset`] tells.
///
/// # Errors
/// The kernel's.
pub fn set_tsc_offset(vcpu: &VcpuFd, mut offset: u64) -> Result<(), Error> {
    let attribute = tsc_offset_attribute(&mut offset);
    // SAFETY: the attribute points at a u64 that outlives the call, which is what the kernel reads for this attribute.
    check(unsafe { ioctl_with_ref(vcpu, KVM_SET_DEVICE_ATTR(), &attribute) })
}

/// Bytes of XSAVE state of this VM's vCPUs: 4096, or more with features such as AMX.
pub fn xsave_size(vm: &VmFd) -> usize {
    usize::try_from(vm.check_extension_int(Cap::Xsave2))
        .unwrap_or(0)
        .max(size_of::<kvm_xsave>())
}

fn xsave_buffer(vm: &VmFd) -> Result<Xsave, Error> {
    let extra = (xsave_size(vm) - size_of::<kvm_xsave>()).div_ceil(size_of::<u32>());
    Xsave::new(extra).map_err(|_| Error::new(libc::ENOMEM))
}

/// XSAVE state in the processor's standard format, [`xsave_size`] bytes.
///
/// # Errors
/// The kernel's.
pub fn get_xsave(vm: &VmFd, vcpu: &VcpuFd) -> Result<Vec<u8>, Error> {
    let mut buffer = xsave_buffer(vm)?;
    if vm.check_extension(Cap::Xsave2) {
        // SAFETY: the buffer has the size that the kernel asks for, and no feature is enabled dynamically after that.
        unsafe { vcpu.get_xsave2(&mut buffer) }?;
    } else {
        // SAFETY: only the fixed part is replaced; the length of the flexible one stays.
        unsafe { buffer.as_mut_fam_struct() }.xsave.region = vcpu.get_xsave()?.region;
    }
    let words = buffer
        .as_fam_struct_ref()
        .xsave
        .region
        .iter()
        .chain(buffer.as_slice());
    Ok(words.flat_map(|word| word.to_le_bytes()).collect())
}

/// Sets what [`get_xsave`] tells; `state` must not be longer than [`xsave_size`], what it lacks is zero.
///
/// # Errors
/// The kernel's; E2BIG for a state that does not fit.
pub fn set_xsave(vm: &VmFd, vcpu: &VcpuFd, state: &[u8]) -> Result<(), Error> {
    let mut buffer = xsave_buffer(vm)?;
    let (words, rest) = state.as_chunks::<4>();
    let fixed = buffer.as_fam_struct_ref().xsave.region.len();
    if !rest.is_empty() || words.len() > fixed + buffer.as_slice().len() {
        return Err(Error::new(libc::E2BIG));
    }
    let mut words = words.iter().map(|word| u32::from_le_bytes(*word));
    // SAFETY: only the fixed part is filled; the length of the flexible one stays.
    let region = unsafe { &mut buffer.as_mut_fam_struct().xsave.region };
    for (slot, word) in region.iter_mut().zip(&mut words) {
        *slot = word;
    }
    for (slot, word) in buffer.as_mut_slice().iter_mut().zip(words) {
        *slot = word;
    }
    // SAFETY: the buffer has the size that the kernel asks for, and no feature is enabled dynamically after that.
    unsafe { vcpu.set_xsave2(&buffer) }
}
