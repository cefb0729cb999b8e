//! The one error of definitions: a line that says where, in which field, and why.

use std::fmt;

/// Why a definition was refused.
///
/// Displays as one line, `vm.yaml: disks[0].format: unknown variant "vmdk", expected "raw" or "qcow2"`; the parts that are not
/// known are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefinitionError {
    source: Option<String>,
    field: Option<String>,
    reason: String,
}

impl DefinitionError {
    /// An error in `field` (a path such as `disks[0].format`).
    pub fn new(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self {
            source: None,
            field: Some(field.into()),
            reason: one_line(&reason.into()),
        }
    }

    /// An error of the whole text.
    pub fn whole(reason: impl Into<String>) -> Self {
        Self {
            source: None,
            field: None,
            reason: one_line(&reason.into()),
        }
    }

    /// Names what was read: a file, or the request.
    #[must_use]
    pub fn with_source(mut self, source: &str) -> Self {
        self.source = Some(one_line(source));
        self
    }

    /// What was read, where known.
    #[must_use]
    pub fn source_name(&self) -> Option<&str> {
        self.source.as_deref()
    }

    /// The path of the field, where the error has one.
    #[must_use]
    pub fn field(&self) -> Option<&str> {
        self.field.as_deref()
    }

    /// Why, without source and field.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

impl fmt::Display for DefinitionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in [&self.source, &self.field].into_iter().flatten() {
            write!(f, "{part}: ")?;
        }
        f.write_str(&self.reason)
    }
}

impl std::error::Error for DefinitionError {}

/// Messages quote what the user wrote; a line break or control character in it must not break the line.
fn one_line(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let escaped = c.is_control().then(|| c.escape_default());
            let plain = escaped.is_none().then_some(c);
            escaped.into_iter().flatten().chain(plain)
        })
        .collect()
}
