//! Debian root file systems, made by mmdebstrap.

use std::path::Path;
use std::process::Command;

use super::cache::{Build, Cache, Key};
use crate::error::{Error, Result};
use crate::process;

/// What is left out of every root: nobody reads it there.
const EXCLUDED: [&str; 4] = [
    "/usr/share/man/*",
    "/usr/share/doc/*",
    "/usr/share/info/*",
    "/usr/share/locale/*",
];

/// One root: a release of Debian, how complete it is, and the packages it has.
pub(super) struct Root {
    /// The release.
    pub(super) suite: &'static str,
    /// mmdebstrap's variant: `extract` unpacks and configures nothing, `minbase` is the smallest that boots,
    /// `apt` the smallest that can install.
    pub(super) variant: &'static str,
    /// The packages asked for, with what they depend on.
    pub(super) packages: &'static [&'static str],
}

impl Root {
    /// The part of an artefact's key that this root is.
    pub(super) fn key(&self, recipe: &str) -> Key {
        let mut key = Key::new(recipe).with(self.suite).with(self.variant);
        for package in self.packages.iter().chain(&EXCLUDED) {
            key = key.with(package);
        }
        key
    }

    /// Makes the root in a folder. The mounts that its package scripts need live in a mount namespace of
    /// their own, so that a build that is killed leaves none behind.
    pub(super) fn make(&self, cache: &Cache, build: &Build<'_>, folder: &Path) -> Result<()> {
        let user = process::output(Command::new("id").arg("-u"))?;
        if user.trim() != "0" {
            return Err(Error::Other(
                "the lab's root file systems are built as root: run `cargo xtask setup` once as root".into(),
            ));
        }
        cache.say(&format!(
            "{}: mmdebstrap {}, {} packages and what they need",
            folder.file_name().unwrap_or_default().to_string_lossy(),
            self.suite,
            self.packages.len()
        ));
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--propagation", "private", "mmdebstrap"])
            .arg(format!("--variant={}", self.variant))
            .arg("--dpkgopt=force-unsafe-io")
            .args(EXCLUDED.map(|path| format!("--dpkgopt=path-exclude={path}")))
            .arg("--aptopt=Acquire::Retries \"3\"")
            .arg("--aptopt=Acquire::Languages \"none\"")
            .arg(format!("--include={}", self.packages.join(",")))
            .arg(self.suite)
            .arg(folder);
        process::run_logged(&mut command, build.log)
    }
}
