//! One module a command.

pub(crate) mod console;
pub(crate) mod disk;
pub(crate) mod doctor;
pub(crate) mod image;
pub(crate) mod image_bench;
pub(crate) mod image_chain;
pub(crate) mod image_check;
pub(crate) mod image_export;
pub(crate) mod image_import;
pub(crate) mod image_jobs;
pub(crate) mod image_lease;
pub(crate) mod run;
pub(crate) mod worker;
