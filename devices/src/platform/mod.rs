//! The chipset's small devices.
