//! From text to types. YAML and JSON go through one strict document (no duplicate keys, no tags, only text keys), so that a
//! definition means the same in both, and serde's errors carry the path of the field.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, DeserializeOwned, Deserializer, MapAccess, SeqAccess};
use serde_json::{Map, Number, Value};

use super::{DefinitionError, VmConfig};

/// A text larger than this is no definition, bytes.
const MAX_TEXT: usize = 1 << 20;

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
    let result = document(text).and_then(|Document(value)| {
        serde_path_to_error::deserialize(value).map_err(|error| {
            let path = error.path().to_string();
            let reason = error.into_inner().to_string().replace('`', "\"");
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
    serde_norway::from_slice(text)
        .map_err(|error| DefinitionError::whole(error.to_string().replace('`', "\"")))
}

/// A document whose mappings have unique text keys.
struct Document(Value);

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DocumentVisitor).map(Self)
    }
}

struct DocumentVisitor;

impl<'de> de::Visitor<'de> for DocumentVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a mapping, a sequence or a plain value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value)
            .map(Value::Number)
            .ok_or_else(|| E::custom("infinity and NaN are no values of a definition"))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(Document(value)) = items.next_element()? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let Document(value) = entries.next_value()?;
            if map.contains_key(&key) {
                return Err(de::Error::custom(format!("duplicate field \"{key}\"")));
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}
