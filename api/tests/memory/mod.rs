//! A VM service without a VM: the life cycle of one in memory, so that the HTTP interface can be tested as clients see it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use drover_api::definition::VmConfig;
use drover_api::server::{Created, Reply, VmService};
use drover_api::types::{
    ApiError, Event, EventKind, Info, ShutdownRequest, StopReason, VmState, VmView,
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
            Some(state @ (VmState::Running | VmState::ShuttingDown)) => Err(ApiError::wrong_state(
                state,
                "be deleted: shut it down first",
            )),
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
            VmState::Running => {
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
            VmState::Running => {
                vm.resets += 1;
                Ok(())
            }
            state => Err(ApiError::wrong_state(state, "be reset")),
        })
    }

    async fn metrics(&self) -> Reply<String> {
        Ok("# TYPE drover_up gauge\ndrover_up 1\n".into())
    }

    fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }
}
