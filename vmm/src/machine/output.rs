//! Opens the serial port's back end.

use std::path::PathBuf;

use drover_api::definition::SerialConfig;
use drover_api::server::bind_socket;
use drover_devices::platform::console::{
    FileConsole, Nowhere, PtyConsole, SocketConsole, StdioConsole,
};
use drover_devices::platform::serial::SerialOutput;

use super::BuildError;
use crate::process::RawTerminal;

/// An open back end.
pub(super) struct SerialBackEnd {
    pub(super) output: Box<dyn SerialOutput>,
    /// The pseudo-terminal to open.
    pub(super) pty: Option<PathBuf>,
    /// The process's terminal, raw as long as the VM has it.
    pub(super) terminal: Option<RawTerminal>,
}

impl SerialBackEnd {
    pub(super) fn open(config: &SerialConfig) -> Result<Self, BuildError> {
        let plain = |output| Self {
            output,
            pty: None,
            terminal: None,
        };
        match config {
            SerialConfig::None => Ok(plain(Box::new(Nowhere))),
            SerialConfig::File { path } => {
                let file = FileConsole::open(path).map_err(|error| {
                    BuildError::of("serial.path")(format!("{}: {error}", path.display()).into())
                })?;
                Ok(plain(Box::new(file)))
            }
            SerialConfig::Stdio => {
                let stdio = StdioConsole::new()
                    .map_err(|error| BuildError::of("serial")(format!("stdio: {error}").into()))?;
                let terminal = RawTerminal::enter().map_err(|error| {
                    BuildError::of("serial")(format!("the terminal: {error}").into())
                })?;
                Ok(Self {
                    terminal,
                    ..plain(Box::new(stdio))
                })
            }
            SerialConfig::Pty => {
                let pty = PtyConsole::open()
                    .map_err(|error| BuildError::of("serial")(format!("pty: {error}").into()))?;
                let path = pty.path().to_owned();
                Ok(Self {
                    pty: Some(path),
                    ..plain(Box::new(pty))
                })
            }
            SerialConfig::Socket { path, scrollback } => {
                let (listener, guard) = bind_socket(path)
                    .map_err(|error| BuildError::of("serial.path")(error.into()))?;
                let kept = usize::try_from(scrollback.0).unwrap_or(usize::MAX);
                let socket = SocketConsole::new(listener, kept, guard).map_err(|error| {
                    BuildError::of("serial.path")(format!("{}: {error}", path.display()).into())
                })?;
                Ok(plain(Box::new(socket)))
            }
        }
    }
}
