//! Starting, stopping and asking over the API.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::ensure;
use crate::failure::Result;
use crate::fixtures::guest::SmallGuest;
use crate::fixtures::vm::{Vm, small_guest};
use crate::stories::{Scene, Story};

pub(super) static STORIES: &[Story] = &[
    Story::small(
        "lifecycle",
        "shutdown_presses_the_power_button_and_the_process_ends_with_0",
        acpi_shutdown,
    ),
    Story::small(
        "lifecycle",
        "a_guest_that_ignores_the_button_is_forced_off_after_the_timeout",
        forced_shutdown,
    ),
    Story::small(
        "lifecycle",
        "the_api_tells_the_state_and_refuses_what_does_not_fit_it",
        states,
    ),
    Story::small(
        "lifecycle",
        "a_reset_over_the_api_starts_the_guest_anew",
        reset,
    )
    .seconds(35, 240),
    Story::small(
        "lifecycle",
        "a_crash_of_the_guests_kernel_is_followed_by_its_reboot",
        kernel_panic,
    )
    .seconds(40, 240),
];

fn boot(scene: &Scene) -> Result<Vm> {
    let guest = SmallGuest::prepare(scene)?;
    Vm::boot(scene, &small_guest(&guest, &scene.folder))
}

fn acpi_shutdown(scene: &Scene) -> Result {
    let mut vm = boot(scene)?;
    let reply = vm.api(
        "POST",
        "/v1/vm/shutdown",
        Some(&json!({"timeout_ms": 30000})),
    )?;
    ensure!(
        reply.status == 202,
        "shutdown: {} {}",
        reply.status,
        reply.body
    );
    // The guest acted on its button: it was not forced.
    vm.console
        .wait_for("LAB-POWER-BUTTON", Duration::from_secs(20))?;
    vm.expect_exit(0, Duration::from_secs(20))?;
    ensure!(!vm.api_socket.exists(), "the API's socket is still there");
    ensure!(
        !scene.folder.join("serial.sock").exists(),
        "the console's socket is still there"
    );
    Ok(())
}

fn forced_shutdown(scene: &Scene) -> Result {
    let mut vm = boot(scene)?;
    vm.run("killall acpid")?;
    // Interrupts off for good is as hung as a guest can be; a loop in the shell is what users meet.
    vm.console.start("while :; do :; done")?;
    let started = Instant::now();
    let reply = vm.api(
        "POST",
        "/v1/vm/shutdown",
        Some(&json!({"timeout_ms": 3000})),
    )?;
    ensure!(
        reply.status == 202,
        "shutdown: {} {}",
        reply.status,
        reply.body
    );
    let again = vm.api(
        "POST",
        "/v1/vm/shutdown",
        Some(&json!({"timeout_ms": 3000})),
    )?;
    ensure!(
        again.status == 202,
        "shutdown, asked again: {} {}",
        again.status,
        again.body
    );
    vm.expect_exit(0, Duration::from_secs(30))?;
    let took = started.elapsed();
    ensure!(
        took >= Duration::from_secs(3),
        "it was forced off after {took:?}, before its timeout"
    );
    Ok(())
}

fn states(scene: &Scene) -> Result {
    let vm = boot(scene)?;
    let info = vm.api("GET", "/v1/info", None)?.json()?;
    ensure!(info["state"] == "running", "info: {info}");
    let view = vm.api("GET", "/v1/vm", None)?.json()?;
    ensure!(
        view["config"]["name"] == "story" && view["resets"] == 0,
        "vm: {view}"
    );
    let started = vm.api("POST", "/v1/vm/start", None)?;
    ensure!(
        started.status == 200,
        "starting what runs: {} {}",
        started.status,
        started.body
    );
    let deleted = vm.api("DELETE", "/v1/vm", None)?;
    ensure!(
        deleted.status == 409,
        "deleting what runs: {} {}",
        deleted.status,
        deleted.body
    );
    let same = vm.api("PUT", "/v1/vm", Some(&view["config"]))?;
    ensure!(
        same.status == 200,
        "the same definition again: {} {}",
        same.status,
        same.body
    );
    let mut other = view["config"].clone();
    other["name"] = json!("other");
    let refused = vm.api("PUT", "/v1/vm", Some(&other))?;
    ensure!(
        refused.status == 409,
        "another definition: {} {}",
        refused.status,
        refused.body
    );
    let unknown = vm.api("GET", "/v1/nothing", None)?;
    ensure!(
        unknown.status == 404,
        "no such path: {} {}",
        unknown.status,
        unknown.body
    );
    let metrics = vm.api("GET", "/v1/metrics", None)?;
    ensure!(
        metrics.status == 200 && metrics.body.contains("# TYPE"),
        "metrics: {}",
        metrics.body
    );
    let document = vm.api("GET", "/v1/openapi.json", None)?.json()?;
    ensure!(
        document["paths"]["/v1/vm"].is_object(),
        "the OpenAPI document has no /v1/vm"
    );
    vm.power_off()
}

fn reset(scene: &Scene) -> Result {
    let mut vm = boot(scene)?;
    // Even a guest whose only CPU is busy starts anew.
    vm.console.start("while :; do :; done")?;
    let reply = vm.api("POST", "/v1/vm/reset", None)?;
    ensure!(
        reply.status == 200,
        "reset: {} {}",
        reply.status,
        reply.body
    );
    vm.wait_for_shell()?;
    let view = vm.api("GET", "/v1/vm", None)?.json()?;
    ensure!(view["resets"] == 1, "resets are not counted: {view}");
    vm.power_off()
}

fn kernel_panic(scene: &Scene) -> Result {
    let mut vm = boot(scene)?;
    // panic=-1 on the command line: the kernel reboots at once.
    vm.console.start("echo c > /proc/sysrq-trigger")?;
    vm.wait_for_shell()?;
    vm.power_off()
}
