//! Tiny guests: a few instructions as a PVH kernel, run by the control thread in this process.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drover_api::definition::{self, VmConfig};
use drover_api::server::{Created, Reply};
use drover_api::types::{Event, EventKind, ShutdownRequest, VmView};
use drover_vmm::control::{Control, Outcome, Setup};
use drover_vmm::mailbox::{Answer, DiskMessage, Mailbox, Message, mailbox};
use drover_vmm::metrics::Timeline;
use drover_vmm::process::TerminationSignals;
use drover_vmm::service::PublishedState;
use drover_vmm::threads::{Sandbox, ThreadStarter};
use drover_vmm::vcpu::run_page::install_kick_handler;
use tokio::sync::{broadcast, oneshot};

/// How long a tiny guest may take for anything. They take milliseconds; a loaded machine takes longer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Whether guests can be run here; says so where not, so that a skipped test is visible.
pub(crate) fn kvm_or_skip() -> bool {
    let usable = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_ok();
    if !usable {
        eprintln!("skipped: no usable /dev/kvm");
    }
    usable
}

/// Where the code is loaded and entered.
const ENTRY: u32 = 0x10_0000;

/// An ELF64 file whose only segment is `code`, with a PVH entry note (32-bit protected mode, no paging).
pub(crate) fn pvh_kernel(code: &[u8]) -> Vec<u8> {
    const HEADER: u64 = 64;
    const PROGRAM_HEADER: u64 = 56;
    let note_at = HEADER + 2 * PROGRAM_HEADER;
    let mut note = Vec::new();
    for word in [4_u32, 4, 18] {
        // Name size, description size, XEN_ELFNOTE_PHYS32_ENTRY.
        note.extend(word.to_le_bytes());
    }
    note.extend(b"Xen\0");
    note.extend(ENTRY.to_le_bytes());
    let code_at = 0x1000_u64;

    let mut elf = Vec::new();
    elf.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    elf.extend(2_u16.to_le_bytes()); // ET_EXEC
    elf.extend(62_u16.to_le_bytes()); // EM_X86_64
    elf.extend(1_u32.to_le_bytes());
    elf.extend(u64::from(ENTRY).to_le_bytes());
    elf.extend(HEADER.to_le_bytes());
    elf.extend(0_u64.to_le_bytes());
    elf.extend(0_u32.to_le_bytes());
    for half in [HEADER as u16, PROGRAM_HEADER as u16, 2, 0, 0, 0] {
        elf.extend(half.to_le_bytes());
    }
    let mut program_header = |kind: u32, offset: u64, address: u64, size: u64, align: u64| {
        elf.extend(kind.to_le_bytes());
        elf.extend(7_u32.to_le_bytes());
        for word in [offset, address, address, size, size, align] {
            elf.extend(word.to_le_bytes());
        }
    };
    program_header(1, code_at, ENTRY.into(), code.len() as u64, 0x1000);
    program_header(4, note_at, 0, note.len() as u64, 4);
    elf.extend(note);
    elf.resize(code_at as usize, 0);
    elf.extend(code);
    elf
}

/// Instructions, assembled by hand.
#[derive(Default)]
pub(crate) struct Code(Vec<u8>);

impl Code {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    fn port(self, port: u16) -> Self {
        let [low, high] = port.to_le_bytes();
        self.raw(&[0xba, low, high, 0, 0]) // mov edx, port
    }

    /// `out port, al`
    pub(crate) fn out_al(self, port: u16) -> Self {
        self.port(port).raw(&[0xee])
    }

    /// Writes `text` to the serial port.
    pub(crate) fn print(self, text: &str) -> Self {
        text.bytes()
            .fold(self, |code, byte| code.raw(&[0xb0, byte]).out_al(0x3f8))
    }

    /// Turns the machine off: SLP_EN with SLP_TYP 0 into PM1_CNT.
    pub(crate) fn power_off(self) -> Self {
        self.port(0x604)
            .raw(&[0xb8, 0x00, 0x20, 0, 0, 0x66, 0xef])
            .halt()
    }

    /// Resets the machine through port 0xcf9.
    pub(crate) fn reset(self) -> Self {
        self.raw(&[0xb0, 0x06]).out_al(0xcf9).halt()
    }

    /// Halts for ever.
    pub(crate) fn halt(self) -> Self {
        self.raw(&[0xf4, 0xeb, 0xfd])
    }

    /// Waits until the power button's status bit shows in PM1_STS.
    pub(crate) fn wait_for_power_button(self) -> Self {
        // in ax, dx; test ah, 1; jz back to in
        self.port(0x600)
            .raw(&[0x66, 0xed, 0xf6, 0xc4, 0x01, 0x74, 0xf9])
    }

    pub(crate) fn bytes_so_far(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn bytes(self) -> Vec<u8> {
        self.0
    }
}

/// A control thread with a VM, and what one can see of it.
pub(crate) struct Vm {
    mailbox: Mailbox,
    events: broadcast::Receiver<Event>,
    thread: Option<JoinHandle<Outcome>>,
    pub(crate) directory: tempfile::TempDir,
}

impl Vm {
    /// A definition that runs `code`, with `extra` lines of YAML, its serial output in a file.
    pub(crate) fn config(directory: &Path, code: Code, extra: &str) -> VmConfig {
        let kernel = directory.join("kernel");
        std::fs::write(&kernel, pvh_kernel(&code.bytes())).expect("a temporary file");
        let text = format!(
            "name: tiny\nmemory: {{size: 32MiB}}\nrng: false\nboot: {{kernel: {}}}\n\
             serial: {{mode: file, path: {}}}\n{extra}",
            kernel.display(),
            directory.join("serial").display(),
        );
        let config = definition::parse(text.as_bytes(), "vm.yaml").expect("a definition");
        config.validate().expect("a valid definition");
        config
    }

    /// A control thread without a VM.
    pub(crate) fn idle() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let (mailbox, inbox) = mailbox().expect("a mailbox");
        let (sender, events) = broadcast::channel(64);
        install_kick_handler().expect("a signal handler");
        let for_control = mailbox.clone();
        let thread = std::thread::spawn(move || {
            let control = Control::new(Setup {
                mailbox: for_control,
                inbox,
                signals: TerminationSignals::take().expect("signals"),
                threads: ThreadStarter::new(Sandbox::Enforce),
                published: Arc::new(PublishedState::default()),
                events: sender,
                timeline: Timeline::begin(),
            });
            control
                .expect("a control thread")
                .run()
                .expect("an event loop")
        });
        Self {
            mailbox,
            events,
            thread: Some(thread),
            directory,
        }
    }

    /// A control thread with a VM that runs `code`.
    pub(crate) fn running(code: Code, extra: &str) -> Self {
        let vm = Self::idle();
        let config = Self::config(vm.directory.path(), code, extra);
        vm.create(config).expect("a VM");
        vm.start().expect("it starts");
        vm
    }

    pub(crate) fn ask<T>(&self, message: impl FnOnce(Answer<T>) -> Message) -> Reply<T> {
        let (answer, reply) = oneshot::channel();
        self.mailbox.send(message(answer));
        reply.blocking_recv().expect("the control thread answers")
    }

    pub(crate) fn create(&self, config: VmConfig) -> Reply<Created> {
        self.ask(|answer| Message::Create(Box::new(config), answer))
    }

    pub(crate) fn start(&self) -> Reply<VmView> {
        self.ask(Message::Start)
    }

    pub(crate) fn view(&self) -> Reply<VmView> {
        self.ask(Message::View)
    }

    pub(crate) fn reset(&self) -> Reply<VmView> {
        self.ask(Message::Reset)
    }

    pub(crate) fn pause(&self) -> Reply<VmView> {
        self.ask(Message::Pause)
    }

    pub(crate) fn resume(&self) -> Reply<VmView> {
        self.ask(Message::Resume)
    }

    /// Something about disks.
    pub(crate) fn disks<T>(&self, message: impl FnOnce(Answer<T>) -> DiskMessage) -> Reply<T> {
        self.ask(|answer| Message::Disk(message(answer)))
    }

    /// Begins something about disks, without waiting for its answer.
    pub(crate) fn send_disks(&self, message: DiskMessage) {
        self.mailbox.send(Message::Disk(message));
    }

    pub(crate) fn metrics(&self) -> String {
        self.ask(Message::Metrics).expect("metrics")
    }

    pub(crate) fn shutdown(&self, timeout_ms: u64) -> Reply<VmView> {
        self.ask(|answer| Message::Shutdown(ShutdownRequest { timeout_ms }, answer))
    }

    pub(crate) fn serial_path(&self) -> PathBuf {
        self.directory.path().join("serial")
    }

    /// What the guest has written to its serial port so far.
    pub(crate) fn serial(&self) -> String {
        std::fs::read_to_string(self.serial_path()).unwrap_or_default()
    }

    /// Waits until the guest has written `text`.
    pub(crate) fn wait_for(&self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.serial().contains(text) {
            assert!(
                Instant::now() < deadline,
                "no {text:?} in {:?}",
                self.serial()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the VM has ended by itself.
    pub(crate) fn outcome(&mut self) -> Outcome {
        let thread = self.thread.take().expect("not asked before");
        let deadline = Instant::now() + PATIENCE;
        while !thread.is_finished() {
            assert!(
                Instant::now() < deadline,
                "still running; serial: {:?}",
                self.serial()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
        thread.join().expect("the control thread does not panic")
    }

    /// The kinds of all events since the start.
    pub(crate) fn events(&mut self) -> Vec<EventKind> {
        std::iter::from_fn(|| self.events.try_recv().ok().map(|event| event.kind)).collect()
    }
}
