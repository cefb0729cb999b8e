//! The NoCloud seed: an ISO 9660 image labelled `cidata` that cloud-init reads on first boot.
//!
//! | file | what |
//! |---|---|
//! | `user-data` | cloud-config: SSH keys, files, commands, the join |
//! | `meta-data` | instance-id, local-hostname |
//! | `network-config` | addresses, by MAC |
//!
//! The same definition gives the same bytes. The image holds the join token: it is written with mode 0600.

mod cloud_config;
pub mod iso;
mod network;

use drover_api::definition::parse_as;
use serde_json::{Map, Value, json};

pub use cloud_config::JOIN_PATH;

use self::iso::{IsoError, IsoFile};
use crate::definition::WorkerConfig;
use crate::identity::Identity;
use crate::yaml;

/// The label by which cloud-init finds a seed.
const LABEL: &str = "cidata";

/// Why a seed cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SeedError {
    /// The user's addition to the cloud-config cannot be used.
    #[error("{field}: {reason}")]
    UserData {
        /// `user_data` or `user_data_file`.
        field: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// The image cannot be written.
    #[error("seed: {0}")]
    Iso(#[from] IsoError),
}

impl SeedError {
    fn user_data(reason: impl Into<String>) -> Self {
        Self::UserData {
            field: "user_data",
            reason: reason.into(),
        }
    }
}

/// The bytes of the seed of worker `name`. `user_data_file` is the text of the file that the definition names, if it does.
///
/// # Errors
/// The user's addition is not a cloud-config.
pub fn build(
    config: &WorkerConfig,
    name: &str,
    identity: &Identity,
    user_data_file: Option<&[u8]>,
) -> Result<Vec<u8>, SeedError> {
    let field = if user_data_file.is_some() {
        "user_data_file"
    } else {
        "user_data"
    };
    let in_field = |error| match error {
        SeedError::UserData { reason, .. } => SeedError::UserData { field, reason },
        other @ SeedError::Iso(_) => other,
    };
    let extra = match (user_data_file, &config.user_data) {
        (Some(text), _) => mapping_of(text).map_err(in_field)?,
        (None, Some(value)) => match value.expose() {
            Value::Object(mapping) => mapping.clone(),
            Value::String(text) => mapping_of(text.as_bytes())?,
            _ => {
                return Err(SeedError::user_data(
                    "must be a mapping, or the text of one",
                ));
            }
        },
        (None, None) => Map::new(),
    };
    let hostname = config.hostname.as_deref().unwrap_or(name);
    let user_data =
        cloud_config::render(config, hostname, &identity.instance_id, extra).map_err(in_field)?;
    let meta_data = yaml::document(&Map::from_iter([
        ("instance-id".to_owned(), json!(identity.instance_id)),
        ("local-hostname".to_owned(), json!(hostname)),
    ]));
    let network_config = yaml::document(&network::config(config.network.as_ref(), identity.mac));
    let files = [
        ("user-data", &user_data),
        ("meta-data", &meta_data),
        ("network-config", &network_config),
    ];
    Ok(iso::build(
        LABEL,
        &files.map(|(name, text)| IsoFile {
            name,
            contents: text.as_bytes(),
        }),
    )?)
}

/// Reads a cloud-config as a mapping.
fn mapping_of(text: &[u8]) -> Result<Map<String, Value>, SeedError> {
    let other = text.starts_with(b"#!")
        || (text.starts_with(b"#") && text.trim_ascii_start().starts_with(b"#include"));
    if other || text.starts_with(b"Content-Type:") {
        return Err(SeedError::user_data(
            "only a cloud-config can be merged; put scripts into write_files and runcmd",
        ));
    }
    match parse_as::<Option<Value>>(text, "") {
        Ok(None) => Ok(Map::new()),
        Ok(Some(Value::Object(mapping))) => Ok(mapping),
        Ok(Some(_)) => Err(SeedError::user_data(
            "not a mapping: a cloud-config has keys such as runcmd",
        )),
        Err(error) => Err(SeedError::user_data(format!(
            "not YAML: {}",
            error.reason()
        ))),
    }
}
