//! The seed's `user-data`: a cloud-config that grows the root, configures the node, joins the cluster and says so.
//!
//! What the user adds is merged key by key: lists are joined (ours first, except that the join is the last command), anything
//! else replaces ours.

use serde_json::{Map, Value, json};

use super::SeedError;
use crate::definition::{JoinConfig, WorkerConfig};
use crate::join;
use crate::milestone::Milestone;
use crate::yaml;

/// Where kubeadm finds its configuration in the guest.
pub const JOIN_PATH: &str = "/etc/kubeadm/join.yaml";
/// The first line by which cloud-init knows a cloud-config.
const MAGIC: &str = "#cloud-config\n";

/// The text of `user-data`. `extra` is the user's addition.
pub(super) fn render(
    config: &WorkerConfig,
    hostname: &str,
    instance_id: &str,
    extra: Map<String, Value>,
) -> Result<String, SeedError> {
    let mut root = ours(config, hostname, instance_id);
    merge(&mut root, extra)?;
    let mut commands = take_list(&mut root, "runcmd")?;
    commands.push(json!([
        "sh",
        "-c",
        last_command(config.join.as_ref(), instance_id)
    ]));
    root.insert("runcmd".to_owned(), Value::Array(commands));
    Ok(format!("{MAGIC}{}", yaml::document(&root)))
}

fn ours(config: &WorkerConfig, hostname: &str, instance_id: &str) -> Map<String, Value> {
    let mut root = Map::new();
    root.insert("hostname".to_owned(), json!(hostname));
    root.insert(
        "growpart".to_owned(),
        json!({"mode": "auto", "devices": ["/"]}),
    );
    root.insert("resize_rootfs".to_owned(), json!(true));
    root.insert(
        "bootcmd".to_owned(),
        json!([[
            "sh",
            "-c",
            announce(&Milestone::CloudInit.line(instance_id))
        ]]),
    );
    if !config.ssh_authorized_keys.is_empty() {
        root.insert(
            "ssh_authorized_keys".to_owned(),
            json!(config.ssh_authorized_keys),
        );
    }
    if let Some(join) = &config.join {
        root.insert(
            "write_files".to_owned(),
            json!([{
                "path": JOIN_PATH,
                "owner": "root:root",
                "permissions": "0600",
                "content": yaml::document(&join::configuration(join, hostname)),
            }]),
        );
    }
    root
}

/// The end of `runcmd`: the join, and its exit status on the console, where the host sees it.
fn last_command(join: Option<&JoinConfig>, instance_id: &str) -> String {
    let Some(join) = join else {
        return announce(&Milestone::Configured.line(instance_id));
    };
    let command = match &join.command {
        Some(command) => command
            .iter()
            .map(|word| quote(word))
            .collect::<Vec<_>>()
            .join(" "),
        None => format!("kubeadm join --config {JOIN_PATH}"),
    };
    let line = Milestone::joined_line(instance_id, "$status");
    // The exit status is kept, so that cloud-init reports a failed join as well.
    format!("{command}; status=$?; {}; exit $status", announce(&line))
}

/// A shell command that writes `line` to the first serial port, whether or not the kernel's console is there. Twice, since the
/// kernel may write its own messages into the middle of one.
fn announce(line: &str) -> String {
    format!("for i in 1 2; do printf '\\n%s\\n' \"{line}\" > /dev/ttyS0; sleep 0.2; done")
}

/// `word` as one word of a POSIX shell.
fn quote(word: &str) -> String {
    let plain = !word.is_empty()
        && word
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_./=:,@%+".contains(&b));
    if plain {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// Keys of cloud-config that the definition has fields for.
const OWN_FIELDS: [&str; 2] = ["hostname", "fqdn"];

fn merge(root: &mut Map<String, Value>, extra: Map<String, Value>) -> Result<(), SeedError> {
    for (key, value) in extra {
        if OWN_FIELDS.contains(&key.as_str()) {
            return Err(SeedError::user_data(format!(
                "{key}: use the definition's own field \"hostname\""
            )));
        }
        match (root.get_mut(&key), value) {
            (Some(Value::Array(ours)), Value::Array(theirs)) => ours.extend(theirs),
            (Some(Value::Array(_)), _) => {
                return Err(SeedError::user_data(format!("{key}: must be a list")));
            }
            (_, value) => {
                root.insert(key, value);
            }
        }
    }
    Ok(())
}

fn take_list(root: &mut Map<String, Value>, key: &str) -> Result<Vec<Value>, SeedError> {
    match root.remove(key) {
        None => Ok(Vec::new()),
        Some(Value::Array(items)) => Ok(items),
        Some(_) => Err(SeedError::user_data(format!("{key}: must be a list"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_shell() {
        assert_eq!(quote("kubeadm"), "kubeadm");
        assert_eq!(quote("it's $HOME"), "'it'\\''s $HOME'");
        assert_eq!(quote(""), "''");
    }
}
