//! Renders kubeadm's JoinConfiguration.
//!
//! | API version | `kubeletExtraArgs` |
//! |---|---|
//! | v1beta2, v1beta3 | mapping of name to value |
//! | v1beta4 | list of `{name, value}` |

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::definition::{JoinConfig, KubeadmVersion};

/// The JoinConfiguration with which `node` joins. Holds the token.
pub(crate) fn configuration(join: &JoinConfig, node: &str) -> Map<String, Value> {
    let mut registration = Map::new();
    registration.insert("name".to_owned(), json!(node));
    let arguments = kubelet_arguments(join);
    if !arguments.is_empty() {
        let rendered = match join.api_version {
            KubeadmVersion::V1Beta2 | KubeadmVersion::V1Beta3 => json!(arguments),
            KubeadmVersion::V1Beta4 => arguments
                .iter()
                .map(|(name, value)| json!({"name": name, "value": value}))
                .collect(),
        };
        registration.insert("kubeletExtraArgs".to_owned(), rendered);
    }
    if let Some(taints) = &join.taints {
        let rendered = taints.iter().map(|taint| {
            let mut fields = Map::new();
            fields.insert("key".to_owned(), json!(taint.key));
            if let Some(value) = &taint.value {
                fields.insert("value".to_owned(), json!(value));
            }
            fields.insert("effect".to_owned(), json!(taint.effect.as_str()));
            Value::Object(fields)
        });
        registration.insert("taints".to_owned(), rendered.collect());
    }
    let document = json!({
        "apiVersion": join.api_version.as_str(),
        "kind": "JoinConfiguration",
        "discovery": {
            "bootstrapToken": {
                "apiServerEndpoint": join.control_plane_endpoint,
                "token": join.token.expose(),
                "caCertHashes": join.ca_cert_hashes,
            },
        },
        "nodeRegistration": registration,
    });
    match document {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

fn kubelet_arguments(join: &JoinConfig) -> BTreeMap<String, String> {
    let mut arguments = join.kubelet_extra_args.clone();
    if !join.node_labels.is_empty() {
        let labels: Vec<String> = join
            .node_labels
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        arguments.insert("node-labels".to_owned(), labels.join(","));
    }
    arguments
}
