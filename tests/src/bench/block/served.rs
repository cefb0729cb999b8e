//! Both engines behind vhost-user-blk, driven by one client: `drover image export` against `qemu-storage-daemon`.
//!
//! Linear and strided requests are `qemu-img bench`'s; random and mixed ones and discards come this way. The top is opened past
//! the page cache and the base through it, on both sides.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use drover_block::IoEngine;
use drover_devices::vhost_user::client::{Access, Client, ClientOptions, Order, Pattern};
use serde_json::json;

use super::images::{Chain, Shape};
use super::{Options, Place, Row, Run, count, engine_name, label, pairs_of, qemu};
use crate::bench::measure::cpu_time;
use crate::ensure;
use crate::failure::{Context as _, Failure, Result};

/// Requests of one kind on an image.
struct Case {
    name: &'static str,
    shape: Shape,
    block: u64,
    reads: u8,
    discards: u8,
    /// Requests at depth 1 and at depth 32.
    counts: [u64; 2],
}

const CASES: [Case; 3] = [
    Case {
        name: "served: random read 4k",
        shape: Shape::HalfInTop,
        block: 4096,
        reads: 100,
        discards: 0,
        counts: [10_000, 40_000],
    },
    Case {
        name: "served: random mix 4k, 70 % reads",
        shape: Shape::Fresh,
        block: 4096,
        reads: 70,
        discards: 0,
        counts: [5_000, 10_000],
    },
    Case {
        name: "served: random 64k, half discards",
        shape: Shape::Fresh,
        block: 65_536,
        reads: 0,
        discards: 50,
        counts: [2_000, 4_000],
    },
];

/// Queues of the client; the depth is shared out among them.
const QUEUES: u16 = 2;
/// How long a server may take until it listens.
const PATIENCE: Duration = Duration::from_secs(10);

/// Who serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Ours,
    Qemu,
}

/// Runs the cases in a folder. `drover` is the program of that name.
pub(super) fn in_place(
    place: Place,
    room: &Path,
    drover: &Path,
    options: &Options,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for case in &CASES {
        let mut chain = None;
        for (depth, count) in [1, 32].into_iter().zip(case.counts) {
            for engine in [IoEngine::IoUring, IoEngine::Threads] {
                if !options.wants(&label(case.name, place, engine, depth)) {
                    continue;
                }
                let chain = match &mut chain {
                    Some(chain) => chain,
                    none => none.insert(Chain::make(room, case.shape)?),
                };
                let measure = Measure {
                    case,
                    chain,
                    drover,
                    socket: room.join("served.sock"),
                    engine,
                    depth,
                    count: if options.quick { count / 4 } else { count },
                };
                let row = measure.row(place, options.pairs())?;
                row.print();
                rows.push(row);
            }
        }
    }
    Ok(rows)
}

struct Measure<'a> {
    case: &'a Case,
    chain: &'a Chain,
    drover: &'a Path,
    socket: PathBuf,
    engine: IoEngine,
    depth: u64,
    count: u64,
}

impl Measure<'_> {
    fn row(&self, place: Place, pairs: usize) -> Result<Row> {
        let (ours, theirs) = pairs_of(
            pairs,
            || self.run(Side::Ours).context("drover image export"),
            || self.run(Side::Qemu).context("qemu-storage-daemon"),
        )?;
        Ok(Row::of_runs(
            self.case.name,
            place,
            engine_name(self.engine),
            self.depth,
            count(self.count),
            (&ours, &theirs),
            json!({"pairs": pairs}),
        ))
    }

    /// One server from its start to its end.
    fn run(&self, side: Side) -> Result<Run> {
        self.chain.renew()?;
        let mut server = Server(
            match side {
                Side::Ours => self.ours(),
                Side::Qemu => self.qemu()?,
            }
            .env("RUST_LOG", "warn")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("start it")?,
        );
        server.listening(&self.socket)?;
        // One request at a time is one queue's; otherwise each queue has its share.
        let queues = if self.depth == 1 { 1 } else { QUEUES };
        let depth = u16::try_from(self.depth / u64::from(queues)).unwrap_or(1);
        let mut client = Client::connect(
            &self.socket,
            &ClientOptions {
                queues,
                depth,
                buffer_bytes: u32::try_from(self.case.block).unwrap_or(4096),
            },
        )
        .context("connect")?;
        let pattern = Pattern {
            order: Order::Random { seed: 7 },
            block_bytes: self.case.block,
            range_bytes: client.capacity_bytes(),
            reads_percent: self.case.reads,
            discards_percent: self.case.discards,
        };
        let jobs = pattern
            .jobs()
            .take(usize::try_from(self.count).unwrap_or(usize::MAX));
        let before = cpu_time(server.0.id())?.own;
        let started = Instant::now();
        let outcome = client.run(jobs).context("the requests")?;
        client
            .execute(Access::Flush, 0, 0)
            .context("the flush at the end")?;
        let time = started.elapsed();
        let cpu = cpu_time(server.0.id())?.own.saturating_sub(before);
        ensure!(
            outcome.errors == 0 && outcome.requests == self.count,
            "{outcome:?} of {} requests",
            self.count
        );
        client.disconnect().context("disconnect")?;
        server.stop()?;
        Ok(Run { time, cpu })
    }

    fn ours(&self) -> Command {
        let mut command = Command::new(self.drover);
        command
            .args(["image", "export", "--vhost-user-blk"])
            .arg(&self.socket)
            .args(["--format", "qcow2", "--queues", "2", "--io"])
            .arg(match self.engine {
                IoEngine::IoUring => "uring",
                IoEngine::Threads | IoEngine::Inline => "threads",
            });
        for layer in self.chain.layers.iter().skip(1) {
            command
                .arg("--backing")
                .arg(layer)
                .args(["--backing-format", "qcow2"]);
        }
        command.arg(self.chain.top());
        command
    }

    /// Nodes from the base up, each by its name.
    fn qemu(&self) -> Result<Command> {
        let mut command = Command::new("qemu-storage-daemon");
        let mut below: Option<String> = None;
        for (number, layer) in self.chain.layers.iter().enumerate().rev() {
            let (node, file) = (format!("node{number}"), format!("file{number}"));
            command.arg("--blockdev").arg(
                json!({
                    "driver": "file",
                    "node-name": file,
                    "filename": layer,
                    "aio": qemu::aio(self.engine),
                    "discard": "unmap",
                    "read-only": number > 0,
                    "cache": {"direct": number == 0},
                })
                .to_string(),
            );
            let mut description = json!({
                "driver": "qcow2",
                "node-name": node,
                "file": file,
                "read-only": number > 0,
                "discard": "unmap",
            });
            description["backing"] = json!(below);
            command.arg("--blockdev").arg(description.to_string());
            below = Some(node);
        }
        let node = below.ok_or_else(|| Failure::Broken("a chain without layers".into()))?;
        command.arg("--export").arg(
            json!({
                "type": "vhost-user-blk",
                "id": "export",
                "node-name": node,
                "addr": {"type": "unix", "path": self.socket},
                "writable": true,
                "num-queues": QUEUES,
            })
            .to_string(),
        );
        Ok(command)
    }
}

/// A server that ends with its value.
struct Server(Child);

impl Server {
    /// Waits until the socket is there: both servers bind it last.
    fn listening(&mut self, socket: &Path) -> Result {
        let deadline = Instant::now() + PATIENCE;
        while !socket.exists() {
            if let Some(status) = self.0.try_wait()? {
                return Err(Failure::Broken(format!("it ended at once: {status}")));
            }
            ensure!(Instant::now() < deadline, "no socket after 10 s");
            sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Ends it as an operator does; what it has is then durable.
    fn stop(&mut self) -> Result {
        let id = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(id, rustix::process::Signal::TERM).context("end it")?;
        let status = self.0.wait()?;
        ensure!(status.success(), "it ended with {status}");
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Stopped already, or what is measured has failed: then nothing of it is wanted.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
