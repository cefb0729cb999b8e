//! Calling `drover-lab` with all it needs: the lab made ready, the programs built, a folder for the run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{Error, Result};
use crate::{programs, setup};

/// How many runs' consoles and logs are kept.
const KEPT_RUNS: usize = 8;

/// A ready lab with a folder for one run.
pub(crate) struct Session {
    lab: setup::Lab,
    programs: PathBuf,
    /// What the run leaves.
    pub(crate) folder: PathBuf,
}

impl Session {
    /// Makes everything ready; `built` names a folder of programs that are to be tested as they are.
    pub(crate) fn open(built: Option<&Path>) -> Result<Self> {
        let lab = setup::run()?;
        let programs = match built {
            Some(folder) => folder.canonicalize().map_err(Error::io("open", folder))?,
            None => programs::build()?,
        };
        let runs = programs::target_folder()?.join("lab");
        let folder = new_folder(&runs)?;
        Ok(Self {
            lab,
            programs,
            folder,
        })
    }

    /// A program under test.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.programs.join(name)
    }

    /// `drover-lab TASK` with the places; the rest of the command line is the caller's.
    pub(crate) fn command(&self, task: &[&str]) -> Command {
        let mut command = Command::new(self.programs.join("drover-lab"));
        command
            .args(task)
            .arg("--lab")
            .arg(&self.lab.manifest)
            .arg("--folder")
            .arg(&self.folder)
            .arg("--programs")
            .arg(&self.programs)
            .env("PATH", path_with(&self.lab.tools));
        command
    }
}

/// `PATH` with QEMU's tools in front.
pub(crate) fn path_with(tools: &Path) -> std::ffi::OsString {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(tools.to_owned()).chain(std::env::split_paths(&path));
    std::env::join_paths(folders).unwrap_or(path)
}

/// A new folder for a run; the oldest runs go.
fn new_folder(runs: &Path) -> Result<PathBuf> {
    fs::create_dir_all(runs).map_err(Error::io("create", runs))?;
    let mut old: Vec<PathBuf> = fs::read_dir(runs)
        .map_err(Error::io("list", runs))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    old.sort();
    for folder in old.iter().rev().skip(KEPT_RUNS - 1) {
        fs::remove_dir_all(folder).map_err(Error::io("remove the old run", folder))?;
    }
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let folder = runs.join(format!("{seconds}-{}", std::process::id()));
    fs::create_dir(&folder).map_err(Error::io("create", &folder))?;
    Ok(folder)
}
