//! What can go wrong with a worker, as one line for the person who can mend it.

use std::io;
use std::path::{Path, PathBuf};

use drover_api::definition::DefinitionError;

/// Why something could not be done with a worker.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The definition, or what it names, is wrong.
    #[error(transparent)]
    Definition(#[from] DefinitionError),
    /// A name that cannot be one.
    #[error(
        "{0:?} is not a worker's name: expected a DNS label (a-z, 0-9, '-', at most 63 characters)"
    )]
    Name(String),
    /// There is such a worker already.
    #[error(
        "worker {0} exists: delete it first (drover worker delete {0}), or choose another name"
    )]
    Exists(String),
    /// There is no such worker.
    #[error("there is no worker {name} in {}", state.display())]
    NotFound {
        /// Its name.
        name: String,
        /// Where it was looked for.
        state: PathBuf,
    },
    /// Another process creates or deletes it.
    #[error(
        "worker {0} is being created or deleted by another process: try again when that has ended"
    )]
    Busy(String),
    /// It does not run, and what was asked for needs that.
    #[error("worker {0} does not run")]
    NotRunning(String),
    /// A file or folder.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// What was to be done ("create the folder").
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A socket's path would not fit into a socket address.
    #[error("{}: a path of {} bytes is too long for a unix socket (at most 107): choose a shorter --state-dir", path.display(), path.as_os_str().len())]
    SocketPath {
        /// The path.
        path: PathBuf,
    },
    /// Neither the state folder nor the home folder is known.
    #[error("neither XDG_STATE_HOME nor HOME is set: say where workers live with --state-dir")]
    NoStateDir,
    /// The overlay could not be made.
    #[error("{0}")]
    Image(#[from] drover_block::Error),
    /// The network of the host.
    #[error("{what}: {source}{}", remedy(source))]
    Network {
        /// What was to be done.
        what: String,
        /// Why not.
        source: io::Error,
    },
    /// The VMM could not be found or started.
    #[error("drover-vmm: {0}")]
    Vmm(String),
    /// The VMM refused or failed.
    #[error("drover-vmm: {message}")]
    Refused {
        /// Its own words.
        message: String,
        /// Whether the input is at fault.
        bad_input: bool,
    },
    /// The guest did not get as far as was asked for.
    #[error(
        "worker {name}: {reason}; it is kept: look with 'drover worker console {name}', remove with 'drover worker delete {name}'"
    )]
    Wait {
        /// Its name.
        name: String,
        /// What happened instead.
        reason: String,
    },
    /// A process did not end.
    #[error("process {0} does not end, even after SIGKILL")]
    Unkillable(i32),
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            " (this needs CAP_NET_ADMIN: run as root, or give a tap that exists)"
        }
        _ => "",
    }
}

impl Error {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }

    /// Whether the person's input is at fault, rather than the host.
    #[must_use]
    pub fn is_bad_input(&self) -> bool {
        match self {
            Self::Definition(_)
            | Self::Name(_)
            | Self::Exists(_)
            | Self::NotFound { .. }
            | Self::NotRunning(_)
            | Self::SocketPath { .. }
            | Self::NoStateDir => true,
            Self::Refused { bad_input, .. } => *bad_input,
            Self::Busy(_)
            | Self::Io { .. }
            | Self::Image(_)
            | Self::Network { .. }
            | Self::Vmm(_)
            | Self::Wait { .. }
            | Self::Unkillable(_) => false,
        }
    }
}
