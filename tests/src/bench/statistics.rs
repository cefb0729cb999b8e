//! Medians, and how far chance may have moved a ratio of two of them.

use serde::Serialize;

use crate::pattern::Pattern;

/// The middle value; the mean of the two middle ones of an even number. NaN for none.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        length if length % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

/// A value with three decimals, as reports give it.
#[must_use]
pub fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// A ratio of two medians with its interval.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Ratio {
    /// The ratio of the medians.
    pub value: f64,
    /// Lower end of the 95 % interval.
    pub low: f64,
    /// Upper end of the 95 % interval.
    pub high: f64,
}

/// Resamples that an interval is taken from.
const RESAMPLES: usize = 4000;

/// The ratio of the medians of paired rounds, with a percentile bootstrap over the rounds. The resampling is the
/// same in every run, so that the same measurements give the same interval.
#[must_use]
pub fn ratio(ours: &[f64], theirs: &[f64]) -> Ratio {
    bootstrap(ours.len().min(theirs.len()), |rounds| {
        let of = |values: &[f64]| {
            median(
                &rounds
                    .iter()
                    .map(|&round| values[round])
                    .collect::<Vec<_>>(),
            )
        };
        of(ours) / of(theirs)
    })
}

/// The median of the ratios `above / below` of each round's pair, with its interval like [`ratio`]'s: for rounds whose two
/// measurements are neighbours in time on a machine that gets slower and faster.
#[must_use]
pub fn ratio_of_pairs(above: &[f64], below: &[f64]) -> Ratio {
    let ratios: Vec<f64> = above.iter().zip(below).map(|(a, b)| a / b).collect();
    bootstrap(ratios.len(), |rounds| {
        median(
            &rounds
                .iter()
                .map(|&round| ratios[round])
                .collect::<Vec<_>>(),
        )
    })
}

/// A statistic over the numbers of rounds, with the interval that it has over resamples of them.
fn bootstrap(rounds: usize, statistic: impl Fn(&[usize]) -> f64) -> Ratio {
    let mut pattern = Pattern::new(1);
    let mut pick = || {
        let mut bytes = [0_u8; 8];
        pattern.fill(&mut bytes);
        // The remainder of a 64-bit number by a few rounds: the bias is far below what can be seen.
        usize::try_from(u64::from_le_bytes(bytes) % rounds.max(1) as u64).unwrap_or(0)
    };
    let mut values: Vec<f64> = (0..RESAMPLES)
        .map(|_| statistic(&(0..rounds).map(|_| pick()).collect::<Vec<_>>()))
        .collect();
    values.sort_by(f64::total_cmp);
    let at = |share: usize| {
        values
            .get(RESAMPLES * share / 1000)
            .copied()
            .unwrap_or(f64::NAN)
    };
    Ratio {
        value: statistic(&(0..rounds).collect::<Vec<_>>()),
        low: at(25),
        high: at(975),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_of_the_sorted_values() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(&[4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn the_interval_holds_the_ratio_and_widens_with_the_spread() {
        let theirs = [10.0; 9];
        let steady = ratio(&[5.0, 5.1, 4.9, 5.0, 5.0, 5.1, 4.9, 5.0, 5.0], &theirs);
        let wild = ratio(&[3.0, 8.0, 5.0, 2.0, 9.0, 5.0, 4.0, 7.0, 5.0], &theirs);
        for interval in [steady, wild] {
            assert!(interval.low <= interval.value && interval.value <= interval.high);
            assert!((interval.value - 0.5).abs() < 1e-9);
        }
        assert!(wild.high - wild.low > 2.0 * (steady.high - steady.low));
    }
    #[test]
    fn the_ratio_of_pairs_does_not_care_how_fast_the_machine_was_in_a_round() {
        let below = [1.0, 4.0, 2.0, 8.0];
        let above = below.map(|time| time * 3.0);
        let ratio = ratio_of_pairs(&above, &below);
        for value in [ratio.low, ratio.value, ratio.high] {
            assert!((value - 3.0).abs() < 1e-9);
        }
    }
}
