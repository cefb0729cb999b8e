//! The HTTP API against its own OpenAPI document: schemathesis makes requests of every kind to a live
//! `drover-vmm` and checks each reply.
//!
//! schemathesis speaks TCP and the API a unix socket, so a bridge on the loopback address joins them. The run is
//! bounded by its number of examples and its time.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::process;
use crate::programs;
use crate::setup::{Cache, Key, install_python};

/// The version whose checks the API is held to.
const VERSION: &str = "4.32.5";
/// Examples for each operation and phase.
const EXAMPLES: &str = "15";
/// No run is longer, in seconds.
const LONGEST: &str = "60";

/// Runs schemathesis against a `drover-vmm`; whether all checks held.
pub(crate) fn run(drover_vmm: &Path, folder: &Path) -> Result<bool> {
    let python = schemathesis()?;
    let folder = folder.join("api");
    fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
    let socket = folder.join("api.sock");
    let vmm = Vmm::start(drover_vmm, &folder, &socket)?;
    let address = bridge(&socket)?;
    let mut command = Command::new(python);
    command
        .args(["-m", "schemathesis.cli", "--config-file"])
        .arg(programs::workspace().join("api/tests/schemathesis.toml"))
        .args([
            "run",
            &format!("http://{address}/v1/openapi.json"),
            "--checks",
            "all",
            // Left out: schemathesis writes strings such as 1e100 into YAML without quotes, where they are numbers
            // since YAML 1.2, and expects them to be accepted.
            "--exclude-checks",
            "positive_data_acceptance",
        ])
        .args([
            "--max-examples",
            EXAMPLES,
            "--max-time",
            LONGEST,
            "--seed",
            "1",
        ])
        .current_dir(&folder)
        .stdin(Stdio::null());
    let status = command.status().map_err(|source| Error::Spawn {
        program: "schemathesis".into(),
        source,
    })?;
    let alive = vmm.still_runs()?;
    if !alive {
        eprintln!(
            "drover-vmm did not survive: {}",
            folder.join("vmm.log").display()
        );
    }
    Ok(status.success() && alive)
}

/// The Python of a folder with schemathesis: made once and cached.
fn schemathesis() -> Result<PathBuf> {
    let cache = Cache::open()?;
    let key = Key::new("schemathesis 1").with(VERSION);
    let folder = cache.artefact("schemathesis", &key, |build| {
        install_python(&cache)?;
        let mut venv = Command::new("python3");
        process::run_logged(venv.args(["-m", "venv"]).arg(build.folder), build.log)?;
        let mut pip = Command::new(build.folder.join("bin/python"));
        pip.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ])
        .arg(format!("schemathesis=={VERSION}"));
        process::run_logged(&mut pip, build.log)
    })?;
    Ok(folder.join("bin/python"))
}

/// A VMM without a VM; ended with the value.
struct Vmm(Child);

impl Vmm {
    fn start(program: &Path, folder: &Path, socket: &Path) -> Result<Self> {
        let log = folder.join("vmm.log");
        let errors = fs::File::create(&log).map_err(Error::io("create", &log))?;
        let child = Command::new(program)
            .arg("--api-socket")
            .arg(socket)
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .spawn()
            .map_err(|source| Error::Spawn {
                program: program.display().to_string(),
                source,
            })?;
        let vmm = Self(child);
        let deadline = Instant::now() + Duration::from_secs(10);
        while UnixStream::connect(socket).is_err() {
            if Instant::now() >= deadline {
                return Err(Error::Other(format!(
                    "drover-vmm does not answer: {}",
                    log.display()
                )));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(vmm)
    }

    fn still_runs(mut self) -> Result<bool> {
        let ended = self.0.try_wait().map_err(|source| Error::Spawn {
            program: "drover-vmm".into(),
            source,
        })?;
        Ok(ended.is_none())
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        // Ended already is as good; nothing else can be done about it here.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Listens on a free loopback port and joins each connection with one to the socket, until this process ends.
fn bridge(socket: &Path) -> Result<std::net::SocketAddr> {
    let failed =
        |error: io::Error| Error::Other(format!("the bridge to {}: {error}", socket.display()));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let socket = socket.to_owned();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A connection that cannot be joined is closed: the client sees it.
            let _ = UnixStream::connect(&socket).and_then(|unix| join(stream, unix));
        }
    });
    Ok(address)
}

fn join(tcp: TcpStream, unix: UnixStream) -> io::Result<()> {
    let (mut from_client, mut to_client) = (tcp.try_clone()?, tcp);
    let (mut to_server, mut from_server) = (unix.try_clone()?, unix);
    thread::spawn(move || {
        let _ = io::copy(&mut from_client, &mut to_server);
        let _ = to_server.shutdown(Shutdown::Write);
    });
    thread::spawn(move || {
        let _ = io::copy(&mut from_server, &mut to_client);
        let _ = to_client.shutdown(Shutdown::Both);
    });
    Ok(())
}
