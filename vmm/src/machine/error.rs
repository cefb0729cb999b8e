//! Why a machine cannot be built: always with the definition's field where there is one, so that the message names what to change.

use std::error::Error;
use std::fmt;

use drover_api::types::{ApiError, ErrorCode};

/// A machine cannot be built as defined, on this host, now.
#[derive(Debug)]
pub struct BuildError {
    field: Option<String>,
    source: Box<dyn Error + Send + Sync>,
}

impl BuildError {
    /// Something about `field` (`disks[0].path`).
    pub fn of(field: impl Into<String>) -> impl FnOnce(Box<dyn Error + Send + Sync>) -> Self {
        let field = field.into();
        move |source| Self {
            field: Some(field),
            source,
        }
    }

    /// Something that no field is to blame for.
    pub fn host(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            field: None,
            source: source.into(),
        }
    }

    /// The field of the definition, if one is to blame.
    pub fn field(&self) -> Option<&str> {
        self.field.as_deref()
    }

    /// As the API tells it.
    pub fn into_api_error(self) -> ApiError {
        let error = ApiError::new(ErrorCode::Unavailable, one_line(&self.source.to_string()));
        match self.field {
            Some(field) => error.with_field(field),
            None => error,
        }
    }
}

/// Messages are one line each, whatever a library put into its own.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(field) = &self.field {
            write!(f, "{field}: ")?;
        }
        f.write_str(&one_line(&self.source.to_string()))
    }
}

impl Error for BuildError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_is_one_line_that_begins_with_the_field() {
        let error = BuildError::of("disks[0].path")("cannot open:\n  no such file".into());
        assert_eq!(
            error.to_string(),
            "disks[0].path: cannot open: no such file"
        );
        let api = error.into_api_error();
        assert_eq!(api.field.as_deref(), Some("disks[0].path"));
        assert_eq!(api.status(), 422);
        assert_eq!(api.to_string(), "disks[0].path: cannot open: no such file");
    }
}
