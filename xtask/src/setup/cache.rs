//! The cache of built things, outside the source tree.
//!
//! ```text
//! $DROVER_CACHE (or $XDG_CACHE_HOME/drover, ~/.cache/drover)
//!   l1-root-6f2c…/          one artefact: the name and the key of its inputs
//!   .l1-root-6f2c….lock     held while it is built
//!   .l1-root-6f2c….partial/ being built; renamed when complete, removed by the next build
//!   logs/l1-root.log        what the programs of its last build printed
//! ```
//!
//! A key is a hash of the recipe's text. Package *versions* are no part of it: a cached artefact stays
//! until its recipe changes or the folder is removed.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// How long the artefact of an older recipe is kept after its last use: other checkouts may still want it.
const KEPT: Duration = Duration::from_secs(3 * 24 * 3600);

/// The inputs of an artefact, hashed in the order given.
#[derive(Clone)]
pub(crate) struct Key(Sha256);

impl Key {
    /// Starts a key with the artefact's own recipe.
    pub(crate) fn new(recipe: &str) -> Self {
        Self(Sha256::new()).with(recipe)
    }

    /// Adds one more input; lengths are hashed too, so that two inputs never run together.
    pub(crate) fn with(mut self, input: &str) -> Self {
        self.0.update(input.len().to_le_bytes());
        self.0.update(input.as_bytes());
        self
    }

    fn text(&self) -> String {
        let digest = self.0.clone().finalize();
        digest[..6]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

/// The cache folder.
pub(crate) struct Cache {
    folder: PathBuf,
    started: Instant,
}

/// One artefact while it is built.
pub(crate) struct Build<'a> {
    /// An empty folder: what is in it at the end is the artefact.
    pub(crate) folder: &'a Path,
    /// Where the programs of the build print.
    pub(crate) log: &'a Path,
}

impl Cache {
    /// Opens (and makes) the cache folder.
    pub(crate) fn open() -> Result<Self> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let folder = variable("DROVER_CACHE")
            .map(PathBuf::from)
            .or_else(|| variable("XDG_CACHE_HOME").map(|base| Path::new(&base).join("drover")))
            .or_else(|| variable("HOME").map(|home| Path::new(&home).join(".cache/drover")))
            .ok_or_else(|| {
                Error::Other("set DROVER_CACHE or HOME: where to keep what is built".into())
            })?;
        let logs = folder.join("logs");
        fs::create_dir_all(&logs).map_err(Error::io("create the cache", &logs))?;
        let folder = folder
            .canonicalize()
            .map_err(Error::io("open the cache", &folder))?;
        Ok(Self {
            folder,
            started: Instant::now(),
        })
    }

    /// The folder itself.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Prints a progress line with the time since the start.
    pub(crate) fn say(&self, text: &str) {
        eprintln!("[{:6.1} s] {text}", self.started.elapsed().as_secs_f64());
    }

    /// The folder of an artefact, whether it is there or not.
    pub(crate) fn path(&self, name: &str, key: &Key) -> PathBuf {
        self.folder.join(format!("{name}-{}", key.text()))
    }

    /// Removes what earlier recipes of an artefact left, once nobody has asked for it in [`KEPT`].
    fn remove_forgotten(&self, name: &str, current: &Path) -> Result<()> {
        let entries = fs::read_dir(&self.folder).map_err(Error::io("list", &self.folder))?;
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            let key = path
                .file_name()
                .and_then(|file| file.to_str()?.strip_prefix(name)?.strip_prefix('-'));
            let is_key = key.is_some_and(|key| {
                key.len() == 12 && key.bytes().all(|byte| byte.is_ascii_hexdigit())
            });
            let age = path
                .metadata()
                .and_then(|data| data.modified())
                .map(|time| time.elapsed());
            if is_key && path != current && matches!(age, Ok(Ok(age)) if age > KEPT) {
                remove_tree(&path)?;
            }
        }
        Ok(())
    }

    /// The folder of an artefact, built if it is not there. Two processes never build one at a time.
    pub(crate) fn artefact(
        &self,
        name: &str,
        key: &Key,
        build: impl FnOnce(&Build<'_>) -> Result<()>,
    ) -> Result<PathBuf> {
        let path = self.path(name, key);
        if path.is_dir() {
            mark_used(&path);
            return Ok(path);
        }
        let stem = format!(".{name}-{}", key.text());
        let lock_path = self.folder.join(format!("{stem}.lock"));
        let lock = File::create(&lock_path).map_err(Error::io("create", &lock_path))?;
        lock.lock().map_err(Error::io("lock", &lock_path))?;
        if path.is_dir() {
            return Ok(path);
        }
        let partial = self.folder.join(format!("{stem}.partial"));
        remove_tree(&partial)?;
        fs::create_dir(&partial).map_err(Error::io("create", &partial))?;
        let log = self.folder.join("logs").join(format!("{name}.log"));
        File::create(&log).map_err(Error::io("create the log", &log))?;
        self.say(&format!("{name}: building"));
        let started = Instant::now();
        build(&Build {
            folder: &partial,
            log: &log,
        })?;
        fs::rename(&partial, &path).map_err(Error::io("publish", &path))?;
        self.remove_forgotten(name, &path)?;
        self.say(&format!(
            "{name}: ready after {:.1} s",
            started.elapsed().as_secs_f64()
        ));
        Ok(path)
    }
}

/// Remembers when an artefact was last asked for: by its folder's time of modification.
fn mark_used(path: &Path) {
    // A cache that cannot be written to is still good to read.
    let _ = File::open(path).and_then(|folder| folder.set_modified(SystemTime::now()));
}

/// Removes a folder and all in it, if it is there.
pub(crate) fn remove_tree(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}
