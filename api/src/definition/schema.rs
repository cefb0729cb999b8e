//! JSON schemas (OpenAPI 3.1) of the types that are not written as they are declared, exactly as strict as their parsers.

use std::borrow::Cow;

use utoipa::openapi::schema::AdditionalProperties;
use utoipa::openapi::{Object, ObjectBuilder, OneOfBuilder, Ref, RefOr, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use super::{ByteSize, MacAddress, SerialConfig, TapConfig, limits};

macro_rules! named {
    ($($type:ident),*) => {$(
        impl ToSchema for $type {
            fn name() -> Cow<'static, str> {
                Cow::Borrowed(stringify!($type))
            }
        }
    )*};
}

named!(ByteSize, MacAddress, SerialConfig, TapConfig);

impl PartialSchema for ByteSize {
    fn schema() -> RefOr<Schema> {
        let bytes = ObjectBuilder::new()
            .schema_type(Type::Integer)
            .minimum(Some(0));
        let bytes = bytes.maximum(Some(i64::MAX));
        OneOfBuilder::new()
            .description(Some(
                "A number of bytes: an integer, or a string with a binary unit.",
            ))
            .item(bytes)
            .item(text("^[0-9]{1,7}(KiB|MiB|GiB|TiB)$"))
            .into()
    }
}

impl PartialSchema for MacAddress {
    fn schema() -> RefOr<Schema> {
        let mut schema = text("^(?!00(:00){5}$)[0-9A-Fa-f][02468ACEace](:[0-9A-Fa-f]{2}){5}$");
        schema.description = Some("A unicast MAC address (IEEE 802 EUI-48).".into());
        schema.into()
    }
}

impl PartialSchema for TapConfig {
    fn schema() -> RefOr<Schema> {
        let interface = || text("^[!-$&-.0-9;-~]{1,15}$");
        let descriptor = ObjectBuilder::new().schema_type(Type::Integer);
        let descriptor = descriptor.minimum(Some(3)).maximum(Some(i32::MAX));
        let descriptors = utoipa::openapi::ArrayBuilder::new()
            .items(descriptor)
            .min_items(Some(1))
            .max_items(Some(*limits::QUEUE_PAIRS.end() as usize))
            .unique_items(true);
        OneOfBuilder::new()
            .description(Some("The host side of a network card; exactly one field."))
            .item(
                strict("An existing tap interface, opened by name.")
                    .property("name", interface())
                    .required("name"),
            )
            .item(
                strict("Open descriptors of a tap, one a queue pair, inherited by the process.")
                    .property("fds", descriptors)
                    .required("fds"),
            )
            .item(
                strict("A tap to create under this name, gone with the process.")
                    .property("create", interface())
                    .required("create"),
            )
            .into()
    }
}

impl PartialSchema for SerialConfig {
    fn schema() -> RefOr<Schema> {
        let mode = |name: &str, what: &str| {
            let value = ObjectBuilder::new()
                .schema_type(Type::String)
                .enum_values(Some([name]));
            strict(what).property("mode", value).required("mode")
        };
        let path = |max: usize| {
            let path = ObjectBuilder::new().schema_type(Type::String);
            path.min_length(Some(1)).max_length(Some(max))
        };
        OneOfBuilder::new()
            .description(Some("Where the first serial port goes."))
            .item(mode("none", "Nowhere."))
            .item(mode("stdio", "The process's standard input and output."))
            .item(
                mode("file", "Output appended to a file, made with mode 0600 where absent.")
                    .property("path", path(limits::PATH))
                    .required("path"),
            )
            .item(mode("pty", "A new pseudo-terminal, whose path `GET /v1/vm` tells."))
            .item(
                mode("socket", "A unix socket that serves one client at a time; it is first sent what it missed, at most `scrollback` (64KiB where absent, at most 16MiB).")
                    .property("path", path(limits::SOCKET_PATH))
                    .required("path")
                    .property("scrollback", Ref::from_schema_name("ByteSize")),
            )
            .into()
    }
}

fn text(pattern: &str) -> Object {
    ObjectBuilder::new()
        .schema_type(Type::String)
        .pattern(Some(pattern))
        .build()
}

fn strict(description: &str) -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(Type::Object)
        .description(Some(description))
        .additional_properties(Some(AdditionalProperties::FreeForm(false)))
}
