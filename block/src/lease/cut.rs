//! Fails at a step that a test chooses, as a power cut would; never outside of tests.

#[cfg(test)]
thread_local!(
    /// So many steps go well.
    pub(super) static STEPS_LEFT: std::cell::Cell<Option<u32>> = const { std::cell::Cell::new(None) }
);

/// Called before or after each step that leaves something on the disk.
#[cfg(test)]
pub(super) fn step() -> rustix::io::Result<()> {
    match STEPS_LEFT.get() {
        Some(0) => Err(rustix::io::Errno::IO),
        Some(left) => {
            STEPS_LEFT.set(Some(left - 1));
            Ok(())
        }
        None => Ok(()),
    }
}

#[cfg(not(test))]
#[expect(clippy::unnecessary_wraps, reason = "it fails in tests")]
pub(super) fn step() -> rustix::io::Result<()> {
    Ok(())
}
