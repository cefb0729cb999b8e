//! The three names of a file: as given (Rock Ridge), as UCS-2 (Joliet) and as an 8.3 name of interchange level 1 (ECMA-119 10.1).

use std::collections::BTreeSet;

use super::IsoError;

/// Joliet allows 64 UCS-2 characters.
const JOLIET_MAX: usize = 64;
/// A longer Rock Ridge name would need a continuation area of its own.
const ROCK_RIDGE_MAX: usize = 120;

/// Checks a name against what Rock Ridge and Joliet can both hold.
pub(super) fn check(name: &str) -> Result<(), IsoError> {
    let refuse = |reason| {
        Err(IsoError::Name {
            name: name.to_owned(),
            reason,
        })
    };
    if name.is_empty() || name == "." || name == ".." {
        return refuse("is not a file name");
    }
    if let Some(bad) = name
        .chars()
        .find(|c| c.is_control() || "*/:;?\\".contains(*c))
    {
        return refuse(match bad {
            '*' | '/' | ':' | ';' | '?' | '\\' => "has one of * / : ; ? \\",
            _ => "has a control character",
        });
    }
    if name.chars().any(|c| u32::from(c) > 0xffff) {
        return refuse("has a character outside the basic multilingual plane");
    }
    if name.chars().count() > JOLIET_MAX {
        return refuse("is longer than 64 characters");
    }
    if name.len() > ROCK_RIDGE_MAX {
        return refuse("is longer than 120 bytes");
    }
    Ok(())
}

/// A level 1 identifier (`USER_DAT.;1`) that is not in `taken`, which it joins.
pub(super) fn level_1(name: &str, taken: &mut BTreeSet<String>) -> String {
    let (stem, extension) = match name.rsplit_once('.') {
        Some((stem, extension)) if !stem.is_empty() => {
            (d_characters(stem, 8), d_characters(extension, 3))
        }
        _ => (d_characters(name, 8), String::new()),
    };
    let mut identifier = format!("{stem}.{extension};1");
    let mut number = 0u32;
    while taken.contains(&identifier) {
        let digits = number.to_string();
        let kept: String = stem
            .chars()
            .take(8usize.saturating_sub(digits.len()))
            .collect();
        identifier = format!("{kept}{digits}.{extension};1");
        number += 1;
    }
    taken.insert(identifier.clone());
    identifier
}

/// At most `limit` d-characters (A-Z, 0-9, _), each from one character of `text`; at least one.
fn d_characters(text: &str, limit: usize) -> String {
    let mapped: String = text
        .chars()
        .take(limit)
        .map(|c| {
            if c.is_ascii_alphanumeric() {
                c.to_ascii_uppercase()
            } else {
                '_'
            }
        })
        .collect();
    if mapped.is_empty() {
        "_".to_owned()
    } else {
        mapped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_names_that_mangle_alike_stay_two_names() {
        let mut taken = BTreeSet::new();
        assert_eq!(level_1("user-data", &mut taken), "USER_DAT.;1");
        assert_eq!(level_1("user_data", &mut taken), "USER_DA0.;1");
        assert_eq!(level_1("user-date.yaml", &mut taken), "USER_DAT.YAM;1");
    }

    #[test]
    fn names_that_cannot_be_held_are_refused_with_the_reason() {
        let message = |name: &str| check(name).unwrap_err().to_string();
        assert!(message("a/b").contains("has one of"));
        assert!(message("..").contains("is not a file name"));
        assert!(message(&"x".repeat(65)).contains("64 characters"));
        assert!(message(&"\u{4e2d}".repeat(60)).contains("120 bytes"));
        assert!(message("\u{1f600}").contains("multilingual"));
    }
}
