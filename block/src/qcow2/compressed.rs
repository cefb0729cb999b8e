//! Compressed clusters: read, never written. The last one inflated is kept, because a guest reads it piece by piece.

use std::io::Read as _;
use std::sync::Arc;

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress, inflate_flags};
use ruzstd::decoding::StreamingDecoder;

use super::Qcow2;
use super::header::Compression;
use crate::buffers::Pages;
use crate::error::IoError;

/// The largest Zstandard window for which memory is taken, in bytes. Encoders have no use for one that exceeds the cluster, which
/// has 2 MiB at most.
const MAX_WINDOW: u64 = 16 * 1024 * 1024;

/// The last cluster inflated, by host offset.
#[derive(Default)]
pub(super) struct Inflated(Option<(u64, Arc<[u8]>)>);

impl Qcow2 {
    /// The bytes of the compressed cluster at `host`.
    pub(crate) async fn inflate(&self, host: u64, bytes: u64) -> Result<Arc<[u8]>, IoError> {
        if let Some((at, cluster)) = &self.inflated.borrow().0
            && *at == host
        {
            return Ok(Arc::clone(cluster));
        }
        if host >= self.file.end() {
            return Err(IoError::corrupt(
                host,
                "compressed data lies past the end of the file",
            ));
        }
        let cluster_size = self.geometry().cluster_size() as usize;
        // The count is of whole sectors and bounded by its width in the entry: at most twice a cluster.
        let mut input = Pages::zeroed(
            usize::try_from(bytes)
                .unwrap_or(0)
                .min(2 * cluster_size + 512),
        );
        self.file
            .read(host, input.span())
            .await
            .map_err(|e| IoError::host("read compressed data", host, &e))?;
        let cluster = match self.header.compression {
            Compression::Zlib => inflate(input.bytes(), cluster_size),
            Compression::Zstd => decode_zstd(input.bytes(), cluster_size),
        };
        let cluster: Arc<[u8]> = cluster
            .ok_or(IoError::corrupt(
                host,
                "compressed data does not inflate to a cluster",
            ))?
            .into();
        self.inflated.borrow_mut().0 = Some((host, Arc::clone(&cluster)));
        Ok(cluster)
    }
}

/// Inflates a raw deflate stream to exactly `length` bytes; what follows in `input` belongs to somebody else.
fn inflate(input: &[u8], length: usize) -> Option<Vec<u8>> {
    let mut output = vec![0; length];
    let flags = inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let mut state = Box::<DecompressorOxide>::default();
    let (status, _, written) = decompress(&mut state, input, &mut output, 0, flags);
    let good = matches!(status, TINFLStatus::Done | TINFLStatus::HasMoreOutput);
    (good && written == length).then_some(output)
}

/// Decodes a Zstandard frame that begins with exactly `length` bytes; what follows in `input` belongs to somebody else.
fn decode_zstd(input: &[u8], length: usize) -> Option<Vec<u8>> {
    let mut output = vec![0; length];
    let mut decoder = StreamingDecoder::new_with_max_window_size(input, MAX_WINDOW).ok()?;
    decoder.read_exact(&mut output).ok()?;
    Some(output)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_stream_that_ends_early_is_not_a_cluster() {
        // A stored block of three bytes.
        let stream = [1, 3, 0, 0xfc, 0xff, b'a', b'b', b'c', 0xee];
        assert_eq!(inflate(&stream, 3).as_deref(), Some(&b"abc"[..]));
        assert_eq!(inflate(&stream, 4), None);
        assert_eq!(inflate(&stream[..6], 3), None);
    }

    proptest! {
        #[test]
        fn garbage_never_inflates_to_more_than_a_cluster(input in proptest::collection::vec(any::<u8>(), 0..600)) {
            if let Some(output) = inflate(&input, 512) {
                prop_assert_eq!(output.len(), 512);
            }
        }

        #[test]
        fn a_damaged_zstd_frame_is_decoded_or_refused(at in 0usize..200, value: u8, cut in 0usize..400) {
            let bytes: Vec<u8> = (0..3000u32).map(|n| (n % 7 + n / 100) as u8).collect();
            let mut frame = ruzstd::encoding::compress_to_vec(&bytes[..], ruzstd::encoding::CompressionLevel::Fastest);
            prop_assert_eq!(decode_zstd(&frame, 3000), Some(bytes));
            prop_assert_eq!(decode_zstd(&frame, 3001), None);
            let at = at % frame.len();
            frame[at] = value;
            frame.truncate(frame.len().saturating_sub(cut));
            if let Some(output) = decode_zstd(&frame, 3000) {
                prop_assert_eq!(output.len(), 3000);
            }
        }
    }
}
