//! Zeros that a guest writes as data, and that need not be stored as such ([`DetectZeroes`]).
//!
//! ```text
//!   write   | data | 0 0 0 | 0 0 0 | data 0 |      parts as long as what the image can clear as a whole
//!              └ written   └ zero clusters └ written
//! ```

use crate::buffers::Span;
use crate::disk::Core;
use crate::error::IoError;
use crate::options::DetectZeroes;

impl Core {
    /// Writes guest bytes, or clears where whole parts of them are zero.
    pub(crate) async fn write_detecting(&self, offset: u64, span: Span<'_>) -> Result<(), IoError> {
        let unit = self.chain.top().discard_granularity();
        let unmap = self.detect_zeroes == DetectZeroes::Unmap && self.discard;
        let mut done = 0;
        while done < span.len() {
            let (length, zero) = next(offset + done as u64, span, done, unit);
            let at = offset + done as u64;
            if zero {
                self.write_zeroes(at, length as u64, unmap).await?;
            } else {
                self.write(at, span.part(done, length)).await?;
            }
            done += length;
        }
        Ok(())
    }
}

/// The longest part from `from` on that is treated alike: bytes, and whether they are whole units of zeros. `at` is where they go.
fn next(at: u64, span: Span<'_>, from: usize, unit: u64) -> (usize, bool) {
    let mut length = 0;
    let mut alike = None;
    while from + length < span.len() {
        let at = at + length as u64;
        let rest = span.part(from + length, span.len());
        let to_border = usize::try_from(unit - at % unit).unwrap_or(usize::MAX);
        let part = rest.part(0, to_border);
        let zero = part.len() as u64 == unit && part.is_zero();
        if *alike.get_or_insert(zero) != zero {
            break;
        }
        length += part.len();
    }
    (length, alike == Some(true))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffers::Pages;

    #[test]
    fn only_whole_units_of_zeros_are_zeros() {
        let mut memory = Pages::zeroed(40);
        memory.bytes_mut()[21] = 1;
        let span = memory.span();
        // Units of 8 bytes; the write begins in the middle of one.
        assert_eq!(next(4, span, 0, 8), (4, false));
        assert_eq!(next(8, span, 4, 8), (16, true));
        assert_eq!(next(24, span, 20, 8), (8, false));
        assert_eq!(next(32, span, 28, 8), (8, true));
        assert_eq!(next(40, span, 36, 8), (4, false));
    }
}
