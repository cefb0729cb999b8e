//! Values that must not reach a log, a message or a listing.

use std::fmt;

use serde::{Deserialize, Deserializer, de};

/// A value whose `Debug` says nothing, and which is never serialised.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret<T>(T);

impl<T> Secret<T> {
    /// Hides `value`.
    pub fn new(value: T) -> Self {
        Self(value)
    }

    /// The value, for the one place that needs it.
    pub fn expose(&self) -> &T {
        &self.0
    }
}

impl<T> fmt::Debug for Secret<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Secret<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // serde's own message would quote what it found.
        T::deserialize(deserializer).map(Self).map_err(|_| {
            de::Error::custom("has another type than expected (its value is secret and not shown)")
        })
    }
}
