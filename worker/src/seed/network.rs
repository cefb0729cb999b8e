//! The seed's `network-config`: version 2 (netplan's), matched by MAC address.
//!
//! Written with what cloud-init 22 (Debian 12) understands under every renderer: `set-name` beside `match`, routes to
//! `0.0.0.0/0` and `::/0` instead of `default`, and no top-level `network`.

use drover_api::definition::MacAddress;
use serde_json::{Map, Value, json};

use crate::definition::{Address, NetworkConfig};

/// The name that the card gets in the guest.
const INTERFACE: &str = "eth0";

/// The network-config of a worker; one without a card is told to configure nothing.
pub(super) fn config(network: Option<&NetworkConfig>, derived: MacAddress) -> Map<String, Value> {
    let mut root = Map::new();
    root.insert("version".to_owned(), json!(2));
    root.insert(
        "ethernets".to_owned(),
        match network {
            Some(network) => json!({INTERFACE: interface(network, derived)}),
            None => json!({}),
        },
    );
    root
}

fn interface(network: &NetworkConfig, derived: MacAddress) -> Map<String, Value> {
    let mac = network.mac.unwrap_or(derived);
    let mut fields = Map::new();
    fields.insert("match".to_owned(), json!({"macaddress": mac.to_string()}));
    fields.insert("set-name".to_owned(), json!(INTERFACE));
    if let Some(mtu) = network.mtu {
        fields.insert("mtu".to_owned(), json!(mtu));
    }
    match &network.address {
        Address::Dhcp => {
            fields.insert("dhcp4".to_owned(), json!(true));
        }
        Address::Static(address) => {
            let addresses: Vec<String> =
                address.addresses.iter().map(ToString::to_string).collect();
            fields.insert("addresses".to_owned(), json!(addresses));
            if let Some(gateway) = address.gateway {
                let everywhere = if gateway.is_ipv4() {
                    "0.0.0.0/0"
                } else {
                    "::/0"
                };
                fields.insert(
                    "routes".to_owned(),
                    json!([{"to": everywhere, "via": gateway}]),
                );
            }
            if !address.nameservers.is_empty() {
                fields.insert(
                    "nameservers".to_owned(),
                    json!({"addresses": address.nameservers}),
                );
            }
        }
    }
    fields
}
