//! MAC addresses (IEEE 802 EUI-48) as definitions write them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use uuid::Uuid;

use super::NAMESPACE;

/// The address of one network card; never a group address, never all zero. Written `52:54:00:12:34:56`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MacAddress([u8; 6]);

/// Why a text is no [`MacAddress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MacAddressError {
    /// Not six hexadecimal pairs.
    #[error("expected six pairs of hexadecimal digits such as \"52:54:00:12:34:56\"")]
    Syntax,
    /// The lowest bit of the first byte is set.
    #[error("a group (multicast) address cannot be a card's own: the first byte must be even")]
    Group,
    /// All zero.
    #[error("the address of all zeros belongs to nobody")]
    Zero,
}

impl MacAddress {
    /// # Errors
    /// A group address or all zeros.
    pub fn new(octets: [u8; 6]) -> Result<Self, MacAddressError> {
        if octets == [0; 6] {
            Err(MacAddressError::Zero)
        } else if octets[0] & 1 != 0 {
            Err(MacAddressError::Group)
        } else {
            Ok(Self(octets))
        }
    }

    /// The same address for the same names: `52:54:00` and three bytes of their hash.
    #[must_use]
    pub fn derived(vm: &str, net: &str) -> Self {
        let hash = Uuid::new_v5(&NAMESPACE, format!("{vm}/{net}").as_bytes()).into_bytes();
        Self([0x52, 0x54, 0x00, hash[0], hash[1], hash[2]])
    }

    /// The bytes in the order in which they are sent.
    #[must_use]
    pub fn octets(self) -> [u8; 6] {
        self.0
    }
}

impl FromStr for MacAddress {
    type Err = MacAddressError;

    fn from_str(text: &str) -> Result<Self, MacAddressError> {
        let mut octets = [0; 6];
        let mut pairs = text.split(':');
        for octet in &mut octets {
            let pair = pairs.next().ok_or(MacAddressError::Syntax)?;
            if pair.len() != 2 || !pair.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(MacAddressError::Syntax);
            }
            *octet = u8::from_str_radix(pair, 16).map_err(|_| MacAddressError::Syntax)?;
        }
        if pairs.next().is_some() {
            return Err(MacAddressError::Syntax);
        }
        Self::new(octets)
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl Serialize for MacAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MacAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse()
            .map_err(|error| de::Error::custom(format!("{text:?}: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_reads_back_as_it_is_written() {
        let mac: MacAddress = "52:54:00:AB:cd:0f".parse().unwrap();
        assert_eq!(mac.octets(), [0x52, 0x54, 0, 0xab, 0xcd, 0x0f]);
        assert_eq!(mac.to_string(), "52:54:00:ab:cd:0f");
    }

    #[test]
    fn what_is_no_unicast_address_is_refused_with_its_reason() {
        let refused = |text: &str| text.parse::<MacAddress>().unwrap_err();
        for text in [
            "",
            "52:54:00:00:00",
            "52:54:00:00:00:01:02",
            "5:54:00:00:00:01",
            "+2:54:00:00:00:01",
            "52-54-00-00-00-01",
        ] {
            assert_eq!(refused(text), MacAddressError::Syntax, "{text}");
        }
        assert_eq!(refused("53:54:00:00:00:01"), MacAddressError::Group);
        assert_eq!(refused("00:00:00:00:00:00"), MacAddressError::Zero);
    }

    #[test]
    fn derived_addresses_depend_on_both_names() {
        let mac = MacAddress::derived("a", "eth0");
        assert_eq!(mac, MacAddress::derived("a", "eth0"));
        assert_ne!(mac, MacAddress::derived("b", "eth0"));
        assert_ne!(mac, MacAddress::derived("a", "eth1"));
        assert_eq!(mac.octets()[..3], [0x52, 0x54, 0x00]);
    }
}
