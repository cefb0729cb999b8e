//! Shared by the tests of this crate.

/// Whether guests can be run here; says so on the terminal where not, so that a skipped test is visible.
pub(crate) fn kvm_or_skip() -> bool {
    let usable = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_ok();
    if !usable {
        eprintln!("skipped: no usable /dev/kvm");
    }
    usable
}
