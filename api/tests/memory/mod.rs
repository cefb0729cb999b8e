//! A VM service without a VM: the life cycle of one in memory, so that the HTTP interface can be tested as clients see it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use drover_api::definition::{DiskConfig, LimitsConfig, VmConfig};
use drover_api::disks::{
    DiskCounters, DiskView, IoView, JobChange, JobKind, JobRequest, JobState, JobView, LayerView,
    ResizeRequest, SnapshotRequest,
};
use drover_api::server::{Created, Reply, VmService};
use drover_api::types::{
    ApiError, ErrorCode, Event, EventKind, Info, PauseReason, ShutdownRequest, StopReason, VmState,
    VmView,
};
use tokio::sync::broadcast;

/// Its guest powers off the moment it is asked to.
pub(crate) struct MemoryService {
    vm: Mutex<Option<VmView>>,
    events: broadcast::Sender<Event>,
}

impl MemoryService {
    pub(crate) fn new() -> Self {
        Self {
            vm: Mutex::new(None),
            events: broadcast::Sender::new(4),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<VmView>> {
        self.vm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn publish(&self, kind: EventKind) {
        // Nobody listens: nobody is told.
        let _ = self.events.send(Event { time_ms: 7, kind });
    }

    fn disk(&self, id: &str) -> Reply<DiskView> {
        let vm = self.lock();
        let vm = vm.as_ref().ok_or_else(ApiError::no_vm)?;
        let disk = vm.config.disks.iter().find(|disk| disk.id == id);
        disk.map(view)
            .ok_or_else(|| ApiError::new(ErrorCode::NotFound, "there is no such disk"))
    }

    fn change(&self, change: impl FnOnce(&mut VmView) -> Reply<()>) -> Reply<VmView> {
        let mut vm = self.lock();
        let vm = vm.as_mut().ok_or_else(ApiError::no_vm)?;
        let before = vm.state;
        change(vm)?;
        if vm.state != before {
            self.publish(EventKind::State {
                state: vm.state,
                stop_reason: vm.stop_reason,
            });
        }
        Ok(vm.clone())
    }
}

/// A disk of 1 GiB.
fn view(disk: &DiskConfig) -> DiskView {
    DiskView {
        id: disk.id.clone(),
        size_bytes: 1 << 30,
        read_only: disk.read_only,
        io: IoView::Uring,
        layers: vec![LayerView {
            path: disk.path.clone(),
            format: disk.format,
            allocated_bytes: None,
        }],
        limits: disk.limits,
        limit_group: None,
        job: None,
        missing: None,
        statistics: DiskCounters::default(),
    }
}

/// The one job there is.
fn job(disk: String, kind: JobKind, rate: Option<u64>) -> JobView {
    JobView {
        id: "7".into(),
        disk,
        kind,
        state: JobState::Running,
        done_bytes: 1,
        total_bytes: 1 << 30,
        moved_bytes: 1,
        rate,
        error: None,
    }
}

impl VmService for MemoryService {
    async fn info(&self) -> Reply<Info> {
        let state = self.lock().as_ref().map(|vm| vm.state);
        Ok(Info {
            version: "0.0.0".into(),
            pid: std::process::id(),
            state,
        })
    }

    async fn vm(&self) -> Reply<VmView> {
        self.lock().clone().ok_or_else(ApiError::no_vm)
    }

    async fn create(&self, config: VmConfig) -> Reply<Created> {
        let mut vm = self.lock();
        match vm.as_ref() {
            Some(vm) if vm.config == config => Ok(Created::Existing(vm.clone())),
            Some(vm) => Err(ApiError::wrong_state(
                vm.state,
                "be replaced by another definition",
            )),
            None => {
                let state = VmState::Created;
                let made = VmView {
                    state,
                    stop_reason: None,
                    pause_reason: None,
                    resets: 0,
                    pty: None,
                    config,
                };
                *vm = Some(made.clone());
                Ok(Created::New(made))
            }
        }
    }

    async fn delete(&self) -> Reply<()> {
        let mut vm = self.lock();
        match vm.as_ref().map(|vm| vm.state) {
            Some(state @ (VmState::Running | VmState::Paused | VmState::ShuttingDown)) => Err(
                ApiError::wrong_state(state, "be deleted: shut it down first"),
            ),
            Some(VmState::Created | VmState::Stopped) | None => {
                *vm = None;
                Ok(())
            }
        }
    }

    async fn start(&self) -> Reply<VmView> {
        self.change(|vm| match vm.state {
            VmState::Created | VmState::Running => {
                vm.state = VmState::Running;
                Ok(())
            }
            state => Err(ApiError::wrong_state(state, "be started")),
        })
    }

    async fn shutdown(&self, request: ShutdownRequest) -> Reply<VmView> {
        self.change(|vm| match vm.state {
            VmState::Running | VmState::Paused => {
                vm.state = VmState::Stopped;
                let forced = request.timeout_ms == 0;
                vm.stop_reason = Some(if forced {
                    StopReason::Forced
                } else {
                    StopReason::PoweredOff
                });
                Ok(())
            }
            VmState::ShuttingDown | VmState::Stopped => Ok(()),
            state @ VmState::Created => Err(ApiError::wrong_state(state, "be shut down")),
        })
    }

    async fn reset(&self) -> Reply<VmView> {
        self.change(|vm| match vm.state {
            VmState::Running | VmState::Paused => {
                vm.state = VmState::Running;
                vm.resets += 1;
                Ok(())
            }
            state => Err(ApiError::wrong_state(state, "be reset")),
        })
    }

    async fn pause(&self) -> Reply<VmView> {
        self.change(|vm| match vm.state {
            VmState::Running | VmState::Paused => {
                vm.state = VmState::Paused;
                vm.pause_reason = Some(PauseReason::Requested);
                Ok(())
            }
            state => Err(ApiError::wrong_state(state, "be paused")),
        })
    }

    async fn resume(&self) -> Reply<VmView> {
        self.change(|vm| match vm.state {
            VmState::Running | VmState::Paused => {
                vm.state = VmState::Running;
                vm.pause_reason = None;
                Ok(())
            }
            state => Err(ApiError::wrong_state(state, "be resumed")),
        })
    }

    async fn disks(&self) -> Reply<Vec<DiskView>> {
        let vm = self.lock();
        let vm = vm.as_ref().ok_or_else(ApiError::no_vm)?;
        Ok(vm.config.disks.iter().map(view).collect())
    }

    async fn resize(&self, disk: String, request: ResizeRequest) -> Reply<DiskView> {
        let mut view = self.disk(&disk)?;
        view.size_bytes = request.size.0;
        Ok(view)
    }

    async fn snapshot(&self, request: SnapshotRequest) -> Reply<Vec<DiskView>> {
        request
            .disks
            .iter()
            .map(|disk| self.disk(&disk.id))
            .collect()
    }

    async fn limit(&self, disk: String, limits: LimitsConfig) -> Reply<DiskView> {
        let mut view = self.disk(&disk)?;
        view.limits = Some(limits);
        Ok(view)
    }

    async fn begin_job(&self, disk: String, request: JobRequest) -> Reply<JobView> {
        self.disk(&disk)?;
        Ok(job(disk, request.kind, request.rate.map(|rate| rate.0)))
    }

    async fn jobs(&self) -> Reply<Vec<JobView>> {
        Ok(vec![self.job("7".into()).await?])
    }

    async fn job(&self, id: String) -> Reply<JobView> {
        if id != "7" {
            return Err(ApiError::new(ErrorCode::NotFound, "there is no such job"));
        }
        Ok(job("root".into(), JobKind::Commit, None))
    }

    async fn change_job(&self, id: String, change: JobChange) -> Reply<JobView> {
        let mut job = self.job(id).await?;
        job.rate = change.rate.map(|rate| rate.0);
        Ok(job)
    }

    async fn delete_job(&self, id: String) -> Reply<JobView> {
        self.job(id).await
    }

    async fn metrics(&self) -> Reply<String> {
        Ok("# TYPE drover_up gauge\ndrover_up 1\n".into())
    }

    fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }
}
