//! The definition of a VM and the HTTP interface to one, shared by the file, the API and the command line.
//!
//! | module | what | features |
//! |---|---|---|
//! | [`definition`] | [`definition::VmConfig`]: strict, typed, JSON or YAML | — |
#![forbid(unsafe_code)]

pub mod definition;
