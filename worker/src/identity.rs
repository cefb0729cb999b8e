//! Who a worker is, derived from its name and definition, so that the same definition gives the same worker.

use drover_api::definition::{MacAddress, MacAddressError};
use sha2::{Digest, Sha256};
use uuid::Uuid;

/// The namespace of worker identities (RFC 9562 §5.5): the UUID of the DNS name `worker.drover.dev`.
const NAMESPACE: Uuid = Uuid::from_u128(0x2adf_d83a_c9cb_5977_bec8_587c_94dd_056a);

/// Who a worker is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// SMBIOS system UUID.
    pub uuid: Uuid,
    /// cloud-init's instance-id. Another definition is another instance, on which cloud-init runs everything again.
    pub instance_id: String,
    /// The network card's address where the definition has none.
    pub mac: MacAddress,
    /// The tap made for a worker on a bridge.
    pub tap: String,
}

impl Identity {
    /// The identity of the worker `name` made from the definition text `definition` (all the bytes that shape it).
    ///
    /// # Errors
    /// Never in practice: the derived address is a locally administered unicast one.
    pub fn derive(name: &str, definition: &[&[u8]]) -> Result<Self, MacAddressError> {
        let mut hash = Sha256::new();
        for part in [name.as_bytes()].iter().chain(definition) {
            // Lengths keep ("a", "bc") and ("ab", "c") apart.
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let uuid = Uuid::new_v5(&NAMESPACE, &hash.finalize());
        let bytes = uuid.as_bytes();
        Ok(Self {
            uuid,
            instance_id: format!("{name}-{}", uuid.simple()),
            mac: MacAddress::new([0x52, 0x54, bytes[0], bytes[1], bytes[2], bytes[3]])?,
            tap: format!("drv{:.10}", uuid.simple().to_string()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_depends_on_name_and_definition_and_nothing_else() {
        let identity = |name: &str, text: &[u8]| Identity::derive(name, &[text]).unwrap();
        let one = identity("a", b"x");
        assert_eq!(one, identity("a", b"x"));
        for other in [
            identity("b", b"x"),
            identity("a", b"y"),
            identity("ax", b""),
        ] {
            assert_ne!(one.uuid, other.uuid);
            assert_ne!(one.mac, other.mac);
            assert_ne!(one.tap, other.tap);
        }
        assert!(one.tap.len() <= 15 && one.instance_id.starts_with("a-"));
    }
}
