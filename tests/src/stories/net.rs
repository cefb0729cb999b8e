//! Networks over a tap: ping, 200 MB each way, large and small MTUs, several queue pairs.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::{Value, json};

use crate::ensure;
use crate::failure::{Context as _, Failure, Result};
use crate::fixtures::command::{ask, succeed};
use crate::fixtures::guest::SmallGuest;
use crate::fixtures::net::{Tap, listen};
use crate::fixtures::vm::{Vm, small_guest};
use crate::pattern::{self, Checksum, Pattern};
use crate::stories::{Scene, Story};

pub(super) static STORIES: &[Story] = &[
    Story::small(
        "net",
        "ping_and_200_mb_each_way_over_a_tap_with_mtu_1450",
        mtu_1450,
    )
    .seconds(60, 400),
    Story::small(
        "net",
        "jumbo_frames_of_mtu_9000_carry_200_mb_each_way",
        mtu_9000,
    )
    .seconds(60, 400),
    Story::small("net", "two_queue_pairs_carry_200_mb_each_way", two_pairs).seconds(70, 400),
    Story::small("net", "a_tap_made_for_the_vm_goes_with_it", created_tap),
    Story::small("net", "without_offloads_every_packet_is_whole", no_offloads).seconds(60, 400),
];

const BYTES: u64 = 200_000_000;
const LONG: Duration = Duration::from_secs(120);
const TAP: &str = "story0";

fn mtu_1450(scene: &Scene) -> Result {
    both_ways(scene, 1450, 1, &json!({"mtu": 1450}), BYTES)
}

fn mtu_9000(scene: &Scene) -> Result {
    both_ways(scene, 9000, 1, &json!({"mtu": 9000}), BYTES)
}

fn two_pairs(scene: &Scene) -> Result {
    both_ways(scene, 1500, 2, &json!({"queue_pairs": 2}), BYTES)
}

fn no_offloads(scene: &Scene) -> Result {
    both_ways(scene, 1500, 1, &json!({"offloads": false}), BYTES / 10)
}

fn both_ways(scene: &Scene, mtu: u32, pairs: u32, options: &Value, bytes: u64) -> Result {
    let guest = SmallGuest::prepare(scene)?;
    let _tap = Tap::create(TAP, "10.77.0.1/24", mtu, pairs)?;
    let mut net = json!({"id": "eth0", "tap": {"name": TAP}, "mac": "52:54:00:77:00:02"});
    if let (Some(net), Some(options)) = (net.as_object_mut(), options.as_object()) {
        net.extend(options.clone());
    }
    let mut definition = small_guest(&guest, &scene.folder);
    definition["cpus"] = json!({"count": pairs});
    definition["nets"] = json!([net]);
    let mut vm = Vm::boot(scene, &definition)?;
    vm.run("ip address add 10.77.0.2/24 dev eth0 && ip link set eth0 up")?;
    let seen = vm.run("cat /sys/class/net/eth0/mtu /sys/class/net/eth0/address")?;
    ensure!(
        seen == format!("{mtu}\n52:54:00:77:00:02"),
        "the guest sees MTU and address {seen:?}"
    );
    let queues = vm.run("ls -d /sys/class/net/eth0/queues/rx-* | wc -l")?;
    ensure!(
        queues == pairs.to_string(),
        "the guest sees {queues} receive queues, not {pairs}"
    );
    // The largest packet that fits, not fragmented, and the smallest.
    let largest = (mtu - 28).to_string();
    for size in [largest.as_str(), "0"] {
        let ping = ask(
            "ping",
            &[
                "-c",
                "5",
                "-i",
                "0.2",
                "-W",
                "5",
                "-M",
                "do",
                "-s",
                size,
                "10.77.0.2",
            ],
        )?;
        ensure!(
            ping.status == 0 && ping.stdout.contains(" 0% packet loss"),
            "ping -s {size}: {}",
            ping.stdout
        );
    }
    from_guest(&mut vm, bytes)?;
    to_guest(&mut vm, bytes)?;
    if pairs > 1 {
        let used = vm.run("grep -c 'virtio[0-9]*-input[.]' /proc/interrupts")?;
        ensure!(used == pairs.to_string(), "receive interrupts: {used}");
    }
    vm.power_off()
}

fn from_guest(vm: &mut Vm, bytes: u64) -> Result {
    let listener = listen("10.77.0.1:5001")?;
    let id = vm
        .console
        .start(&format!("lab-guest send 10.77.0.1:5001 {bytes} 21"))?;
    let (mut stream, _) = listener.accept()?;
    stream.set_read_timeout(Some(LONG))?;
    let mut checksum = Checksum::default();
    let mut buffer = vec![0_u8; 1 << 18];
    let mut received = 0;
    loop {
        let count = stream.read(&mut buffer).context("receive from the guest")?;
        if count == 0 {
            break;
        }
        checksum.update(&buffer[..count]);
        received += count as u64;
    }
    let sum = checksum.finish();
    let reply = vm.console.finish(id, LONG)?;
    ensure!(
        received == bytes && sum == reply.output,
        "the guest sent {bytes} bytes {:?}, {received} {sum} came",
        reply.output
    );
    ensure!(
        sum == pattern::expected(21, bytes),
        "the stream's checksum is {sum}"
    );
    Ok(())
}

fn to_guest(vm: &mut Vm, bytes: u64) -> Result {
    let id = vm
        .console
        .start(&format!("lab-guest receive 5002 {bytes}"))?;
    vm.console.wait_for("LISTENING", Duration::from_secs(20))?;
    let address: SocketAddr = "10.77.0.2:5002"
        .parse()
        .map_err(|error| Failure::Broken(format!("the guest's address: {error}")))?;
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(20))
        .context("connect to the guest")?;
    stream.set_write_timeout(Some(LONG))?;
    let mut pattern = Pattern::new(22);
    let mut buffer = vec![0_u8; 1 << 18];
    let mut left = bytes;
    while left > 0 {
        let count = usize::try_from(left)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        pattern.fill(&mut buffer[..count]);
        stream
            .write_all(&buffer[..count])
            .context("send to the guest")?;
        left -= count as u64;
    }
    drop(stream);
    let reply = vm.console.finish(id, LONG)?;
    ensure!(
        reply.status == 0 && reply.output == pattern::expected(22, bytes),
        "the guest received {:?}",
        reply.output
    );
    Ok(())
}

fn created_tap(scene: &Scene) -> Result {
    let guest = SmallGuest::prepare(scene)?;
    let mut definition = small_guest(&guest, &scene.folder);
    definition["nets"] = json!([{"id": "eth0", "tap": {"create": TAP}}]);
    let mut vm = Vm::boot(scene, &definition)?;
    succeed("ip", &["address", "add", "10.77.0.1/24", "dev", TAP])?;
    succeed("ip", &["link", "set", TAP, "up"])?;
    vm.run("ip address add 10.77.0.2/24 dev eth0 && ip link set eth0 up")?;
    vm.run("ping -c 3 -W 5 10.77.0.1")?;
    vm.power_off()?;
    let gone = ask("ip", &["link", "show", TAP])?;
    ensure!(gone.status != 0, "the tap is still there: {}", gone.stdout);
    Ok(())
}
