//! Images imported from files and from servers that behave well or badly.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use common::{Folder, Random, TestDisk, assert_clean, contents, qemu_img, qemu_io, spec, text};
use drover_block::image::{
    self, Compression, ConvertOptions, ImportOptions, ImportSource, Monitor, Packing, Unwatched,
};
use drover_block::{Error, Format};
use sha2::{Digest, Sha256};

/// What a server does with the requests for its one file.
#[derive(Clone, Default)]
struct Manners {
    /// Breaks every connection after so many bytes of the body, this often.
    cut_after: usize,
    cuts: usize,
    /// Knows no ranges.
    no_ranges: bool,
    /// Gives no version.
    no_version: bool,
    /// Says nothing about the length.
    no_length: bool,
    /// Answers like this instead.
    status: Option<&'static str>,
    /// Leads on to that address.
    redirect: Option<String>,
}

struct Server {
    port: u16,
    file: Arc<Mutex<(Vec<u8>, String)>>,
    manners: Arc<Mutex<Manners>>,
    /// Requests so far, and bytes of bodies sent.
    requests: Arc<AtomicUsize>,
    sent: Arc<AtomicUsize>,
    ended: Arc<AtomicBool>,
}

trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

impl Server {
    fn start(file: Vec<u8>, manners: Manners) -> Self {
        Self::start_with(file, manners, |stream| Some(Box::new(stream)))
    }

    fn start_with(
        file: Vec<u8>,
        manners: Manners,
        accept: impl Fn(TcpStream) -> Option<Box<dyn Stream>> + Send + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Self {
            port: listener.local_addr().unwrap().port(),
            file: Arc::new(Mutex::new((file, "\"one\"".into()))),
            manners: Arc::new(Mutex::new(manners)),
            requests: Arc::default(),
            sent: Arc::default(),
            ended: Arc::default(),
        };
        let (file, manners) = (Arc::clone(&server.file), Arc::clone(&server.manners));
        let (requests, sent) = (Arc::clone(&server.requests), Arc::clone(&server.sent));
        let ended = Arc::clone(&server.ended);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                let Some(stream) = stream.ok().and_then(&accept) else {
                    continue;
                };
                let (bytes, version) = file.lock().unwrap().clone();
                // A client that goes away is no concern of the server's.
                let _ = answer(stream, &bytes, &version, &manners, &requests, &sent);
            }
        });
        server
    }

    fn url(&self) -> String {
        format!(
            "http://user:secret@127.0.0.1:{}/disk.img?sig=secret",
            self.port
        )
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn answer(
    stream: Box<dyn Stream>,
    bytes: &[u8],
    version: &str,
    manners: &Mutex<Manners>,
    requests: &AtomicUsize,
    sent: &AtomicUsize,
) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    let (mut range, mut condition, mut line) = (None, None, String::new());
    while stream.read_line(&mut line)? > 0 && line.trim() != "" {
        let (name, value) = line.split_once(':').unwrap_or((&line, ""));
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                let first = value.trim().strip_prefix("bytes=").unwrap();
                range = first.strip_suffix('-').unwrap().parse::<usize>().ok();
            }
            "if-range" => condition = Some(value.trim().to_owned()),
            _ => {}
        }
        line.clear();
    }
    requests.fetch_add(1, Ordering::Relaxed);
    let mut now = manners.lock().unwrap().clone();
    let out = stream.get_mut();
    if let Some(address) = now.redirect {
        return write!(
            out,
            "HTTP/1.1 302 Found\r\nLocation: {address}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
    }
    if let Some(status) = now.status {
        return write!(
            out,
            "HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
    }
    let usable = !now.no_ranges && condition.is_none_or(|condition| condition == version);
    let range = range.filter(|_| usable);
    let body = &bytes[range.unwrap_or(0).min(bytes.len())..];
    let mut head = match range {
        Some(first) => format!(
            "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {first}-{}/{}\r\n",
            bytes.len() - 1,
            bytes.len()
        ),
        None => "HTTP/1.1 200 OK\r\n".to_owned(),
    };
    if !now.no_length {
        head += &format!("Content-Length: {}\r\n", body.len());
    }
    if !now.no_version {
        head += &format!("ETag: {version}\r\n");
    }
    out.write_all((head + "Connection: close\r\n\r\n").as_bytes())?;
    let mut length = body.len();
    if now.cuts > 0 {
        length = length.min(now.cut_after);
        now.cuts -= 1;
        manners.lock().unwrap().cuts = now.cuts;
    }
    out.write_all(&body[..length])?;
    sent.fetch_add(length, Ordering::Relaxed);
    out.flush()
}

/// A raw disk with holes in it, 3 MiB and a sector.
fn disk() -> Vec<u8> {
    let mut random = Random(9);
    (0..(3u32 << 20) + 512)
        .map(|n| match n >> 18 {
            0 | 3 | 4 => 0,
            1 | 7 => random.next() as u8,
            _ => b"a line of text that comes again, and again\n"[n as usize % 43],
        })
        .collect()
}

/// Runs a tool that packs its standard input.
fn packed(tool: &str, arguments: &[&str], bytes: &[u8]) -> Vec<u8> {
    let mut child = std::process::Command::new(tool)
        .args(arguments)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("cannot run {tool}: {error}"));
    let mut input = child.stdin.take().unwrap();
    let bytes = bytes.to_vec();
    let feeder = std::thread::spawn(move || input.write_all(&bytes).unwrap());
    let output = child.wait_with_output().unwrap();
    feeder.join().unwrap();
    assert!(output.status.success());
    output.stdout
}

fn pack(packing: Packing, bytes: &[u8]) -> Vec<u8> {
    match packing {
        Packing::None => bytes.to_vec(),
        Packing::Gzip => packed("gzip", &["-1"], bytes),
        Packing::Xz => packed("xz", &["-1", "-T1"], bytes),
        Packing::Zstd => packed("zstd", &["-q", "-1"], bytes),
    }
}

fn options(format: Format, to: Format) -> ImportOptions {
    ImportOptions::new(format, to)
}

fn get(server: &Server, target: &Path, options: &ImportOptions) -> Result<(), Error> {
    image::import(
        &ImportSource::Url(server.url()),
        target,
        options,
        &mut Unwatched,
    )
}

/// Nothing but these is in the folder.
#[track_caller]
fn only(folder: &Path, names: &[&str]) {
    let mut seen: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    seen.sort();
    assert_eq!(seen, names);
}

fn target(folder: &Folder) -> (PathBuf, PathBuf) {
    let inner = folder.path("out");
    std::fs::create_dir(&inner).unwrap();
    (inner.join("target"), inner)
}

#[test]
fn every_packing_of_every_format_comes_out_as_it_went_in() {
    let folder = Folder::new();
    let bytes = disk();
    let raw = folder.path("disk.raw");
    std::fs::write(&raw, &bytes).unwrap();
    let qcow2 = folder.path("disk.qcow2");
    qemu_img(&[
        "convert",
        "-f",
        "raw",
        "-O",
        "qcow2",
        "-c",
        text(&raw),
        text(&qcow2),
    ]);
    let (target, inner) = target(&folder);
    for (format, path) in [(Format::Raw, &raw), (Format::Qcow2, &qcow2)] {
        for packing in [Packing::None, Packing::Gzip, Packing::Xz, Packing::Zstd] {
            let source = folder.path("source");
            let file = pack(packing, &std::fs::read(path).unwrap());
            std::fs::write(&source, &file).unwrap();
            for to in [Format::Raw, Format::Qcow2] {
                let options = ImportOptions {
                    packing,
                    sha256: Some(Sha256::digest(&file).into()),
                    ..options(format, to)
                };
                image::import(
                    &ImportSource::File(source.clone()),
                    &target,
                    &options,
                    &mut Unwatched,
                )
                .unwrap();
                let name = if to == Format::Raw { "raw" } else { "qcow2" };
                if to == Format::Qcow2 {
                    assert_clean(&target);
                }
                assert!(contents(name, &target) == bytes, "{options:?}");
                assert!(common::allocated(&target) < 5 << 19, "zeros take no space");
                only(&inner, &["target"]);
                std::fs::remove_file(&target).unwrap();
            }
        }
    }
    let options = ImportOptions {
        to: ConvertOptions {
            compression: Some(Compression::Zstd),
            ..ConvertOptions::new(Format::Qcow2)
        },
        ..options(Format::Raw, Format::Qcow2)
    };
    image::import(&ImportSource::File(raw), &target, &options, &mut Unwatched).unwrap();
    assert!(contents("qcow2", &target) == bytes);
}

#[test]
fn several_members_frames_and_skippable_frames_are_one_file() {
    let folder = Folder::new();
    let bytes = disk();
    let (one, two) = bytes.split_at(1_000_001);
    let (target, _) = target(&folder);
    for packing in [Packing::Gzip, Packing::Xz, Packing::Zstd] {
        let mut file = pack(packing, one);
        if packing == Packing::Zstd {
            file.extend([0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3]);
        }
        file.extend(pack(packing, two));
        let server = Server::start(file, Manners::default());
        let options = ImportOptions {
            packing,
            ..options(Format::Raw, Format::Raw)
        };
        get(&server, &target, &options).unwrap();
        assert!(std::fs::read(&target).unwrap() == bytes, "{packing:?}");
        std::fs::remove_file(&target).unwrap();
    }
}

#[test]
fn a_download_that_is_cut_off_again_and_again_goes_on_where_it_was() {
    let folder = Folder::new();
    let bytes = disk();
    let (target, inner) = target(&folder);
    let manners = Manners {
        cut_after: 300_001,
        cuts: 8,
        ..Manners::default()
    };
    let server = Server::start(bytes.clone(), manners);
    let wanted = ImportOptions {
        sha256: Some(Sha256::digest(&bytes).into()),
        ..options(Format::Raw, Format::Raw)
    };
    get(&server, &target, &wanted).unwrap();
    assert!(std::fs::read(&target).unwrap() == bytes);
    only(&inner, &["target"]);
    assert_eq!(
        server.sent.load(Ordering::Relaxed),
        bytes.len(),
        "no byte comes twice"
    );
}

/// Stops a job after so many reports.
struct Impatient(u32);

impl Monitor for Impatient {
    fn progress(&mut self, _: u64, _: u64) -> ControlFlow<()> {
        if self.0 == 0 {
            return ControlFlow::Break(());
        }
        self.0 -= 1;
        ControlFlow::Continue(())
    }
}

#[test]
fn a_download_that_was_stopped_is_taken_up_by_the_next_import_unless_the_file_has_changed() {
    let bytes = disk();
    for changed in [false, true] {
        let folder = Folder::new();
        let (target, inner) = target(&folder);
        let server = Server::start(bytes.clone(), Manners::default());
        let wanted = options(Format::Raw, Format::Raw);
        let source = ImportSource::Url(server.url());
        let stopped = image::import(&source, &target, &wanted, &mut Impatient(4)).unwrap_err();
        assert!(stopped.to_string().contains("cancelled"), "{stopped}");
        only(&inner, &["target.download", "target.download.json"]);
        let state = std::fs::read_to_string(inner.join("target.download.json")).unwrap();
        assert!(!state.contains("secret"), "{state}");
        let kept = std::fs::metadata(inner.join("target.download"))
            .unwrap()
            .len() as usize;
        assert!(kept > 0);
        let mut now = bytes.clone();
        if changed {
            now.reverse();
            *server.file.lock().unwrap() = (now.clone(), "\"two\"".into());
        }
        let before = server.sent.swap(0, Ordering::Relaxed);
        assert!(before >= kept);
        get(&server, &target, &wanted).unwrap();
        assert!(std::fs::read(&target).unwrap() == now);
        let sent = server.sent.load(Ordering::Relaxed);
        assert!(changed == (sent == bytes.len()), "{sent} bytes were sent");
        only(&inner, &["target"]);
    }
}

#[test]
fn servers_without_ranges_versions_or_lengths_send_it_all_again() {
    let bytes = disk();
    for manners in [
        Manners {
            no_ranges: true,
            cut_after: 300_000,
            cuts: 2,
            ..Manners::default()
        },
        Manners {
            no_version: true,
            cut_after: 300_000,
            cuts: 2,
            ..Manners::default()
        },
        Manners {
            no_length: true,
            ..Manners::default()
        },
    ] {
        let folder = Folder::new();
        let (target, _) = target(&folder);
        let server = Server::start(bytes.clone(), manners);
        get(&server, &target, &options(Format::Raw, Format::Raw)).unwrap();
        assert!(std::fs::read(&target).unwrap() == bytes);
    }
}

#[test]
fn what_is_not_what_was_stated_is_refused_and_nothing_of_it_is_left() {
    let folder = Folder::new();
    let bytes = disk();
    let (target, inner) = target(&folder);
    let raw = options(Format::Raw, Format::Raw);
    let cases = [
        (
            ImportOptions {
                sha256: Some([7; 32]),
                ..raw.clone()
            },
            "SHA-256",
        ),
        (
            ImportOptions {
                packing: Packing::Gzip,
                ..raw.clone()
            },
            "gzip",
        ),
        (
            ImportOptions {
                packing: Packing::Xz,
                ..raw.clone()
            },
            "xz",
        ),
        (
            ImportOptions {
                packing: Packing::Zstd,
                ..raw.clone()
            },
            "zstd",
        ),
        (options(Format::Qcow2, Format::Raw), "not a qcow2 image"),
        (
            ImportOptions {
                max_download_bytes: 1 << 20,
                ..raw.clone()
            },
            "allow more",
        ),
        (
            ImportOptions {
                max_size_bytes: 1 << 20,
                ..raw.clone()
            },
            "allow more",
        ),
    ];
    let server = Server::start(bytes.clone(), Manners::default());
    for (options, expected) in cases {
        let error = get(&server, &target, &options).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(
            error.contains("/disk.img: ") && !error.contains("secret"),
            "{error}"
        );
        only(&inner, &[]);
    }
}

#[test]
fn packed_bytes_that_are_cut_short_or_damaged_are_noticed() {
    let folder = Folder::new();
    let bytes = disk();
    let (target, inner) = target(&folder);
    let mut random = Random(21);
    for packing in [Packing::Gzip, Packing::Xz, Packing::Zstd] {
        let sound = pack(packing, &bytes);
        for n in 0..6 {
            let mut file = sound.clone();
            if n % 2 == 0 {
                file.truncate(random.below(sound.len() as u64 - 1) as usize + 1);
            } else {
                let at = sound.len() / 4 + random.below(sound.len() as u64 / 2) as usize;
                file[at] ^= 0x55;
            }
            let server = Server::start(file, Manners::default());
            let options = ImportOptions {
                packing,
                ..options(Format::Raw, Format::Raw)
            };
            let error = get(&server, &target, &options).unwrap_err().to_string();
            assert!(error.contains("cannot be unpacked"), "{packing:?}: {error}");
            only(&inner, &[]);
        }
    }
}

#[test]
fn a_bomb_ends_at_the_limit() {
    let folder = Folder::new();
    let (target, inner) = target(&folder);
    let zeros = vec![0; 64 << 20];
    for packing in [Packing::Gzip, Packing::Xz, Packing::Zstd] {
        let file = pack(packing, &zeros);
        assert!(file.len() < 1 << 20);
        let server = Server::start(file, Manners::default());
        let options = ImportOptions {
            packing,
            max_size_bytes: 8 << 20,
            ..options(Format::Raw, Format::Raw)
        };
        let error = get(&server, &target, &options).unwrap_err().to_string();
        assert!(error.contains("8388608"), "{error}");
        only(&inner, &[]);
    }
}

#[test]
fn images_that_refer_to_other_files_or_are_too_large_are_refused() {
    let folder = Folder::new();
    let (target, inner) = target(&folder);
    let base = folder.path("base.raw");
    std::fs::write(&base, vec![1; 1 << 20]).unwrap();
    let overlay = folder.path("overlay.qcow2");
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        text(&base),
        text(&overlay),
    ]);
    let outside = folder.path("outside.qcow2");
    let data = folder.path("data");
    let data_option = format!("data_file={}", text(&data));
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        &data_option,
        text(&outside),
        "1M",
    ]);
    let large = folder.path("large.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&large), "3T"]);
    for (path, expected) in [
        (&overlay, "base.raw"),
        (&outside, "external data file"),
        (&large, "allow more"),
    ] {
        for (packing, name) in [(Packing::None, "none"), (Packing::Gzip, "gz")] {
            let source = folder.path(name);
            std::fs::write(&source, pack(packing, &std::fs::read(path).unwrap())).unwrap();
            let options = ImportOptions {
                packing,
                ..options(Format::Qcow2, Format::Raw)
            };
            let from = ImportSource::File(source);
            let error = image::import(&from, &target, &options, &mut Unwatched).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
            assert!(error.to_string().contains(&format!("/{name}: ")), "{error}");
            only(&inner, &[]);
        }
    }
}

#[test]
fn a_server_that_has_it_not_or_fails_is_told_apart() {
    let folder = Folder::new();
    let (target, inner) = target(&folder);
    for (status, expected, requests) in [
        ("404 Not Found", "no such file", 1),
        ("403 Forbidden", "403", 1),
        ("503 Service Unavailable", "503", 4),
        ("418 Teapot", "418", 1),
    ] {
        let manners = Manners {
            status: Some(status),
            ..Manners::default()
        };
        let server = Server::start(vec![1; 512], manners);
        let error = get(&server, &target, &options(Format::Raw, Format::Raw)).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(server.requests.load(Ordering::Relaxed), requests);
    }
    only(&inner, &[]);
    let unused = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let from = ImportSource::Url(format!("http://127.0.0.1:{unused}/x"));
    let raw = options(Format::Raw, Format::Raw);
    let error = image::import(&from, &target, &raw, &mut Unwatched).unwrap_err();
    assert!(
        error.to_string().contains("cannot be downloaded"),
        "{error}"
    );
    let from = ImportSource::Url("ftp://127.0.0.1/x".into());
    let error = image::import(&from, &target, &raw, &mut Unwatched).unwrap_err();
    assert!(
        error.to_string().contains("only http:// and https://"),
        "{error}"
    );
    only(&inner, &[]);
}

#[test]
fn redirections_are_followed_a_few_times() {
    let folder = Folder::new();
    let (target, _) = target(&folder);
    let server = Server::start(disk(), Manners::default());
    let manners = Manners {
        redirect: Some(server.url()),
        ..Manners::default()
    };
    let first = Server::start(Vec::new(), manners);
    get(&first, &target, &options(Format::Raw, Format::Raw)).unwrap();
    assert!(std::fs::read(&target).unwrap() == disk());
    std::fs::remove_file(&target).unwrap();
    let own = first.url();
    first.manners.lock().unwrap().redirect = Some(own);
    let error = get(&first, &target, &options(Format::Raw, Format::Raw)).unwrap_err();
    assert!(error.to_string().contains("more than 5 times"), "{error}");
}

/// A server with a certificate of an authority of our own, for 127.0.0.1; and the authority's certificate.
fn secret_server(file: Vec<u8>, manners: Manners) -> (Server, String) {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let authority_key = rcgen::KeyPair::generate().unwrap();
    let mut parameters = rcgen::CertificateParams::default();
    parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = parameters.self_signed(&authority_key).unwrap();
    let issuer = rcgen::Issuer::from_params(&parameters, &authority_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new(vec!["127.0.0.1".into()])
        .unwrap()
        .signed_by(&key, &issuer)
        .unwrap();
    let key = rustls::pki_types::PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .unwrap();
    let config = Arc::new(config);
    let server = Server::start_with(file, manners, move |mut stream| {
        let mut connection = rustls::ServerConnection::new(Arc::clone(&config)).ok()?;
        connection.complete_io(&mut stream).ok()?;
        Some(Box::new(rustls::StreamOwned::new(connection, stream)))
    });
    (server, authority.pem())
}

#[test]
fn a_secret_way_needs_an_authority_that_is_trusted_and_is_not_left() {
    let folder = Folder::new();
    let (target, _) = target(&folder);
    let (server, authority) = secret_server(disk(), Manners::default());
    let ca_file = folder.path("ca.pem");
    std::fs::write(&ca_file, authority).unwrap();
    let source = ImportSource::Url(format!("https://127.0.0.1:{}/disk.img", server.port));
    let raw = options(Format::Raw, Format::Raw);
    let error = image::import(&source, &target, &raw, &mut Unwatched).unwrap_err();
    assert!(error.to_string().contains("CA file"), "{error}");
    let trusting = ImportOptions {
        ca_file: Some(ca_file.clone()),
        ..raw
    };
    image::import(&source, &target, &trusting, &mut Unwatched).unwrap();
    assert!(std::fs::read(&target).unwrap() == disk());
    std::fs::remove_file(&target).unwrap();
    // On to a server that is not secret: refused.
    let plain = Server::start(disk(), Manners::default());
    server.manners.lock().unwrap().redirect = Some(plain.url());
    let error = image::import(&source, &target, &trusting, &mut Unwatched).unwrap_err();
    assert!(error.to_string().contains("plain http"), "{error}");
    assert_eq!(plain.requests.load(Ordering::Relaxed), 0);
    std::fs::write(&ca_file, "no certificate").unwrap();
    let error = image::import(&source, &target, &trusting, &mut Unwatched).unwrap_err();
    assert!(error.to_string().contains("ca.pem"), "{error}");
}

#[test]
fn a_source_that_somebody_writes_and_a_target_that_exists_are_left_alone() {
    let folder = Folder::new();
    let (target, _) = target(&folder);
    let source = folder.path("x.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&source), "1M"]);
    qemu_io("qcow2", &source, &["write 0 512"]);
    let disk = TestDisk::open(&spec(&source, Format::Qcow2, &[]));
    let wanted = options(Format::Qcow2, Format::Raw);
    let from = ImportSource::File(source);
    let error = image::import(&from, &target, &wanted, &mut Unwatched).unwrap_err();
    assert!(error.to_string().contains("open for writing"), "{error}");
    disk.close();
    std::fs::write(&target, "precious").unwrap();
    let error = image::import(&from, &target, &wanted, &mut Unwatched).unwrap_err();
    assert!(error.to_string().contains("File exists"), "{error}");
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
}
