//! `drover image lease`: who owns an image, over hosts and deaths; and taking it from one who is gone for good.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use drover_block::lease::{self, Lease, LeaseStanding};
use serde::Serialize;

use super::image_chain::{done, failure};
use crate::args::OutputMode;
use crate::failure::Failure;
use crate::output;

/// What to do with a lease.
#[derive(Debug, Subcommand)]
pub(crate) enum LeaseCommand {
    /// Tell who owns an image.
    Show(LeasePath),
    /// Take an image from whoever owns it on paper. Only for who knows that nobody uses it, on any host.
    Break(LeasePath),
}

/// An image.
#[derive(Debug, Args)]
pub(crate) struct LeasePath {
    /// The image.
    pub(crate) path: PathBuf,
}

/// A lease as it is shown.
#[derive(Serialize)]
pub(crate) struct Shown {
    /// `none`, `free`, `held`, `abandoned`, `elsewhere`, `superseded` or `damaged`.
    state: &'static str,
    /// The lease in words.
    text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<Lease>,
}

impl Shown {
    /// What lies beside an image. A lease that cannot be read is a state, too.
    pub(crate) fn of(image: &Path) -> Self {
        let told = |state, text: String| Self {
            state,
            text,
            lease: None,
        };
        let (lease, standing) = match lease::read(image) {
            Ok(None) => return told("none", "none".to_owned()),
            Ok(Some(found)) => found,
            Err(error) => return told("damaged", error.kind.to_string()),
        };
        let holder = lease.holder.as_ref();
        let holder = holder.map_or(String::new(), ToString::to_string);
        let (state, text) = match standing {
            LeaseStanding::Free => ("free", "free".to_owned()),
            LeaseStanding::Own | LeaseStanding::Held => ("held", format!("held by {holder}")),
            LeaseStanding::Abandoned => (
                "abandoned",
                format!("was held by {holder}, which has ended: the next one takes it"),
            ),
            LeaseStanding::Elsewhere => ("elsewhere", format!("held on another host by {holder}")),
            LeaseStanding::Superseded => {
                let overlay = lease.superseded_by.as_deref().unwrap_or(Path::new(""));
                let text = format!("goes on in the overlay {}", overlay.display());
                ("superseded", text)
            }
        };
        Self {
            state,
            text: format!("{text}, epoch {}", lease.epoch),
            lease: Some(lease),
        }
    }

    /// Whether there is anything to tell.
    pub(crate) fn is_none(&self) -> bool {
        self.state == "none"
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }
}

pub(crate) fn run(command: &LeaseCommand, mode: OutputMode) -> Result<(), Failure> {
    match command {
        LeaseCommand::Show(LeasePath { path }) => {
            exists(path)?;
            output::print(mode, &Shown::of(path), |shown| shown.text.clone())
        }
        LeaseCommand::Break(LeasePath { path }) => {
            exists(path)?;
            let before = lease::break_lease(path).map_err(failure)?;
            let holder = before.and_then(|lease| lease.holder);
            let text = match holder {
                Some(holder) => format!("is free now; it was held by {holder}"),
                None => "is free".to_owned(),
            };
            done(mode, path, &text)
        }
    }
}

fn exists(path: &Path) -> Result<(), Failure> {
    path.metadata()
        .map(|_| ())
        .map_err(|error| Failure::input(format!("{}: {error}", path.display())).about(path))
}
