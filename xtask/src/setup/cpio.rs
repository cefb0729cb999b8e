//! A writer of `newc` cpio archives, the format of an initramfs
//! (Linux: Documentation/driver-api/early-userspace/buffer-format.rst).
//!
//! Written here, so that owners, modes and times are the same whoever builds it.

/// The mode bits of a folder, a symbolic link and a file.
const S_IFDIR: u32 = 0o040_000;
const S_IFLNK: u32 = 0o120_000;
const S_IFREG: u32 = 0o100_000;
const S_IFCHR: u32 = 0o020_000;

/// An archive being written.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    /// Adds a folder; parents come first.
    pub(crate) fn folder(&mut self, name: &str) {
        self.entry(name, S_IFDIR | 0o755, (0, 0), &[]);
    }

    /// Adds an executable file.
    pub(crate) fn program(&mut self, name: &str, content: &[u8]) {
        self.entry(name, S_IFREG | 0o755, (0, 0), content);
    }

    /// Adds a file.
    pub(crate) fn file(&mut self, name: &str, content: &[u8]) {
        self.entry(name, S_IFREG | 0o644, (0, 0), content);
    }

    /// Adds a symbolic link.
    pub(crate) fn link(&mut self, name: &str, target: &str) {
        self.entry(name, S_IFLNK | 0o777, (0, 0), target.as_bytes());
    }

    /// Adds a character device.
    pub(crate) fn device(&mut self, name: &str, major: u32, minor: u32) {
        self.entry(name, S_IFCHR | 0o600, (major, minor), &[]);
    }

    /// The finished archive, padded to a multiple of 512 bytes.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        pad(&mut self.bytes, 512);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let size = content.len();
        let name_size = name.len() + 1;
        let links = 1;
        let fields = [
            self.entries,
            mode,
            0,
            0,
            links,
            0,
            u32::try_from(size).unwrap_or(u32::MAX),
            0,
            0,
            device.0,
            device.1,
            u32::try_from(name_size).unwrap_or(u32::MAX),
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        pad(&mut self.bytes, 4);
        self.bytes.extend_from_slice(content);
        pad(&mut self.bytes, 4);
    }
}

fn pad(bytes: &mut Vec<u8>, alignment: usize) {
    bytes.resize(bytes.len().next_multiple_of(alignment), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_header_and_content_starts_on_a_multiple_of_four_and_the_archive_ends_with_its_trailer()
    {
        let mut archive = Archive::default();
        archive.folder("bin");
        archive.program("bin/a", b"12345");
        archive.link("init", "bin/a");
        archive.device("console", 5, 1);
        let bytes = archive.finish();
        let heads: Vec<usize> = (0..bytes.len() - 6)
            .filter(|&at| &bytes[at..at + 6] == b"070701")
            .collect();
        assert_eq!(heads.len(), 5);
        assert!(heads.iter().all(|at| at % 4 == 0));
        assert_eq!(bytes.len() % 512, 0);
        assert!(bytes.windows(10).any(|window| window == b"TRAILER!!!"));
    }
}
