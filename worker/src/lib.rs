//! From one worker definition to a joined node, and gone again without a trace.
//!
//! | module | what |
//! |---|---|
//! | [`definition`] | `worker.yaml`: types and checks that need no host |
//! | [`seed`] | the NoCloud seed: user-data, meta-data, network-config, ISO 9660 |
//! | `plan` | definition + host -> everything known before anything is made |
//! | `provision` | overlay and seed, durably or not at all |
//! | `create`, `delete`, `view` | what the command line does |
//! | `vmm`, `process`, `netlink` | the VMM's process and the host's network |
//! | [`milestone`] | how a guest's progress is seen |
#![deny(unsafe_code)]

mod create;
pub mod definition;
mod delete;
mod detach;
mod error;
mod identity;
mod join;
pub mod milestone;
mod netlink;
mod plan;
mod process;
mod provision;
pub mod secret;
pub mod seed;
mod state;
mod timeline;
mod view;
mod vmm;
mod yaml;

pub use create::{Created, Goal, create, restart};
pub use delete::{Deleted, End, delete};
pub use error::Error;
pub use identity::Identity;
pub use plan::{Definition, Plan, format, remember_vm};
pub use state::{Record, StateDir, WorkerDir};
pub use timeline::{Observer, Reached, Step};
pub use view::{Status, View, list, show};
pub use vmm::locate as locate_vmm;
