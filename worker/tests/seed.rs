//! Seeds, as cloud-init and kubeadm read them.

#[path = "support/iso_reader.rs"]
mod iso_reader;

use drover_worker::definition::WorkerConfig;
use drover_worker::{Identity, seed};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

const WORKER: &str = include_str!("support/worker.yaml");

fn files(text: &str) -> iso_reader::Files {
    iso_reader::read(&bytes(text).unwrap()).unwrap().rock_ridge
}

fn bytes(text: &str) -> Result<Vec<u8>, String> {
    let config =
        WorkerConfig::parse(text.as_bytes(), "worker.yaml").map_err(|error| error.to_string())?;
    let identity = Identity::derive("worker-07", &[text.as_bytes()]).unwrap();
    seed::build(&config, "worker-07", &identity, None).map_err(|error| error.to_string())
}

fn yaml(files: &iso_reader::Files, name: &str) -> Value {
    serde_norway::from_slice(&files[name]).unwrap()
}

fn join_document(text: &str) -> Value {
    let user_data = yaml(&files(text), "user-data");
    let file = &user_data["write_files"][0];
    assert_eq!(file["path"], "/etc/kubeadm/join.yaml");
    assert_eq!(file["permissions"], "0600");
    serde_norway::from_str(file["content"].as_str().unwrap()).unwrap()
}

#[test]
fn the_same_definition_gives_the_same_bytes_on_every_machine() {
    let hash: String = Sha256::digest(bytes(WORKER).unwrap())
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(
        hash,
        "af74c1a87ab0eb9d83d9d9dfca3ae646346ca81f6cf72f4f4f80490a510757d4"
    );
}

#[test]
fn user_data_is_a_cloud_config_with_keys_growth_and_the_users_additions() {
    let files = files(WORKER);
    assert!(files["user-data"].starts_with(b"#cloud-config\n"));
    let user_data = yaml(&files, "user-data");
    assert_eq!(user_data["hostname"], "node-07");
    assert_eq!(
        user_data["growpart"],
        json!({"mode": "auto", "devices": ["/"]})
    );
    assert_eq!(
        user_data["ssh_authorized_keys"],
        json!(["ssh-ed25519 AAAAC3Nza ops@example"])
    );
    assert_eq!(user_data["timezone"], "Europe/Berlin");
    assert_eq!(user_data["write_files"][1]["path"], "/etc/motd");
    let commands = user_data["runcmd"].as_array().unwrap();
    assert_eq!(commands[0], "touch /first");
    let last = commands[1][2].as_str().unwrap();
    assert!(
        last.starts_with("kubeadm join --config /etc/kubeadm/join.yaml; status=$?;"),
        "{last}"
    );
}

#[test]
fn meta_data_names_the_instance_and_the_host() {
    let meta_data = yaml(&files(WORKER), "meta-data");
    assert_eq!(meta_data["local-hostname"], "node-07");
    let identity = Identity::derive("worker-07", &[WORKER.as_bytes()]).unwrap();
    assert_eq!(meta_data["instance-id"], identity.instance_id.as_str());
}

#[test]
fn network_config_is_version_2_by_mac() {
    let expected = json!({"version": 2, "ethernets": {"eth0": {
        "match": {"macaddress": "52:54:00:00:00:01"},
        "set-name": "eth0",
        "mtu": 1450,
        "addresses": ["192.0.2.7/24"],
        "routes": [{"to": "0.0.0.0/0", "via": "192.0.2.1"}],
        "nameservers": {"addresses": ["192.0.2.1"]},
    }}});
    assert_eq!(yaml(&files(WORKER), "network-config"), expected);
}

#[test]
fn v1beta4_writes_extra_arguments_as_a_list() {
    let document = join_document(WORKER);
    assert_eq!(
        document,
        json!({
            "apiVersion": "kubeadm.k8s.io/v1beta4",
            "kind": "JoinConfiguration",
            "discovery": {"bootstrapToken": {
                "apiServerEndpoint": "api.example:6443",
                "token": "abcdef.0123456789abcdef",
                "caCertHashes": ["sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"],
            }},
            "nodeRegistration": {
                "name": "node-07",
                "kubeletExtraArgs": [
                    {"name": "max-pods", "value": "50"},
                    {"name": "node-labels", "value": "pool=general,zone=a"},
                ],
                "taints": [{"key": "dedicated", "value": "ci", "effect": "NoSchedule"}],
            },
        })
    );
}

#[test]
fn v1beta2_and_v1beta3_write_extra_arguments_as_a_mapping() {
    for version in ["v1beta2", "v1beta3"] {
        let document = join_document(&WORKER.replace("v1beta4", version));
        assert_eq!(document["apiVersion"], format!("kubeadm.k8s.io/{version}"));
        assert_eq!(
            document["nodeRegistration"]["kubeletExtraArgs"],
            json!({"max-pods": "50", "node-labels": "pool=general,zone=a"})
        );
    }
}

#[test]
fn additions_that_cannot_be_merged_are_refused_by_name() {
    let with = |addition: &str| {
        let start = WORKER.find("user_data:").unwrap();
        let end = WORKER.find("join:").unwrap();
        bytes(&format!(
            "{}user_data: {addition}\n{}",
            &WORKER[..start],
            &WORKER[end..]
        ))
        .unwrap_err()
    };
    assert_eq!(with("{runcmd: x}"), "user_data: runcmd: must be a list");
    assert_eq!(
        with("{hostname: x}"),
        "user_data: hostname: use the definition's own field \"hostname\""
    );
    assert_eq!(
        with("'just text'"),
        "user_data: not a mapping: a cloud-config has keys such as runcmd"
    );
    assert!(with("'{'").starts_with("user_data: not YAML: "));
    assert!(with("'#!/bin/sh'").starts_with("user_data: only a cloud-config can be merged"));
}
