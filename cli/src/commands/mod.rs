//! One module a command.

pub(crate) mod console;
pub(crate) mod doctor;
pub(crate) mod image;
pub(crate) mod image_export;
pub(crate) mod image_jobs;
pub(crate) mod run;
pub(crate) mod worker;
