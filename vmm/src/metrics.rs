//! What is counted, in the Prometheus text format (version 0.0.4), and when the process reached which point.
//!
//! Counters are read with relaxed loads while their writers go on: each is right by itself, together they are no snapshot.

use std::fmt::{Display, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drover_api::types::VmState;
use drover_block::DiskStatistics;

use crate::machine::devices::{Device, DeviceMetrics};
use crate::vcpu::exits::ExitCounters;

/// When the process reached which point, counted from its start.
#[derive(Clone, Copy, Debug)]
pub struct Timeline {
    start: Instant,
    created: Option<Duration>,
    started: Option<Duration>,
}

impl Timeline {
    /// A time line that begins now.
    pub fn begin() -> Self {
        Self {
            start: Instant::now(),
            created: None,
            started: None,
        }
    }

    /// The VM is built.
    pub fn mark_created(&mut self) {
        self.created = Some(self.start.elapsed());
    }

    /// The processors run.
    pub fn mark_started(&mut self) {
        self.started = Some(self.start.elapsed());
    }
}

/// What a machine counts.
pub struct MachineMetrics<'a> {
    /// Exits to userspace by vCPU.
    pub vcpus: Vec<(u8, Arc<ExitCounters>)>,
    /// Its virtio devices.
    pub devices: &'a [Device],
    /// What its disks count, with their labels.
    pub disks: Vec<(String, Arc<DiskStatistics>)>,
    /// Writes of the kernel's interrupt routing table.
    pub route_writes: u64,
    /// Bytes of serial output that nobody took in time.
    pub console_dropped_bytes: u64,
    /// Accesses of ports that no device has.
    pub unclaimed_port_accesses: u64,
    /// Accesses of memory that neither RAM nor a device has.
    pub unclaimed_mmio_accesses: u64,
    /// RAM in bytes.
    pub ram_bytes: u64,
}

/// A text in the making. `writeln!` into a string cannot fail.
struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(
            self.0,
            "# HELP drover_{name} {help}\n# TYPE drover_{name} {kind}"
        );
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &dyn Display)], value: impl Display) {
        let _ = write!(self.0, "drover_{name}");
        for (index, (label, text)) in labels.iter().enumerate() {
            let opening = if index == 0 { '{' } else { ',' };
            let _ = write!(self.0, "{opening}{label}=\"{text}\"");
        }
        let closing = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.0, "{closing} {value}");
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.family(name, kind, help);
        self.sample(name, &[], value);
    }
}

/// Renders everything. `machine` and `state` are absent while there is no VM.
pub fn render(
    machine: Option<&MachineMetrics<'_>>,
    state: Option<VmState>,
    resets: u64,
    timeline: &Timeline,
) -> String {
    let mut text = Text(String::with_capacity(8 << 10));
    text.family("info", "gauge", "The program.");
    text.sample("info", &[("version", &env!("CARGO_PKG_VERSION"))], 1);
    text.family("vm_state", "gauge", "1 for the state that the VM is in.");
    for candidate in [
        VmState::Created,
        VmState::Running,
        VmState::Paused,
        VmState::ShuttingDown,
        VmState::Stopped,
    ] {
        text.sample(
            "vm_state",
            &[("state", &candidate)],
            u8::from(state == Some(candidate)),
        );
    }
    let points = [("created", timeline.created), ("started", timeline.started)];
    text.family(
        "boot_seconds",
        "gauge",
        "Seconds from process start to a point of the VM's start.",
    );
    for (point, at) in points {
        if let Some(at) = at {
            text.sample("boot_seconds", &[("point", &point)], at.as_secs_f64());
        }
    }
    text.single("resets_total", "counter", "Resets of the machine.", resets);
    if let Some(machine) = machine {
        render_machine(&mut text, machine);
        render_devices(&mut text, machine.devices);
        let disks = machine.disks.iter();
        let disks: Vec<(&str, &DiskStatistics)> = disks
            .map(|(labels, statistics)| (labels.as_str(), &**statistics))
            .collect();
        drover_block::render_prometheus(&mut text.0, &disks);
    }
    text.0
}

fn render_machine(text: &mut Text, machine: &MachineMetrics<'_>) {
    text.single("ram_bytes", "gauge", "RAM of the guest.", machine.ram_bytes);
    text.family(
        "vcpu_exits_total",
        "counter",
        "Exits to userspace by vCPU and kind.",
    );
    for (index, counters) in &machine.vcpus {
        for (kind, value) in counters.values() {
            text.sample(
                "vcpu_exits_total",
                &[("vcpu", index), ("kind", &kind)],
                value,
            );
        }
    }
    text.single(
        "irq_route_writes_total",
        "counter",
        "Writes of the kernel's interrupt routing table.",
        machine.route_writes,
    );
    text.single(
        "console_dropped_bytes_total",
        "counter",
        "Serial output that nobody took in time.",
        machine.console_dropped_bytes,
    );
    text.family(
        "unclaimed_accesses_total",
        "counter",
        "Accesses that no device answers.",
    );
    text.sample(
        "unclaimed_accesses_total",
        &[("space", &"port")],
        machine.unclaimed_port_accesses,
    );
    text.sample(
        "unclaimed_accesses_total",
        &[("space", &"mmio")],
        machine.unclaimed_mmio_accesses,
    );
}

/// Name, help and counter of one row of a device's table.
type Row<'a> = (&'static str, &'static str, &'a AtomicU64);

fn rows(metrics: &DeviceMetrics) -> Vec<Row<'_>> {
    match metrics {
        DeviceMetrics::Block(m) => vec![
            ("block_reads_total", "Read requests done.", &m.reads),
            ("block_read_bytes_total", "Bytes read.", &m.read_bytes),
            ("block_writes_total", "Write requests done.", &m.writes),
            (
                "block_written_bytes_total",
                "Bytes written.",
                &m.written_bytes,
            ),
            ("block_flushes_total", "Flushes done.", &m.flushes),
            ("block_discards_total", "Discards done.", &m.discards),
            (
                "block_write_zeroes_total",
                "Write-zeroes requests done.",
                &m.write_zeroes,
            ),
            (
                "block_failed_total",
                "Requests that the host or the image failed.",
                &m.failed,
            ),
            (
                "block_kept_total",
                "Requests that failed and were kept, to be tried again.",
                &m.kept,
            ),
            (
                "block_refused_total",
                "Requests refused as malformed or out of range.",
                &m.refused,
            ),
        ],
        DeviceMetrics::Net(m) => vec![
            (
                "net_rx_frames_total",
                "Frames handed to the guest.",
                &m.rx_frames,
            ),
            (
                "net_rx_bytes_total",
                "Bytes handed to the guest.",
                &m.rx_bytes,
            ),
            (
                "net_rx_dropped_total",
                "Frames without a fitting buffer of the guest.",
                &m.rx_dropped,
            ),
            (
                "net_rx_starved_total",
                "Times that the guest had no buffers.",
                &m.rx_starved,
            ),
            (
                "net_tx_frames_total",
                "Frames taken from the guest.",
                &m.tx_frames,
            ),
            (
                "net_tx_bytes_total",
                "Bytes taken from the guest.",
                &m.tx_bytes,
            ),
            (
                "net_tx_malformed_total",
                "Malformed frames of the guest.",
                &m.tx_malformed,
            ),
            (
                "net_tx_refused_total",
                "Frames that the host refused.",
                &m.tx_refused,
            ),
            (
                "net_tx_blocked_total",
                "Times that the host could take no more.",
                &m.tx_blocked,
            ),
            (
                "net_control_ok_total",
                "Control commands carried out.",
                &m.control_ok,
            ),
            (
                "net_control_refused_total",
                "Control commands refused.",
                &m.control_refused,
            ),
        ],
        DeviceMetrics::VhostUser(m) => vec![
            (
                "vhost_user_calls_total",
                "Calls of the back end handed on to the guest.",
                &m.calls,
            ),
            (
                "vhost_user_connections_total",
                "Times a back end was found, the first included.",
                &m.connections,
            ),
            (
                "vhost_user_losses_total",
                "Times the back end went away.",
                &m.losses,
            ),
        ],
        DeviceMetrics::Rng(m) => vec![
            ("rng_requests_total", "Requests answered.", &m.requests),
            ("rng_bytes_total", "Bytes of entropy handed out.", &m.bytes),
            (
                "rng_delayed_total",
                "Requests that waited for the rate limit.",
                &m.delayed,
            ),
            (
                "rng_failed_total",
                "Requests that the host's source failed.",
                &m.failed,
            ),
        ],
    }
}

fn transport_rows(device: &Device) -> Vec<Row<'_>> {
    let m = &device.transport;
    vec![
        (
            "virtio_register_reads_total",
            "Register reads, an exit each.",
            &m.register_reads,
        ),
        (
            "virtio_register_writes_total",
            "Register writes, an exit each.",
            &m.register_writes,
        ),
        (
            "virtio_msix_accesses_total",
            "MSI-X table accesses, an exit each.",
            &m.msix_accesses,
        ),
        (
            "virtio_notify_exits_total",
            "Notifications that took an exit.",
            &m.notify_exits,
        ),
        (
            "virtio_activations_total",
            "Times the driver started the device.",
            &m.activations,
        ),
        ("virtio_resets_total", "Device resets.", &m.resets),
        (
            "virtio_queue_resets_total",
            "Resets of single queues.",
            &m.queue_resets,
        ),
        (
            "virtio_driver_errors_total",
            "Things a driver must not do.",
            &m.driver_errors,
        ),
        (
            "virtio_host_errors_total",
            "Doorbells or vectors that KVM refused.",
            &m.host_errors,
        ),
    ]
}

/// Samples of one family must stand together, so devices are walked once for each row.
fn render_devices(text: &mut Text, devices: &[Device]) {
    let mut seen: Vec<&str> = Vec::new();
    let all: Vec<(&str, Row<'_>)> = devices
        .iter()
        .flat_map(|device| {
            let rows = rows(&device.metrics)
                .into_iter()
                .chain(transport_rows(device));
            rows.map(|row| (device.id.as_str(), row))
        })
        .collect();
    for (_, (name, help, _)) in &all {
        if seen.contains(name) {
            continue;
        }
        seen.push(name);
        text.family(name, "counter", help);
        for (id, (other, _, counter)) in &all {
            if other == name {
                text.sample(name, &[("device", id)], counter.load(Ordering::Relaxed));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use drover_devices::virtio::block::metrics::BlockMetrics;
    use drover_devices::virtio::pci::VirtioPciMetrics;

    use super::*;

    fn disk(id: &str, reads: u64) -> Device {
        let metrics = BlockMetrics::default();
        metrics.reads.store(reads, Ordering::Relaxed);
        Device {
            id: id.to_owned(),
            metrics: DeviceMetrics::Block(Arc::new(metrics)),
            transport: Arc::new(VirtioPciMetrics::default()),
        }
    }

    #[test]
    fn each_family_is_declared_once_and_its_samples_follow_it() {
        let devices = [disk("root", 7), disk("seed", 8)];
        let exits = Arc::new(ExitCounters::default());
        exits.port_out.store(5, Ordering::Relaxed);
        let machine = MachineMetrics {
            vcpus: vec![(0, exits)],
            devices: &devices,
            disks: vec![("device=\"root\"".to_owned(), Arc::default())],
            route_writes: 1,
            console_dropped_bytes: 0,
            unclaimed_port_accesses: 2,
            unclaimed_mmio_accesses: 3,
            ram_bytes: 1 << 29,
        };
        let text = render(
            Some(&machine),
            Some(VmState::Running),
            4,
            &Timeline::begin(),
        );
        assert!(text.contains("drover_vm_state{state=\"running\"} 1\n"));
        assert!(text.contains("drover_vcpu_exits_total{vcpu=\"0\",kind=\"port-out\"} 5\n"));
        assert!(text.contains(
            "drover_block_reads_total{device=\"root\"} 7\ndrover_block_reads_total{device=\"seed\"} 8\n"
        ));
        let mut declared = Vec::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let name = rest.split(' ').next().unwrap();
                assert!(!declared.contains(&name), "{name} is declared twice");
                declared.push(name);
            } else if !line.starts_with('#') {
                let name = line.split(['{', ' ']).next().unwrap();
                // A histogram is one family of three kinds of samples.
                let parts = ["_bucket", "_sum", "_count"];
                let histogram = parts.iter().find_map(|part| name.strip_suffix(part));
                let name = histogram
                    .filter(|name| declared.contains(name))
                    .unwrap_or(name);
                assert_eq!(
                    declared.last(),
                    Some(&name),
                    "{line} stands apart from its family"
                );
            }
        }
    }

    #[test]
    fn without_a_vm_there_is_still_a_valid_text() {
        let text = render(None, None, 0, &Timeline::begin());
        assert!(text.contains("drover_resets_total 0\n"));
        assert!(text.ends_with('\n'));
    }
}
