//! PCI: configuration space, the host bridge, ECAM and MSI-X.
