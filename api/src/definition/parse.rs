//! From text to types. YAML and JSON go through one strict document (no duplicate keys, no tags, only text keys), so that a
//! definition means the same in both, and serde's errors carry the path of the field.

use serde::de::DeserializeOwned;

use super::document::Document;
use super::{DefinitionError, VmConfig};

/// A text larger than this is no definition, bytes.
const MAX_TEXT: usize = 1 << 20;

/// Brackets open at once; the YAML reader itself gives up at half of it.
const MAX_DEPTH: usize = 256;

/// Reads the definition of a VM, YAML or JSON. `source` (a file's name) begins the messages. Does not [`VmConfig::validate`].
///
/// # Errors
/// The text is not YAML, or does not have the shape of a [`VmConfig`].
pub fn parse(text: &[u8], source: &str) -> Result<VmConfig, DefinitionError> {
    parse_as(text, source)
}

/// Reads any other definition with the same strictness and the same messages.
///
/// # Errors
/// The text is not YAML, or does not have the shape of a `T`.
pub fn parse_as<T: DeserializeOwned>(text: &[u8], source: &str) -> Result<T, DefinitionError> {
    let result = document(text).and_then(|document| {
        serde_path_to_error::deserialize(document).map_err(|error| {
            let path = error.path().to_string();
            let reason = plain(&error.into_inner().to_string());
            if path == "." {
                DefinitionError::whole(reason)
            } else {
                DefinitionError::new(path, reason)
            }
        })
    });
    result.map_err(|error| error.with_source(source))
}

fn document(text: &[u8]) -> Result<Document, DefinitionError> {
    if text.len() > MAX_TEXT {
        return Err(DefinitionError::whole(format!(
            "{} bytes are too many for a definition, the limit is {MAX_TEXT}",
            text.len()
        )));
    }
    // libyaml refuses some JSON (escaped surrogate pairs), so JSON is read as what it is. What begins like JSON may still be YAML.
    if text.trim_ascii_start().first() == Some(&b'{')
        && let Ok(document) = serde_json::from_slice(text)
    {
        return Ok(document);
    }
    if nests_too_deep(text) {
        let reason = format!("more than {MAX_DEPTH} brackets are open at once");
        return Err(DefinitionError::whole(reason));
    }
    serde_norway::from_slice(text)
        .map_err(|error| DefinitionError::whole(plain(&error.to_string())))
}

/// serde's wording for people who write definitions: names in quotation marks, numbers bare.
fn plain(message: &str) -> String {
    let mut text = String::with_capacity(message.len());
    for (index, part) in message.split('`').enumerate() {
        let bare = part.parse::<f64>().is_ok() || matches!(part, "true" | "false");
        if index % 2 == 0 || bare {
            text.push_str(part);
        } else {
            text.extend(["\"", part, "\""]);
        }
    }
    let text = text.replacen("type: unit value", "type: null", 1);
    for (rust, plain) in WORDS {
        if let Some(before) = text.strip_suffix(rust) {
            return format!("{before}{plain}");
        }
    }
    text
}

/// What serde calls by the names of Rust's types, always at the end of a message.
const WORDS: [(&str, &str); 6] = [
    ("expected u8", "expected an integer, 0 to 255"),
    ("expected u16", "expected an integer, 0 to 65535"),
    ("expected u32", "expected an integer, 0 to 4294967295"),
    ("expected u64", "expected an integer, not negative"),
    ("expected i32", "expected an integer"),
    ("expected a boolean", "expected true or false"),
];

/// libyaml's time grows with the square of the depth of brackets, so that depth is bounded first. Brackets in strings count as
/// well: no definition has that many that stay open.
fn nests_too_deep(text: &[u8]) -> bool {
    let mut depth = 0_usize;
    text.iter().any(|byte| {
        match byte {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth > MAX_DEPTH
    })
}
