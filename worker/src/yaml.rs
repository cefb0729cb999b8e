//! Writes YAML that YAML 1.1 and 1.2 readers understand alike.
//!
//! cloud-init reads YAML 1.1, where an unquoted `52:54:00:00:00:01` is a number in base 60, `0600` an octal one, `no` a
//! boolean and `2024-01-01` a date. Here every string is quoted, every mapping and sequence is in block style.

use std::fmt::Write;

use serde_json::{Map, Number, Value};

/// Words that YAML 1.1 does not read as strings.
const RESERVED: [&str; 9] = ["y", "n", "yes", "no", "on", "off", "true", "false", "null"];

/// `mapping` as a YAML document.
pub(crate) fn document(mapping: &Map<String, Value>) -> String {
    let mut text = String::new();
    if mapping.is_empty() {
        text.push_str("{}\n");
    } else {
        write_mapping(&mut text, mapping, 0);
    }
    text
}

fn indent(out: &mut String, depth: usize) {
    for _ in 0..depth {
        out.push_str("  ");
    }
}

fn write_mapping(out: &mut String, mapping: &Map<String, Value>, depth: usize) {
    for (index, (key, value)) in mapping.iter().enumerate() {
        // The first entry of a mapping in a sequence stands behind the dash.
        if index > 0 || !out.ends_with("- ") {
            indent(out, depth);
        }
        write_key(out, key);
        out.push(':');
        write_child(out, value, depth);
    }
}

fn write_child(out: &mut String, value: &Value, depth: usize) {
    match value {
        Value::Object(mapping) if !mapping.is_empty() => {
            out.push('\n');
            write_mapping(out, mapping, depth + 1);
        }
        Value::Array(items) if !items.is_empty() => {
            out.push('\n');
            write_sequence(out, items, depth + 1);
        }
        other => {
            out.push(' ');
            write_scalar(out, other);
            out.push('\n');
        }
    }
}

fn write_sequence(out: &mut String, items: &[Value], depth: usize) {
    for (index, item) in items.iter().enumerate() {
        if index > 0 || !out.ends_with("- ") {
            indent(out, depth);
        }
        out.push_str("- ");
        match item {
            Value::Object(mapping) if !mapping.is_empty() => write_mapping(out, mapping, depth + 1),
            Value::Array(inner) if !inner.is_empty() => write_sequence(out, inner, depth + 1),
            other => {
                write_scalar(out, other);
                out.push('\n');
            }
        }
    }
}

fn write_key(out: &mut String, key: &str) {
    if is_plain(key) {
        out.push_str(key);
    } else {
        write_string(out, key);
    }
}

fn is_plain(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
        && !RESERVED.contains(&text.to_ascii_lowercase().as_str())
}

fn write_scalar(out: &mut String, value: &Value) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Number(number) => write_number(out, number),
        Value::String(text) => write_string(out, text),
        // Only empty ones come here.
        Value::Array(_) => out.push_str("[]"),
        Value::Object(_) => out.push_str("{}"),
    }
}

fn write_number(out: &mut String, number: &Number) {
    if let Some(float) = number.as_f64().filter(|_| number.is_f64()) {
        // YAML 1.1 wants a point in every float and a sign in every exponent; plain decimals need no exponent.
        let text = float.to_string();
        out.push_str(&text);
        if !text.contains('.') {
            out.push_str(".0");
        }
    } else {
        out.push_str(&number.to_string());
    }
}

fn write_string(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            ' '..='~' => out.push(c),
            // Printable in both versions of YAML and not a line break in either.
            '\u{a1}'..='\u{2027}' | '\u{2030}'..='\u{d7ff}' => out.push(c),
            _ if u32::from(c) > 0xffff => {
                let _ = write!(out, "\\U{:08x}", u32::from(c));
            }
            _ => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::Bool),
            any::<i64>().prop_map(|n| Value::Number(n.into())),
            any::<f64>()
                .prop_filter_map("finite", Number::from_f64)
                .prop_map(Value::Number),
            "\\PC*".prop_map(Value::String),
            any::<String>().prop_map(Value::String),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
                prop::collection::btree_map("[a-z0-9:. -]{0,8}", inner, 0..4)
                    .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back_as_the_same_value(value in values()) {
            let mapping = Map::from_iter([("root".to_owned(), value)]);
            let text = document(&mapping);
            let read: Map<String, Value> = serde_norway::from_str(&text).expect(&text);
            prop_assert_eq!(read, mapping, "{}", text);
        }
    }

    #[test]
    fn strings_that_yaml_1_1_reads_as_something_else_are_quoted() {
        let mapping: Map<String, Value> = serde_norway::from_str(
            "mac: '52:54:00:00:00:01'\npermissions: '0600'\non: 'no'\nlist: [[a, b], {c: d}]\n",
        )
        .unwrap();
        assert_eq!(
            document(&mapping),
            "list:\n  - - \"a\"\n    - \"b\"\n  - c: \"d\"\nmac: \"52:54:00:00:00:01\"\n\"on\": \"no\"\npermissions: \"0600\"\n"
        );
    }
}
