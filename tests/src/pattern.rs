//! Data for transfers: a fast stream of bytes that depends on a seed and on the position, and its checksum.
//!
//! A block that lands at the wrong place, twice or not at all changes the checksum.

/// A stream of pseudo-random bytes (xorshift64*, Vigna 2016), the same for the same seed.
pub struct Pattern {
    state: u64,
}

impl Pattern {
    /// Starts the stream of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        }
    }

    /// Fills a buffer with the next bytes; its length is a multiple of eight, except the last one's.
    pub fn fill(&mut self, buffer: &mut [u8]) {
        for chunk in buffer.chunks_mut(8) {
            self.state ^= self.state >> 12;
            self.state ^= self.state << 25;
            self.state ^= self.state >> 27;
            let word = self.state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

/// A checksum over a stream of bytes in order (FNV-1a over words of eight bytes).
pub struct Checksum {
    state: u64,
    pending: Vec<u8>,
}

impl Default for Checksum {
    fn default() -> Self {
        Self {
            state: 0xcbf2_9ce4_8422_2325,
            pending: Vec::with_capacity(8),
        }
    }
}

impl Checksum {
    /// Takes the next bytes, in pieces of any length.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !self.pending.is_empty() && !bytes.is_empty() {
            self.pending.push(bytes[0]);
            bytes = &bytes[1..];
            if let Ok(word) = <[u8; 8]>::try_from(&self.pending[..]) {
                self.mix(word);
                self.pending.clear();
            }
        }
        let mut words = bytes.chunks_exact(8);
        for word in &mut words {
            if let Ok(word) = <[u8; 8]>::try_from(word) {
                self.mix(word);
            }
        }
        self.pending.extend_from_slice(words.remainder());
    }

    /// The checksum as text.
    #[must_use]
    pub fn finish(mut self) -> String {
        let mut word = [0_u8; 8];
        word[..self.pending.len()].copy_from_slice(&self.pending);
        self.mix(word);
        format!("{:016x}", self.state)
    }

    fn mix(&mut self, word: [u8; 8]) {
        self.state = (self.state ^ u64::from_le_bytes(word)).wrapping_mul(0x0000_0100_0000_01b3);
        self.state ^= self.state >> 29;
    }
}

/// The checksum of the first `length` bytes of a seed's stream.
#[must_use]
pub fn expected(seed: u64, length: u64) -> String {
    let mut pattern = Pattern::new(seed);
    let mut checksum = Checksum::default();
    let mut buffer = vec![0_u8; 1 << 16];
    let mut left = length;
    while left > 0 {
        let count = usize::try_from(left)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        pattern.fill(&mut buffer[..count]);
        checksum.update(&buffer[..count]);
        left -= u64::try_from(count).unwrap_or(left);
    }
    checksum.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_does_not_depend_on_how_the_stream_is_cut_but_on_every_byte() {
        let mut data = vec![0_u8; 1003];
        Pattern::new(7).fill(&mut data);
        let sum = |pieces: usize, data: &[u8]| {
            let mut checksum = Checksum::default();
            data.chunks(pieces).for_each(|piece| checksum.update(piece));
            checksum.finish()
        };
        assert_eq!(sum(1003, &data), sum(7, &data));
        assert_eq!(sum(1003, &data), expected(7, 1003));
        data[500] ^= 1;
        assert_ne!(sum(1003, &data), expected(7, 1003));
    }
}
