//! What firmware can ask for.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// Makes a blob when it is selected.
pub type Build = Box<dyn Fn() -> Vec<u8> + Send>;
/// Hears what a guest wrote to a blob, from its beginning.
pub type Written = Box<dyn Fn(&[u8]) + Send>;

/// A blob.
pub enum Item {
    /// These bytes.
    Bytes(Vec<u8>),
    /// Made anew whenever it is selected from its beginning, and cut or filled with zeros to `length`: the directory promises a size
    /// before anybody selects.
    Built {
        /// Bytes of it.
        length: u32,
        /// Makes it.
        build: Build,
        /// As it was made last.
        bytes: Vec<u8>,
    },
    /// `length` bytes of a file; what it no longer has reads as zero.
    File {
        /// The file.
        file: File,
        /// The first byte.
        from: u64,
        /// Bytes of it.
        length: u32,
    },
    /// What the guest may write, by DMA.
    Writable {
        /// As it stands.
        bytes: Vec<u8>,
        /// Hears of each write.
        written: Written,
    },
}

impl std::fmt::Debug for Item {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self {
            Self::Bytes(_) => "Bytes",
            Self::Built { .. } => "Built",
            Self::File { .. } => "File",
            Self::Writable { .. } => "Writable",
        };
        write!(f, "{kind}({} bytes)", self.length())
    }
}

impl Item {
    /// A blob that is made when it is selected, of at most `length` bytes.
    #[must_use]
    pub fn built(length: u32, build: impl Fn() -> Vec<u8> + Send + 'static) -> Self {
        Self::Built {
            length,
            build: Box::new(build),
            bytes: Vec::new(),
        }
    }

    /// A number of 16 bits.
    #[must_use]
    pub fn u16(value: u16) -> Self {
        Self::Bytes(value.to_le_bytes().to_vec())
    }

    /// A number of 32 bits.
    #[must_use]
    pub fn u32(value: u32) -> Self {
        Self::Bytes(value.to_le_bytes().to_vec())
    }

    /// A number of 64 bits.
    #[must_use]
    pub fn u64(value: u64) -> Self {
        Self::Bytes(value.to_le_bytes().to_vec())
    }

    /// Bytes of it.
    #[must_use]
    pub fn length(&self) -> u32 {
        match self {
            Self::Bytes(bytes) | Self::Writable { bytes, .. } => {
                u32::try_from(bytes.len()).unwrap_or(u32::MAX)
            }
            Self::Built { length, .. } | Self::File { length, .. } => *length,
        }
    }

    /// Somebody is about to read it from its beginning.
    pub(super) fn select(&mut self) {
        if let Self::Built {
            length,
            build,
            bytes,
        } = self
        {
            let mut built = build();
            if built.len() > *length as usize {
                tracing::error!(
                    promised = *length,
                    made = built.len(),
                    "a firmware table is longer than what was promised, and is cut"
                );
            }
            built.resize(*length as usize, 0);
            *bytes = built;
        }
    }

    /// Reads from byte `at` on; what lies past the end is zero.
    pub(super) fn read(&self, at: u32, data: &mut [u8]) {
        data.fill(0);
        let length = data.len().min(self.length().saturating_sub(at) as usize);
        let Some(data) = data.get_mut(..length) else {
            return;
        };
        match self {
            Self::Bytes(bytes) | Self::Built { bytes, .. } | Self::Writable { bytes, .. } => {
                let from = bytes.get(at as usize..).unwrap_or_default();
                let length = from.len().min(length);
                if let (Some(to), Some(from)) = (data.get_mut(..length), from.get(..length)) {
                    to.copy_from_slice(from);
                }
            }
            Self::File { file, from, .. } => {
                let from = from.saturating_add(at.into());
                let mut done = 0;
                while let Some(rest) = data.get_mut(done..).filter(|rest| !rest.is_empty()) {
                    match file.read_at(rest, from.saturating_add(done as u64)) {
                        Ok(0) => break,
                        Ok(read) => done += read,
                        Err(error) => {
                            tracing::error!(%error, "cannot read a file that firmware asked for");
                            break;
                        }
                    }
                }
            }
        }
    }

    /// Writes from byte `at` on; false if this item cannot be written there.
    pub(super) fn write(&mut self, at: u32, data: &[u8]) -> bool {
        let Self::Writable { bytes, written } = self else {
            return false;
        };
        let end = (at as usize).saturating_add(data.len());
        let Some(place) = bytes.get_mut(at as usize..end) else {
            return false;
        };
        place.copy_from_slice(data);
        written(bytes);
        true
    }
}
