//! How a worker joins its cluster.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::secret::Secret;

/// How a worker joins its cluster.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JoinConfig {
    /// The kubeadm API that the image's kubeadm reads.
    pub api_version: KubeadmVersion,
    /// The API server, `host:port`.
    pub control_plane_endpoint: String,
    /// Bootstrap token, `[a-z0-9]{6}.[a-z0-9]{16}`.
    pub token: Secret<String>,
    /// Pins of the cluster's CA, `sha256:` and 64 hexadecimal digits; at least one.
    pub ca_cert_hashes: Vec<String>,
    /// Labels of the node.
    #[serde(default)]
    pub node_labels: BTreeMap<String, String>,
    /// Arguments of the kubelet, without the dashes.
    #[serde(default)]
    pub kubelet_extra_args: BTreeMap<String, String>,
    /// Taints of the node; kubeadm's own where absent.
    #[serde(default)]
    pub taints: Option<Vec<Taint>>,
    /// What to run instead of `kubeadm join --config /etc/kubeadm/join.yaml`; the program and its arguments.
    #[serde(default)]
    pub command: Option<Vec<String>>,
}

/// Versions of kubeadm's configuration API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum KubeadmVersion {
    /// Kubernetes 1.15 to 1.22 (served to 1.26).
    #[serde(rename = "kubeadm.k8s.io/v1beta2")]
    V1Beta2,
    /// Kubernetes 1.22 to 1.30.
    #[serde(rename = "kubeadm.k8s.io/v1beta3")]
    V1Beta3,
    /// Kubernetes 1.31 and newer: extra arguments are a list.
    #[serde(rename = "kubeadm.k8s.io/v1beta4")]
    V1Beta4,
}

/// A taint of the node.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Taint {
    /// Its key, a label's name.
    pub key: String,
    /// Its value.
    #[serde(default)]
    pub value: Option<String>,
    /// What it does to pods that do not tolerate it.
    pub effect: TaintEffect,
}

/// What a taint does to pods that do not tolerate it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum TaintEffect {
    /// They are not placed here.
    NoSchedule,
    /// They are placed elsewhere if possible.
    PreferNoSchedule,
    /// They are moved away.
    NoExecute,
}

impl KubeadmVersion {
    /// As `apiVersion` names it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V1Beta2 => "kubeadm.k8s.io/v1beta2",
            Self::V1Beta3 => "kubeadm.k8s.io/v1beta3",
            Self::V1Beta4 => "kubeadm.k8s.io/v1beta4",
        }
    }
}

impl TaintEffect {
    /// As Kubernetes writes it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoSchedule => "NoSchedule",
            Self::PreferNoSchedule => "PreferNoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }
}
