//! How a worker gets its addresses.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::de::value::MapAccessDeserializer;
use serde::{Deserialize, Deserializer, de};

/// How a worker gets its addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Address {
    /// From a DHCP server (IPv4) and router advertisements (IPv6).
    #[default]
    Dhcp,
    /// From the definition.
    Static(StaticAddress),
}

/// Addresses of the definition.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StaticAddress {
    /// Addresses with their prefix lengths (`192.0.2.7/24`); at least one.
    pub addresses: Vec<InterfaceAddress>,
    /// Where everything else goes.
    #[serde(default)]
    pub gateway: Option<IpAddr>,
    /// Name servers.
    #[serde(default)]
    pub nameservers: Vec<IpAddr>,
}

/// An address with its prefix length, as an interface has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The address.
    pub ip: IpAddr,
    /// Bits of its network: 0 to 32, or to 128.
    pub prefix: u8,
}

impl FromStr for InterfaceAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str = "expected an address and a prefix length such as \"192.0.2.7/24\"";
        let (ip, prefix) = text.split_once('/').ok_or(EXPECTED)?;
        let ip: IpAddr = ip.parse().map_err(|_| EXPECTED)?;
        let prefix: u8 = prefix.parse().map_err(|_| EXPECTED)?;
        if prefix > if ip.is_ipv4() { 32 } else { 128 } {
            return Err("the prefix is longer than the address");
        }
        Ok(Self { ip, prefix })
    }
}

impl fmt::Display for InterfaceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix)
    }
}

impl<'de> Deserialize<'de> for InterfaceAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse()
            .map_err(|reason| de::Error::custom(format!("{text:?}: {reason}")))
    }
}

impl<'de> Deserialize<'de> for Address {
    /// Written by hand so that an error inside the mapping keeps its own path and words.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Address;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"dhcp\" or a mapping with \"addresses\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Address, E> {
                match text {
                    "dhcp" => Ok(Address::Dhcp),
                    other => Err(E::invalid_value(de::Unexpected::Str(other), &self)),
                }
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Address, A::Error> {
                StaticAddress::deserialize(MapAccessDeserializer::new(map)).map(Address::Static)
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}
