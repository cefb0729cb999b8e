//! The stories: each is a function that tells what a user does and asserts what they would notice.

pub mod bad_input;
pub mod boot;
pub mod disk;
pub mod fio;
pub mod held;
pub mod lab;
pub mod lifecycle;
pub mod live_disk;
pub mod net;
pub mod shared_base;
pub mod vhost_user;
pub mod worker;

use std::path::PathBuf;
use std::time::Duration;

use crate::failure::Result;
use crate::site::Site;

/// Where a story takes place.
#[derive(Clone, Debug)]
pub struct Scene {
    /// The lab's folders.
    pub site: Site,
    /// The story's own folder, empty at its start and removed at its end.
    pub folder: PathBuf,
}

/// One story.
#[derive(Debug)]
pub struct Story {
    /// The file it is in.
    pub group: &'static str,
    /// What it tells, as a sentence without spaces.
    pub name: &'static str,
    /// After this it is ended and has failed.
    pub timeout: Duration,
    /// What it is expected to take: how stories are spread over hosts.
    pub expected: Duration,
    /// RAM that its guests need together, in MiB.
    pub memory_mib: u32,
    /// Told only where time does not matter: by name, or in the long run.
    pub only_long: bool,
    /// The story itself.
    pub run: fn(&Scene) -> Result,
}

impl Story {
    /// A story of a small guest: half a minute, three at most.
    #[must_use]
    pub const fn small(group: &'static str, name: &'static str, run: fn(&Scene) -> Result) -> Self {
        Self {
            group,
            name,
            timeout: Duration::from_secs(180),
            expected: Duration::from_secs(25),
            memory_mib: 512,
            only_long: false,
            run,
        }
    }

    /// The same story with another expected and longest time, in seconds.
    #[must_use]
    pub const fn seconds(mut self, expected: u64, timeout: u64) -> Self {
        self.expected = Duration::from_secs(expected);
        self.timeout = Duration::from_secs(timeout);
        self
    }

    /// The same story with guests of this much RAM together.
    #[must_use]
    pub const fn memory(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// The same story, left to the long run.
    #[must_use]
    pub const fn only_long(mut self) -> Self {
        self.only_long = true;
        self
    }

    /// `group::name`.
    #[must_use]
    pub fn full_name(&self) -> String {
        format!("{}::{}", self.group, self.name)
    }
}

/// All stories.
pub fn all() -> impl Iterator<Item = &'static Story> {
    [
        lab::STORIES,
        boot::STORIES,
        lifecycle::STORIES,
        disk::STORIES,
        fio::STORIES,
        live_disk::STORIES,
        held::STORIES,
        shared_base::STORIES,
        net::STORIES,
        vhost_user::STORIES,
        worker::STORIES,
        bad_input::STORIES,
    ]
    .into_iter()
    .flatten()
}
