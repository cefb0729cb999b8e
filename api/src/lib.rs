//! The definition of a VM and the HTTP interface to one, shared by the file, the API and the command line.
//!
//! | module | what | feature |
//! |---|---|---|
//! | [`definition`] | [`definition::VmConfig`]: strict, typed, JSON or YAML | — |
//! | [`types`] | bodies of requests and replies | — |
//! | `server` | HTTP/1.1 on a unix socket in front of a `VmService`; the OpenAPI document | `server` |
//! | `client` | the other end | `client` |
//! | `socket` | the file of a unix socket | `socket` |
//!
//! Nothing here knows a hypervisor: whoever owns the VM implements `server::VmService`.
#![forbid(unsafe_code)]

#[cfg(feature = "client")]
pub mod client;
pub mod definition;
pub mod disks;
#[cfg(feature = "server")]
pub mod server;
#[cfg(feature = "socket")]
pub mod socket;
pub mod types;
