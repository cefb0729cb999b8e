//! What can be said about a definition without looking at the host.

use std::path::Path;

use drover_api::definition::DefinitionError;

use super::{Address, JoinConfig, NetworkConfig, WorkerConfig};

const MIB: u64 = 1 << 20;
/// Interface names have at most 15 bytes (IFNAMSIZ less its NUL).
const INTERFACE_NAME_MAX: usize = 15;
/// Parts of a Kubernetes label are at most this long.
const LABEL_MAX: usize = 63;

type Result = std::result::Result<(), DefinitionError>;

fn refuse(field: impl Into<String>, reason: impl Into<String>) -> Result {
    Err(DefinitionError::new(field, reason))
}

/// Whether `text` is a DNS label (RFC 1123) in lower case.
pub(crate) fn is_dns_label(text: &str) -> bool {
    let inside = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=63).contains(&text.len())
        && text.bytes().all(inside)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

fn is_dns_name(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_dns_label)
}

fn no_control(field: &str, text: &str) -> Result {
    if text.is_empty() || text.chars().any(char::is_control) {
        return refuse(field, "is empty or has a control character");
    }
    Ok(())
}

impl WorkerConfig {
    /// Checks everything that needs no look at the host.
    ///
    /// # Errors
    /// The first field that says what cannot be.
    pub fn validate(&self) -> Result {
        if let Some(name) = &self.name
            && !is_dns_label(name)
        {
            return refuse(
                "name",
                format!("{name:?} is not a DNS label (a-z, 0-9, '-', at most 63 characters)"),
            );
        }
        if let Some(hostname) = &self.hostname
            && !is_dns_name(hostname)
        {
            return refuse(
                "hostname",
                format!("{hostname:?} is not a DNS name in lower case"),
            );
        }
        let size = self.disk.size.0;
        if size == 0 || !size.is_multiple_of(MIB) {
            return refuse(
                "disk.size",
                format!("{size} bytes is not a multiple of 1 MiB"),
            );
        }
        for (index, key) in self.ssh_authorized_keys.iter().enumerate() {
            no_control(&format!("ssh_authorized_keys[{index}]"), key)?;
            if key.split_whitespace().count() < 2 {
                return refuse(
                    format!("ssh_authorized_keys[{index}]"),
                    "is not a public key (expected a type and a key, as in an authorized_keys file)",
                );
            }
        }
        if self.user_data.is_some() && self.user_data_file.is_some() {
            return refuse(
                "user_data_file",
                "stands beside user_data: give one of them",
            );
        }
        for (field, path) in [
            ("base.path", Some(&self.base.path)),
            ("user_data_file", self.user_data_file.as_ref()),
        ] {
            if path.is_some_and(|path| path == Path::new("")) {
                return refuse(field, "is empty");
            }
        }
        self.network.as_ref().map_or(Ok(()), validate_network)?;
        self.join.as_ref().map_or(Ok(()), validate_join)
    }
}

fn validate_network(network: &NetworkConfig) -> Result {
    match (&network.bridge, &network.tap) {
        (Some(_), Some(_)) => {
            return refuse("network.tap", "stands beside bridge: give one of them");
        }
        (None, None) => return refuse("network", "needs \"bridge\" or \"tap\""),
        (Some(bridge), None) => {
            let fits = (1..=INTERFACE_NAME_MAX).contains(&bridge.len())
                && bridge != "."
                && bridge != ".."
                && bridge
                    .bytes()
                    .all(|b| b.is_ascii_graphic() && b != b'/' && b != b':');
            if !fits {
                return refuse(
                    "network.bridge",
                    format!("{bridge:?} is not an interface name"),
                );
            }
        }
        (None, Some(_)) => {}
    }
    let Address::Static(address) = &network.address else {
        return Ok(());
    };
    if address.addresses.is_empty() {
        return refuse(
            "network.address.addresses",
            "is empty: give an address, or say dhcp",
        );
    }
    if let Some(gateway) = address.gateway
        && !address
            .addresses
            .iter()
            .any(|own| own.ip.is_ipv4() == gateway.is_ipv4())
    {
        return refuse(
            "network.address.gateway",
            format!("{gateway} is of a family that no address has"),
        );
    }
    Ok(())
}

fn validate_join(join: &JoinConfig) -> Result {
    let endpoint = &join.control_plane_endpoint;
    let split = endpoint.rsplit_once(':').filter(|(host, port)| {
        let host = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'))
            .unwrap_or(host);
        (is_dns_name(&host.to_ascii_lowercase()) || host.parse::<std::net::IpAddr>().is_ok())
            && port.parse::<u16>().is_ok_and(|port| port != 0)
    });
    if split.is_none() {
        return refuse(
            "join.control_plane_endpoint",
            format!("{endpoint:?} is not host:port"),
        );
    }
    if !is_token(join.token.expose()) {
        return refuse(
            "join.token",
            "is not a bootstrap token (6 and 16 characters of a-z, 0-9, with a dot between)",
        );
    }
    if join.ca_cert_hashes.is_empty() {
        return refuse(
            "join.ca_cert_hashes",
            "is empty: the cluster's CA must be pinned (kubeadm token create --print-join-command shows the hash)",
        );
    }
    for (index, hash) in join.ca_cert_hashes.iter().enumerate() {
        let digits = hash.strip_prefix("sha256:").unwrap_or_default();
        if digits.len() != 64 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            return refuse(
                format!("join.ca_cert_hashes[{index}]"),
                format!("{hash:?} is not sha256: and 64 hexadecimal digits"),
            );
        }
    }
    for (key, value) in &join.node_labels {
        let field = format!("join.node_labels.{key}");
        label_key(&field, key)?;
        label_value(&field, value)?;
    }
    for (name, value) in &join.kubelet_extra_args {
        let field = format!("join.kubelet_extra_args.{name}");
        let fits = !name.is_empty()
            && name
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            && !name.starts_with('-');
        if !fits {
            return refuse(
                field,
                "is not the name of a kubelet argument (write it without the dashes)",
            );
        }
        if value.chars().any(char::is_control) {
            return refuse(field, "has a control character");
        }
        if name == "node-labels" && !join.node_labels.is_empty() {
            return refuse(field, "stands beside join.node_labels: give one of them");
        }
    }
    for (index, taint) in join.taints.iter().flatten().enumerate() {
        let field = format!("join.taints[{index}]");
        label_key(&field, &taint.key)?;
        label_value(&field, taint.value.as_deref().unwrap_or_default())?;
    }
    if let Some(command) = &join.command {
        if command.is_empty() {
            return refuse("join.command", "is empty: name a program, or leave it out");
        }
        for (index, argument) in command.iter().enumerate() {
            no_control(&format!("join.command[{index}]"), argument)?;
        }
    }
    Ok(())
}

fn is_token(token: &str) -> bool {
    let part = |text: &str, length| {
        text.len() == length
            && text
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
    };
    token
        .split_once('.')
        .is_some_and(|(id, secret)| part(id, 6) && part(secret, 16))
}

fn is_label_part(text: &str) -> bool {
    (1..=LABEL_MAX).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.ends_with(|c: char| c.is_ascii_alphanumeric())
}

fn label_key(field: &str, key: &str) -> Result {
    let (prefix, name) = key
        .split_once('/')
        .map_or((None, key), |(prefix, name)| (Some(prefix), name));
    if !is_label_part(name) || prefix.is_some_and(|prefix| !is_dns_name(prefix)) {
        return refuse(field, format!("{key:?} is not a label key ([prefix/]name)"));
    }
    Ok(())
}

fn label_value(field: &str, value: &str) -> Result {
    if !value.is_empty() && !is_label_part(value) {
        return refuse(
            field,
            format!("{value:?} is not a label value (at most 63 of A-Z, a-z, 0-9, '-', '_', '.')"),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::definition::WorkerConfig;

    const GOOD: &str = "
base: {path: /b.qcow2, format: qcow2}
boot: {kernel: /k}
disk: {size: 4GiB}
memory: {size: 1GiB}
network: {bridge: br0, address: {addresses: [192.0.2.7/24], gateway: 192.0.2.1}}
join:
  api_version: kubeadm.k8s.io/v1beta4
  control_plane_endpoint: 'api.example:6443'
  token: abcdef.0123456789abcdef
  ca_cert_hashes: ['sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef']
  node_labels: {pool: general}
";

    fn parsed(text: &str) -> std::result::Result<WorkerConfig, String> {
        WorkerConfig::parse(text.as_bytes(), "worker.yaml").map_err(|error| error.to_string())
    }

    #[test]
    fn a_sound_definition_is_accepted() {
        parsed(GOOD).unwrap();
    }

    #[test]
    fn an_error_is_one_line_that_names_file_and_field() {
        let cases = [
            (
                "disk: {size: 4GiB}",
                "disk: {size: 4GiB, shape: round}",
                "worker.yaml: disk.shape: unknown field",
            ),
            (
                "size: 4GiB",
                "size: 5000",
                "worker.yaml: disk.size: 5000 bytes is not a multiple of 1 MiB",
            ),
            (
                "format: qcow2",
                "format: vmdk",
                "worker.yaml: base.format: unknown variant",
            ),
            (
                "bridge: br0,",
                "",
                "worker.yaml: network: needs \"bridge\" or \"tap\"",
            ),
            (
                "192.0.2.7/24",
                "192.0.2.7/33",
                "worker.yaml: network.address.addresses[0]: \"192.0.2.7/33\": the prefix",
            ),
            (
                "gateway: 192.0.2.1",
                "gateway: 'fe80::1'",
                "worker.yaml: network.address.gateway: fe80::1",
            ),
            (
                "gateway: 192.0.2.1",
                "router: 192.0.2.1",
                "worker.yaml: network.address.router: unknown field",
            ),
            (
                "v1beta4",
                "v1",
                "worker.yaml: join.api_version: unknown variant",
            ),
            (
                "api.example:6443",
                "api.example",
                "worker.yaml: join.control_plane_endpoint:",
            ),
            ("abcdef.0123", "SECRET.0123", "worker.yaml: join.token:"),
            (
                "sha256:0123",
                "sha256:123",
                "worker.yaml: join.ca_cert_hashes[0]:",
            ),
            (
                "pool: general",
                "'pool,x': general",
                "worker.yaml: join.node_labels.pool,x:",
            ),
            (
                "pool: general",
                "pool: 'a=b'",
                "worker.yaml: join.node_labels.pool:",
            ),
        ];
        for (from, to, expected) in cases {
            let message = parsed(&GOOD.replacen(from, to, 1)).expect_err(to);
            assert!(message.starts_with(expected), "{to}: {message}");
            assert!(!message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn no_message_and_no_debug_output_repeats_a_secret() {
        let message =
            parsed(&GOOD.replacen("abcdef.0123456789abcdef", "Sesame.0123456789abcdef", 1))
                .unwrap_err();
        assert!(!message.contains("Sesame"), "{message}");
        let text = format!("{GOOD}user_data: {{password: hunter2}}\n");
        let debug = format!("{:?}", parsed(&text).unwrap());
        assert!(
            !debug.contains("abcdef.0123") && !debug.contains("hunter2"),
            "{debug}"
        );
        assert!(debug.contains("token: (secret)"), "{debug}");
    }
}
