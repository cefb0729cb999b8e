//! Numbers of bytes as definitions write them: an integer, or a string with a binary unit (IEC 80000-13).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A number of bytes; written as an integer, or as a string with a binary unit (`"512MiB"`, `"4GiB"`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// Why a text is no [`ByteSize`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ByteSizeError {
    /// Not a whole number followed by a unit.
    #[error("expected a whole number of up to {MAX_DIGITS} digits and a unit, such as \"512MiB\"")]
    Syntax,
    /// A unit that is not one of KiB, MiB, GiB and TiB.
    #[error("unknown unit \"{0}\", expected KiB, MiB, GiB or TiB")]
    Unit(String),
}

const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

/// So many digits before the largest unit cannot overflow 64 bits.
const MAX_DIGITS: usize = 7;

impl ByteSize {
    /// `count` times 2^20 bytes.
    #[must_use]
    pub const fn mib(count: u32) -> Self {
        Self((count as u64) << 20)
    }

    /// `count` times 2^30 bytes.
    #[must_use]
    pub const fn gib(count: u32) -> Self {
        Self((count as u64) << 30)
    }
}

impl FromStr for ByteSize {
    type Err = ByteSizeError;

    fn from_str(text: &str) -> Result<Self, ByteSizeError> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        if digits == 0 || digits > MAX_DIGITS {
            return Err(ByteSizeError::Syntax);
        }
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(|_| ByteSizeError::Syntax)?;
        match UNITS.iter().find(|(name, _)| *name == unit) {
            Some((_, shift)) => Ok(Self(number << shift)),
            None => Err(ByteSizeError::Unit(unit.to_owned())),
        }
    }
}

impl fmt::Display for ByteSize {
    /// In the largest unit that divides it, so that nothing is rounded.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS
            .iter()
            .find(|(_, shift)| self.0 != 0 && self.0.trailing_zeros() >= *shift)
        {
            Some((unit, shift)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

impl Serialize for ByteSize {
    /// As text where that reads back as the same number, as an integer otherwise.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = self.to_string();
        if text.parse() == Ok(*self) {
            serializer.serialize_str(&text)
        } else {
            serializer.serialize_u64(self.0)
        }
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl de::Visitor<'_> for Visitor {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes, or a string such as \"512MiB\"")
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(bytes))
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
                u64::try_from(bytes)
                    .map(ByteSize)
                    .map_err(|_| E::invalid_value(de::Unexpected::Signed(bytes), &self))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse()
                    .map_err(|error| E::custom(format!("{text:?}: {error}")))
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn units_are_binary() {
        let bytes = |text: &str| text.parse::<ByteSize>().map(|size| size.0);
        assert_eq!(bytes("0KiB"), Ok(0));
        assert_eq!(bytes("512MiB"), Ok(512 << 20));
        assert_eq!(bytes("4GiB"), Ok(4 << 30));
        assert_eq!(bytes("9999999TiB"), Ok(9_999_999 << 40));
    }

    #[test]
    fn a_wrong_unit_is_named_with_the_right_ones() {
        let error = "512MB".parse::<ByteSize>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown unit \"MB\", expected KiB, MiB, GiB or TiB"
        );
        assert_eq!(
            "512".parse::<ByteSize>(),
            Err(ByteSizeError::Unit(String::new()))
        );
        for text in ["", "MiB", "-1MiB", " 1MiB", "1.5GiB", "99999999TiB"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_size_survives_being_written_and_read(bytes: u64, shift in 0_u32..60) {
            let size = ByteSize(bytes >> shift << shift);
            let text = serde_json::to_string(&size).unwrap();
            prop_assert_eq!(serde_json::from_str::<ByteSize>(&text).unwrap(), size);
        }
    }
}
