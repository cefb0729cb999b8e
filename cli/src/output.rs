//! How results and progress reach the person or the program.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use drover_worker::{Observer, Reached, Step};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::args::OutputMode;
use crate::failure::Failure;

/// Prints `value` as JSON, or what `text` makes of it.
pub(crate) fn print<T: Serialize>(
    mode: OutputMode,
    value: &T,
    text: impl FnOnce(&T) -> String,
) -> Result<(), Failure> {
    let written = match mode {
        OutputMode::Json => {
            serde_json::to_string_pretty(value).map_err(|error| Failure::host(error.to_string()))?
        }
        OutputMode::Text => text(value).trim_end().to_owned(),
    };
    if written.is_empty() {
        return Ok(());
    }
    match writeln!(io::stdout(), "{written}") {
        // Who closed the pipe has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|error| Failure::host(format!("standard output: {error}"))),
    }
}

/// Rows with a heading, in columns as wide as they need to be.
pub(crate) fn table(heading: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = heading.iter().map(|cell| cell.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let heading: Vec<String> = heading.iter().map(|cell| (*cell).to_owned()).collect();
    let mut text = String::new();
    for row in [&heading].into_iter().chain(rows) {
        let mut line = String::new();
        for (width, cell) in widths.iter().zip(row) {
            line.push_str(&format!("{cell:width$}  "));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Names and values below each other.
pub(crate) fn fields(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    pairs
        .iter()
        .map(|(name, value)| format!("{name:width$}  {value}\n"))
        .collect()
}

/// A duration as a person reads it: three digits or so.
pub(crate) fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    if seconds < 0.1 {
        format!("{:.1} ms", seconds * 1e3)
    } else if seconds < 10.0 {
        format!("{seconds:.2} s")
    } else {
        format!("{seconds:.1} s")
    }
}

/// Bytes as a person reads them.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value.fract() == 0.0 {
        format!("{value} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// A time in UTC, from seconds since 1970: `2024-02-29 12:00:00 UTC`.
pub(crate) fn date(seconds: u64) -> String {
    let (days, rest) = (seconds / 86400, seconds % 86400);
    // Days since the first of March of year 0, so that leap days come last; eras of 400 years.
    let day = days + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1460 + day / 36524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    let year = era * 400 + year + next;
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// The table of what happened when.
pub(crate) fn timeline(steps: &[Reached]) -> String {
    let mut before = Duration::ZERO;
    let rows: Vec<Vec<String>> = steps
        .iter()
        .map(|reached| {
            let took = reached.at.saturating_sub(before);
            before = before.max(reached.at);
            vec![
                reached.step.label().to_owned(),
                duration(reached.at),
                format!("+{}", duration(took)),
            ]
        })
        .collect();
    table(&["STEP", "AT", "AFTER"], &rows)
}

/// Shows progress on a terminal's standard error; elsewhere only the console, and that only if it is wanted.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    follow: bool,
}

impl Progress {
    /// `goal` is what the person waits for.
    pub(crate) fn new(mode: OutputMode, goal: &str, follow: bool) -> Self {
        let bar = (mode == OutputMode::Text && io::stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{spinner} {elapsed:>4}  {msg}")
                .unwrap_or_else(|_| ProgressStyle::default_spinner());
            let bar = ProgressBar::new_spinner()
                .with_style(style)
                .with_message(goal.to_owned());
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        Self { bar, follow }
    }

    /// Takes the progress off the screen.
    pub(crate) fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}

/// What a person waits for after a step.
fn next(step: Step) -> &'static str {
    match step {
        Step::Overlay | Step::Seed => "making the disk and the seed durable",
        Step::Durable => "building the machine",
        Step::Vmm | Step::Tap => "starting the guest",
        Step::Started => "waiting for the kernel",
        Step::Kernel => "waiting for cloud-init",
        Step::CloudInit => "waiting for the guest's commands",
        Step::Configured | Step::Joined => "done",
    }
}

impl Observer for Progress {
    fn reached(&mut self, reached: Reached) {
        if let Some(bar) = &self.bar {
            bar.println(format!(
                "  {:>9}  {}",
                duration(reached.at),
                reached.step.label()
            ));
            bar.set_message(next(reached.step));
        }
    }

    fn console(&mut self, bytes: &[u8]) {
        if self.follow {
            let write = || {
                let mut stderr = io::stderr().lock();
                // A person who has closed the terminal does not need the console any more.
                let _ = stderr.write_all(bytes).and_then(|()| stderr.flush());
            };
            match &self.bar {
                Some(bar) => bar.suspend(write),
                None => write(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let text = table(
            &["A", "LONG"],
            &[vec!["xyz".into(), "1".into()], vec!["x".into(), "2".into()]],
        );
        assert_eq!(text, "A    LONG\nxyz  1\nx    2\n");
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_709_208_000, "2024-02-29 12:00:00 UTC"),
            (4_294_967_295, "2106-02-07 06:28:15 UTC"),
        ] {
            assert_eq!(date(seconds), text);
        }
    }

    #[test]
    fn a_timeline_shows_when_and_how_long_after() {
        let at = |step, ms| Reached {
            step,
            at: Duration::from_millis(ms),
        };
        let text = timeline(&[
            at(Step::Overlay, 2),
            at(Step::Kernel, 1500),
            at(Step::Joined, 61_000),
        ]);
        assert_eq!(
            text,
            "STEP     AT      AFTER\noverlay  2.0 ms  +2.0 ms\nkernel   1.50 s  +1.50 s\njoined   61.0 s  +59.5 s\n"
        );
    }

    #[test]
    fn numbers_of_bytes_have_one_decimal_at_most() {
        assert_eq!(
            [0, 512, 196_608, 1 << 30, (1 << 30) + (1 << 29)].map(bytes),
            ["0 B", "512 B", "192 KiB", "1 GiB", "1.5 GiB"]
        );
    }
}
