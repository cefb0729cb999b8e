//! What YAML and JSON have in common, strictly: mappings have unique text keys, nothing has a tag, and a mapping is never written
//! as a sequence of its values (which serde would take for a struct).

use std::fmt;

use serde::de::value::{Error, MapDeserializer, SeqDeserializer};
use serde::de::{
    self, Deserialize, DeserializeSeed, Deserializer, EnumAccess, Error as _, IntoDeserializer,
    MapAccess, SeqAccess, Unexpected, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;

/// A text that was read and has no types yet.
#[derive(Debug)]
pub(super) enum Document {
    Null,
    Bool(bool),
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Text(String),
    Sequence(Vec<Document>),
    Mapping(Vec<(String, Document)>),
}

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Nested(MAX_NESTING).deserialize(deserializer)
    }
}

/// Sequences and mappings within each other. Reading them recurses, so that a text must not say how deep; no definition needs a quarter
/// of it.
const MAX_NESTING: usize = 64;

/// Reads a document that may nest so many levels deep.
#[derive(Clone, Copy)]
struct Nested(usize);

impl Nested {
    fn inside<E: de::Error>(self) -> Result<Self, E> {
        let left = self.0.checked_sub(1);
        left.map(Self)
            .ok_or_else(|| E::custom(format!("more than {MAX_NESTING} levels within each other")))
    }
}

impl<'de> DeserializeSeed<'de> for Nested {
    type Value = Document;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Document, D::Error> {
        deserializer.deserialize_any(DocumentVisitor(self))
    }
}

/// 2^53: below it, neighbouring floats are less than 2 apart.
const EXACT: f64 = 9_007_199_254_740_992.0;

struct DocumentVisitor(Nested);

impl<'de> Visitor<'de> for DocumentVisitor {
    type Value = Document;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a mapping, a sequence or a plain value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Document, E> {
        Ok(Document::Null)
    }

    fn visit_none<E: de::Error>(self) -> Result<Document, E> {
        Ok(Document::Null)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Document, E> {
        Ok(Document::Bool(value))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Document, E> {
        Ok(Document::Unsigned(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Document, E> {
        Ok(Document::Signed(value))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Document, E> {
        // 2.0 is an integer to JSON Schema, as far as a float counts exactly.
        match format!("{value:.0}").parse() {
            Ok(integer) if value.fract() == 0.0 && value.abs() < EXACT => {
                Ok(Document::Signed(integer))
            }
            _ if value.is_finite() => Ok(Document::Float(value)),
            _ => Err(E::custom("infinity and NaN are no values of a definition")),
        }
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Document, E> {
        Ok(Document::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Document, A::Error> {
        let mut values = Vec::new();
        let inside = self.0.inside()?;
        while let Some(value) = items.next_element_seed(inside)? {
            values.push(value);
        }
        Ok(Document::Sequence(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Document, A::Error> {
        let mut mapping = Vec::new();
        let mut keys = std::collections::HashSet::new();
        let inside = self.0.inside()?;
        while let Some(key) = entries.next_key::<String>()? {
            let value = entries.next_value_seed(inside)?;
            if !keys.insert(key.clone()) {
                return Err(de::Error::custom(format!("duplicate field \"{key}\"")));
            }
            mapping.push((key, value));
        }
        Ok(Document::Mapping(mapping))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, _: A) -> Result<Document, A::Error> {
        Err(de::Error::custom("YAML tags are not accepted"))
    }
}

impl Document {
    fn unexpected(&self) -> Unexpected<'_> {
        match self {
            Self::Null => Unexpected::Other("null"),
            Self::Bool(value) => Unexpected::Bool(*value),
            Self::Unsigned(value) => Unexpected::Unsigned(*value),
            Self::Signed(value) => Unexpected::Signed(*value),
            Self::Float(value) => Unexpected::Float(*value),
            Self::Text(value) => Unexpected::Str(value),
            Self::Sequence(_) => Unexpected::Other("sequence"),
            Self::Mapping(_) => Unexpected::Other("mapping"),
        }
    }

    fn is_no(&self, expected: &str) -> Error {
        Error::invalid_type(self.unexpected(), &expected)
    }
}

impl IntoDeserializer<'_> for Document {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Document {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self {
            Self::Null => visitor.visit_unit(),
            Self::Bool(value) => visitor.visit_bool(value),
            Self::Unsigned(value) => visitor.visit_u64(value),
            Self::Signed(value) => visitor.visit_i64(value),
            Self::Float(value) => visitor.visit_f64(value),
            Self::Text(value) => visitor.visit_string(value),
            Self::Sequence(values) => {
                let mut values = SeqDeserializer::new(values.into_iter());
                let value = visitor.visit_seq(&mut values)?;
                values.end()?;
                Ok(value)
            }
            Self::Mapping(entries) => {
                let mut entries = MapDeserializer::new(entries.into_iter());
                let value = visitor.visit_map(&mut entries)?;
                entries.end()?;
                Ok(value)
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self {
            Self::Null => visitor.visit_none(),
            value => visitor.visit_some(value),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self {
            Self::Mapping(_) => self.deserialize_any(visitor),
            other => Err(other.is_no("a mapping")),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self {
            Self::Text(name) => visitor.visit_enum(Variant { name, value: None }),
            Self::Mapping(mut entries) => match (entries.pop(), entries.is_empty()) {
                (Some((name, value)), true) => visitor.visit_enum(Variant {
                    name,
                    value: Some(value),
                }),
                _ => Err(Error::custom("expected a mapping with exactly one field")),
            },
            other => Err(Error::invalid_type(other.unexpected(), &visitor)),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf
        unit unit_struct seq tuple tuple_struct map identifier ignored_any
    }
}

/// A variant of an enum: `name`, or `{name: value}`.
struct Variant {
    name: String,
    value: Option<Document>,
}

impl<'de> EnumAccess<'de> for Variant {
    type Error = Error;
    type Variant = VariantValue;

    fn variant_seed<S: DeserializeSeed<'de>>(
        self,
        seed: S,
    ) -> Result<(S::Value, VariantValue), Error> {
        let name = seed.deserialize(self.name.into_deserializer())?;
        Ok((name, VariantValue(self.value)))
    }
}

struct VariantValue(Option<Document>);

impl VariantValue {
    fn required(self) -> Result<Document, Error> {
        self.0.ok_or_else(|| {
            Error::custom("the value is missing: expected a mapping with exactly one field")
        })
    }
}

impl<'de> VariantAccess<'de> for VariantValue {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        match self.0 {
            None => Ok(()),
            Some(_) => Err(Error::invalid_type(
                Unexpected::Other("mapping"),
                &"a string",
            )),
        }
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, Error> {
        seed.deserialize(self.required()?)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Error> {
        self.required()?.deserialize_any(visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.required()?.deserialize_struct("", fields, visitor)
    }
}
