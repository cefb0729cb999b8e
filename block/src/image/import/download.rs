//! Bytes from an HTTP(S) server into a file beside the target, taken up where they were cut off.
//!
//! ```text
//!  TARGET.download        the bytes so far
//!  TARGET.download.json   of which address, which version of it (ETag or Last-Modified), how many bytes are durable
//! ```
//!
//! A rest is asked for with `Range` and `If-Range`: a server that has another version by now, or knows no ranges, sends the whole,
//! and the download begins anew. Only bytes that were made durable count, because a power cut can leave a file longer than its
//! contents.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use ureq::http::{HeaderMap, Response, StatusCode, header};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body};

use super::{CHUNK, ImportOptions, hex};
use crate::error::{Error, ErrorKind};
use crate::image::fresh;
use crate::image::job::{Monitor, Way};
use crate::lock::{self, Access};

/// Redirections followed.
const REDIRECTS: u32 = 5;
/// Failures in a row, without a byte between them, after which a download is given up for now.
const FAILURES: u32 = 4;
/// Bytes between two points from which a download can be taken up.
const CHECKPOINT: u64 = 32 << 20;
/// How long the server may be silent.
const SILENCE: Duration = Duration::from_secs(60);
const CONNECT: Duration = Duration::from_secs(30);
/// What the file of the state may have.
const STATE_LIMIT: u64 = 64 << 10;

/// What is known about a download that has begun.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct State {
    /// SHA-256 of the address, which may hold secrets itself.
    address: String,
    /// The version that the bytes are of, as the server calls it.
    version: Option<String>,
    /// How long it is in all.
    length: Option<u64>,
    /// How many bytes are durable.
    durable: u64,
}

/// The address as messages show it: without credentials, query and fragment.
pub(super) fn redacted(url: &str) -> String {
    let url = url.split(['?', '#']).next().unwrap_or_default();
    match url.split_once("://") {
        Some((scheme, rest)) => {
            let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            let host = host.rsplit('@').next().unwrap_or_default();
            format!("{scheme}://{host}{path}")
        }
        None => url.to_owned(),
    }
}

/// Removes a download and what is known about it.
pub(super) fn discard(target: &Path) {
    // What cannot be removed is replaced by the next import.
    let _ = std::fs::remove_file(fresh::beside(target, ".download"));
    let _ = std::fs::remove_file(fresh::beside(target, ".download.json"));
}

/// Downloads all of `url`; the file, which others may read, is locked until it is closed.
pub(super) fn fetch(
    url: &str,
    target: &Path,
    options: &ImportOptions,
    monitor: &mut dyn Monitor,
) -> Result<(PathBuf, File), Error> {
    let shown = PathBuf::from(redacted(url));
    let agent = agent(url, &shown, options)?;
    let path = fresh::beside(target, ".download");
    let file = fresh::open_own(File::options().create(true).truncate(false), &path)?;
    lock::acquire(&path, file.as_fd(), Access::Write)?;
    let state_path = fresh::beside(target, ".download.json");
    monitor.phase("downloading");
    let mut download = Download {
        url,
        state: load(&state_path, url, &file),
        most: options.max_download_bytes,
        way: Way::new(monitor, 0),
        agent,
        shown,
        file: &file,
        path: &path,
        state_path,
    };
    if let Err(error) = download.run() {
        // What has come is of use for another try, unless there is nothing or it is not wanted.
        if download.state.durable == 0 || matches!(error.kind, ErrorKind::Size(_)) {
            discard(target);
        }
        return Err(error);
    }
    drop(download);
    lock::release(file.as_fd(), Access::Write);
    lock::acquire(&path, file.as_fd(), Access::Read)?;
    Ok((path, file))
}

/// What is known about a download of the same address, as far as the file bears it out.
fn load(path: &Path, url: &str, file: &File) -> State {
    let address = hex(&Sha256::digest(url.as_bytes()));
    let read = || {
        let mut text = String::new();
        let from = File::open(path).ok()?;
        from.take(STATE_LIMIT).read_to_string(&mut text).ok()?;
        serde_json::from_str::<State>(&text).ok()
    };
    let length = file.metadata().map_or(0, |seen| seen.len());
    let usable = |state: &State| {
        let complete = state.length == Some(state.durable);
        state.address == address && state.durable <= length && (complete || state.version.is_some())
    };
    read().filter(usable).unwrap_or_else(|| State {
        address,
        ..State::default()
    })
}

fn agent(url: &str, shown: &Path, options: &ImportOptions) -> Result<Agent, Error> {
    let secure = url
        .get(..8)
        .is_some_and(|start| start.eq_ignore_ascii_case("https://"));
    let plain = url
        .get(..7)
        .is_some_and(|start| start.eq_ignore_ascii_case("http://"));
    if !secure && !plain {
        let reason = "only http:// and https:// addresses can be";
        return Err(Error::new(shown, ErrorKind::Download(reason.into())));
    }
    let roots = match &options.ca_file {
        Some(path) => authorities(path)?,
        None => {
            let found = rustls_native_certs::load_native_certs().certs;
            let own = found
                .iter()
                .map(|der| Certificate::from_der(der).to_owned());
            own.collect()
        }
    };
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::from(roots.into_iter()))
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .build();
    let config = Agent::config_builder()
        .tls_config(tls)
        // Who asked for a secret way is not led off it.
        .https_only(secure)
        .max_redirects(REDIRECTS)
        .http_status_as_error(false)
        .user_agent(concat!("drover/", env!("CARGO_PKG_VERSION")))
        .accept_encoding("identity")
        .timeout_resolve(Some(CONNECT))
        .timeout_connect(Some(CONNECT))
        .timeout_recv_response(Some(SILENCE))
        .timeout_per_read(Some(SILENCE))
        .build();
    Ok(config.new_agent())
}

fn authorities(path: &Path) -> Result<Vec<Certificate<'static>>, Error> {
    const LIMIT: u64 = 16 << 20;
    let mut pem = Vec::new();
    File::open(path)
        .and_then(|file| file.take(LIMIT).read_to_end(&mut pem))
        .map_err(|e| Error::io(path, "read its certificates", e))?;
    let found: Vec<_> = ureq::tls::parse_pem(&pem)
        .filter_map(|item| match item {
            Ok(ureq::tls::PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    if found.is_empty() {
        let reason = "has no certificate in PEM form";
        return Err(Error::new(path, ErrorKind::Unsupported(reason.into())));
    }
    Ok(found)
}

/// How an attempt ended that did not bring all.
enum Cut {
    /// It may go better the next time.
    Again(String),
    /// It will not.
    Over(Error),
}

impl From<Error> for Cut {
    fn from(error: Error) -> Self {
        Self::Over(error)
    }
}

struct Download<'a> {
    url: &'a str,
    shown: PathBuf,
    agent: Agent,
    file: &'a File,
    path: &'a Path,
    state_path: PathBuf,
    state: State,
    most: u64,
    way: Way<'a>,
}

impl Download<'_> {
    fn run(&mut self) -> Result<(), Error> {
        let mut failures = 0;
        while self.state.length != Some(self.state.durable) {
            let before = self.state.durable;
            let reason = match self.attempt() {
                Ok(()) => return Ok(()),
                Err(Cut::Over(error)) => return Err(error),
                Err(Cut::Again(reason)) => reason,
            };
            failures = if self.state.durable > before {
                0
            } else {
                failures + 1
            };
            if failures == FAILURES {
                let have = self.state.durable;
                let reason = match have {
                    0 => reason,
                    _ => format!(
                        "{reason}; {have} bytes are kept: the same command goes on from there"
                    ),
                };
                return Err(self.failed(reason));
            }
            std::thread::sleep(Duration::from_millis(250 << failures));
        }
        self.way.set_total(self.state.durable);
        self.way.at(&self.shown, self.state.durable, 0)
    }

    fn failed(&self, reason: impl Into<String>) -> Error {
        Error::new(&self.shown, ErrorKind::Download(reason.into()))
    }

    /// One request and what comes of it.
    fn attempt(&mut self) -> Result<(), Cut> {
        let mut request = self.agent.get(self.url);
        let from = self.state.durable;
        if let Some(version) = self.state.version.as_deref().filter(|_| from > 0) {
            request = request
                .header(header::RANGE, format!("bytes={from}-"))
                .header(header::IF_RANGE, version);
        }
        let response = request.call().map_err(|error| self.refused(&error))?;
        self.begin(&response)?;
        self.receive(response.into_body())
    }

    fn refused(&self, error: &ureq::Error) -> Cut {
        use ureq::Error as E;
        match error {
            E::Timeout(_) | E::ConnectionFailed => Cut::Again(error.to_string()),
            E::Io(error) if !is_tls(error) => Cut::Again(error.to_string()),
            E::Io(error) => Cut::Over(self.failed(tls_reason(&error.to_string()))),
            E::Rustls(error) => Cut::Over(self.failed(tls_reason(&error.to_string()))),
            E::HostNotFound => Cut::Over(self.failed("the name of its host is not known: look for a mistake in it")),
            E::RequireHttpsOnly(_) => Cut::Over(self.failed(
                "it leads from https to plain http, which is refused: state that address if that is what is wanted",
            )),
            E::TooManyRedirects => Cut::Over(self.failed(format!("it leads on more than {REDIRECTS} times"))),
            other => Cut::Over(self.failed(other.to_string())),
        }
    }

    /// Looks at the head of a response, and makes the file fit what is going to come.
    fn begin(&mut self, response: &Response<Body>) -> Result<(), Cut> {
        let status = response.status();
        let headers = response.headers();
        if let Some(coding) = text(headers, &header::CONTENT_ENCODING).filter(|c| *c != "identity")
        {
            let reason =
                format!("the server sends it encoded as `{coding}`, which was not asked for");
            return Err(Cut::Over(self.failed(reason)));
        }
        match status {
            StatusCode::OK => {
                let length = text(headers, &header::CONTENT_LENGTH).and_then(|l| l.parse().ok());
                self.restart(version(headers), length)?;
            }
            StatusCode::PARTIAL_CONTENT => {
                let range = text(headers, &header::CONTENT_RANGE).and_then(parse_range);
                let fits = range.is_some_and(|(first, total)| {
                    first == self.state.durable
                        && self.state.length.is_none_or(|length| length == total)
                });
                if !fits {
                    self.restart(None, None)?;
                    return Err(Cut::Again(
                        "the server sent another part than the one asked for".into(),
                    ));
                }
                self.state.length = range.map(|(_, total)| total);
            }
            StatusCode::RANGE_NOT_SATISFIABLE => {
                self.restart(None, None)?;
                return Err(Cut::Again(
                    "the server has less than was downloaded before".into(),
                ));
            }
            StatusCode::NOT_FOUND | StatusCode::GONE => {
                let reason = format!(
                    "the server has no such file ({status}): look for a mistake in the address"
                );
                return Err(Cut::Over(self.failed(reason)));
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                let reason = format!("the server does not give it away ({status})");
                return Err(Cut::Over(self.failed(reason)));
            }
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => {
                return Err(Cut::Again(format!("the server answers {status}")));
            }
            _ if status.is_server_error() => {
                return Err(Cut::Again(format!("the server answers {status}")));
            }
            _ => {
                return Err(Cut::Over(
                    self.failed(format!("the server answers {status}")),
                ));
            }
        }
        let length = self.state.length.unwrap_or(0);
        self.check_length(length)?;
        self.way.set_total(length);
        Ok(())
    }

    fn check_length(&self, length: u64) -> Result<(), Error> {
        if length <= self.most {
            return Ok(());
        }
        let most = self.most;
        let reason = format!(
            "is longer than the {most} bytes that may be downloaded: allow more, if it is not a mistake"
        );
        Err(Error::new(&self.shown, ErrorKind::Size(reason)))
    }

    /// Forgets what was downloaded.
    fn restart(&mut self, version: Option<String>, length: Option<u64>) -> Result<(), Error> {
        self.state.version = version;
        self.state.length = length;
        self.state.durable = 0;
        self.save()?;
        self.file
            .set_len(0)
            .map_err(|e| Error::io(self.path, "empty it", e))
    }

    /// Writes down how far the download is, after the bytes themselves.
    fn save(&self) -> Result<(), Error> {
        let path = &self.state_path;
        let new = fresh::beside(path, ".new");
        let bytes = serde_json::to_vec(&self.state)
            .map_err(|e| Error::io(path, "write it", io::Error::other(e)))?;
        let file = fresh::open_own(File::options().create(true).truncate(true), &new)?;
        file.write_all_at(&bytes, 0)
            .and_then(|()| file.sync_all())
            .map_err(|e| Error::io(&new, "write it", e))?;
        fresh::exchange(&new, path)
    }

    fn checkpoint(&mut self, at: u64) -> Result<(), Error> {
        self.file
            .sync_all()
            .map_err(|e| Error::io(self.path, "make it durable", e))?;
        self.state.durable = at;
        self.save()
    }

    fn receive(&mut self, body: Body) -> Result<(), Cut> {
        let mut from = body.into_with_config().limit(u64::MAX).reader();
        let mut bytes = vec![0; CHUNK / 4];
        let mut at = self.state.durable;
        let end = loop {
            match from.read(&mut bytes) {
                Ok(0) => break None,
                Ok(read) => {
                    let piece = bytes.get(..read).unwrap_or_default();
                    let next = at + read as u64;
                    let kept = self.check_length(next).and_then(|()| {
                        self.file
                            .write_all_at(piece, at)
                            .map_err(|e| Error::io(self.path, "write it", e))
                    });
                    if let Err(error) =
                        kept.and_then(|()| self.way.at(&self.shown, next, read as u64))
                    {
                        // What has come is kept for the next time, where the host still can.
                        let _ = self.checkpoint(at);
                        return Err(Cut::Over(error));
                    }
                    at = next;
                    if at - self.state.durable >= CHECKPOINT {
                        self.checkpoint(at)?;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break Some(error.to_string()),
            }
        };
        let short = self.state.length.filter(|length| at < *length);
        match (end, short) {
            (None, None) => {
                self.state.length = Some(at);
                self.file
                    .set_len(at)
                    .map_err(|e| Error::io(self.path, "cut it", e))?;
                Ok(self.checkpoint(at)?)
            }
            (end, short) => {
                self.checkpoint(at)?;
                let reason = end.unwrap_or_else(|| "the connection was closed".to_owned());
                Err(Cut::Again(match short {
                    Some(length) => format!("{reason} after {at} of {length} bytes"),
                    None => format!("{reason} after {at} bytes"),
                }))
            }
        }
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &header::HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// What tells this version of a file from another: a strong ETag, or else when it was changed.
fn version(headers: &HeaderMap) -> Option<String> {
    let strong = text(headers, &header::ETAG).filter(|tag| tag.starts_with('"'));
    let named = strong.or_else(|| text(headers, &header::LAST_MODIFIED));
    named.map(str::to_owned)
}

/// `bytes FIRST-LAST/TOTAL`: the first byte and how many there are in all.
fn parse_range(text: &str) -> Option<(u64, u64)> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, _) = range.split_once('-')?;
    Some((first.parse().ok()?, total.parse().ok()?))
}

fn is_tls(error: &io::Error) -> bool {
    let inner = error.get_ref();
    inner.is_some_and(<dyn std::error::Error + Send + Sync>::is::<rustls::Error>)
}

fn tls_reason(error: &str) -> String {
    format!(
        "{error}; if the server's authority is not one of the host's, state its certificate with a CA file"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_shown_without_what_is_secret_in_them() {
        for (url, shown) in [
            (
                "https://user:secret@host:8443/a/b.raw?sig=secret#x",
                "https://host:8443/a/b.raw",
            ),
            ("http://host?token=secret", "http://host"),
            ("http://user@na:me@host/x@y", "http://host/x@y"),
            ("file.raw?x", "file.raw"),
        ] {
            assert_eq!(redacted(url), shown);
        }
    }

    #[test]
    fn a_part_is_believed_only_in_the_form_of_the_standard() {
        assert_eq!(parse_range("bytes 100-199/200"), Some((100, 200)));
        for bad in [
            "bytes */200",
            "100-199/200",
            "bytes 100-199/*",
            "bytes -1-2/3",
            "",
        ] {
            assert_eq!(parse_range(bad), None, "{bad}");
        }
    }
}
