//! The operations: what each takes, calls and replies. The attributes above them are their part of the OpenAPI document.

use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;

use super::events::EventStream;
use super::{Created, VmService, disk_routes, limits, openapi};
use crate::definition::{DefinitionError, VmConfig, parse_as};
use crate::types::{ApiError, ErrorCode, Event, Info, ShutdownRequest, VmView};

/// How messages call the request's body.
const BODY: &str = "request";

pub(super) type Reply = Result<Response, ApiError>;

pub(super) struct Context<S> {
    pub(super) service: Arc<S>,
    stopped: watch::Receiver<bool>,
    subscribers: Arc<Semaphore>,
}

impl<S> Clone for Context<S> {
    fn clone(&self) -> Self {
        Self {
            service: Arc::clone(&self.service),
            stopped: self.stopped.clone(),
            subscribers: Arc::clone(&self.subscribers),
        }
    }
}

pub(super) fn router<S: VmService>(service: Arc<S>, stopped: watch::Receiver<bool>) -> Router {
    let subscribers = Arc::new(Semaphore::new(limits::SUBSCRIBERS));
    Router::new()
        .route("/v1/info", get(info::<S>))
        .route("/v1/metrics", get(metrics::<S>))
        .route("/v1/events", get(events::<S>))
        .route("/v1/openapi.json", get(document))
        .route("/v1/vm", put(create::<S>).get(vm::<S>).delete(delete::<S>))
        .route("/v1/vm/start", post(start::<S>))
        .route("/v1/vm/shutdown", post(shutdown::<S>))
        .route("/v1/vm/reset", post(reset::<S>))
        .route("/v1/vm/pause", post(pause::<S>))
        .route("/v1/vm/resume", post(resume::<S>))
        .merge(disk_routes::router())
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(not_found)
        .with_state(Context {
            service,
            stopped,
            subscribers,
        })
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status());
        (
            status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            Json(self),
        )
            .into_response()
    }
}

/// Who answers.
#[utoipa::path(get, path = "/v1/info", operation_id = "info", tag = "process", responses(
    (status = 200, description = "Version, process and state.", body = Info),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn info<S: VmService>(State(context): State<Context<S>>) -> Reply {
    Ok(Json(context.service.info().await?).into_response())
}

/// Counters in the Prometheus text format.
#[utoipa::path(get, path = "/v1/metrics", operation_id = "metrics", tag = "process", responses(
    (status = 200, description = "Prometheus text format 0.0.4.", body = String, content_type = "text/plain"),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn metrics<S: VmService>(State(context): State<Context<S>>) -> Reply {
    let text = context.service.metrics().await?;
    Ok((
        [(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")],
        text,
    )
        .into_response())
}

/// What happens from now on, as server-sent events; each message's data is an `Event`.
#[utoipa::path(get, path = "/v1/events", operation_id = "events", tag = "process", responses(
    (status = 200, description = "A stream that ends with the process.", body = Event, content_type = "text/event-stream"),
    (status = 429, description = "There are as many readers as can be.", body = ApiError),
))]
pub(super) async fn events<S: VmService>(State(context): State<Context<S>>) -> Reply {
    let Ok(place) = Arc::clone(&context.subscribers).try_acquire_owned() else {
        let message = format!("{} clients read events already", limits::SUBSCRIBERS);
        return Err(ApiError::new(ErrorCode::TooMany, message));
    };
    let events = context.service.subscribe();
    Ok(EventStream::reply(events, context.stopped, place).into_response())
}

/// This document.
#[utoipa::path(get, path = "/v1/openapi.json", operation_id = "openapi", tag = "process", responses(
    (status = 200, description = "OpenAPI 3.1.", body = serde_json::Value, content_type = "application/json"),
))]
pub(super) async fn document() -> Response {
    (
        [
            (CONTENT_TYPE, "application/json"),
            (CACHE_CONTROL, "no-cache"),
        ],
        openapi::DOCUMENT,
    )
        .into_response()
}

/// Makes the VM; everything it needs is opened, or nothing is. The same definition again is a success.
#[utoipa::path(put, path = "/v1/vm", operation_id = "create", tag = "vm",
    request_body(description = "The definition; JSON or YAML.", content(
        (VmConfig = "application/json"), (VmConfig = "application/yaml"))),
    responses(
    (status = 200, description = "There is a VM of this definition already.", body = VmView),
    (status = 201, description = "Made.", body = VmView),
    (status = 400, description = "The body is no definition.", body = ApiError),
    (status = 408, description = "The body did not arrive in time.", body = ApiError),
    (status = 409, description = "There is another VM.", body = ApiError),
    (status = 413, description = "The body is too large.", body = ApiError),
    (status = 415, description = "The body is neither JSON nor YAML.", body = ApiError),
    (status = 422, description = "The definition contradicts itself, or this host cannot give what it asks for.", body = ApiError),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn create<S: VmService>(
    State(context): State<Context<S>>,
    request: Request,
) -> Reply {
    let (headers, body) = split(request);
    require_type(&headers, &["application/json", "application/yaml"])?;
    let config: VmConfig = decode(&read(&headers, body).await?)?;
    config.validate().map_err(|error| invalid(&error))?;
    Ok(match context.service.create(config).await? {
        Created::New(vm) => (StatusCode::CREATED, Json(vm)).into_response(),
        Created::Existing(vm) => Json(vm).into_response(),
    })
}

/// The VM as it is now.
#[utoipa::path(get, path = "/v1/vm", operation_id = "vm", tag = "vm", responses(
    (status = 200, description = "State and definition.", body = VmView),
    (status = 404, description = "There is no VM.", body = ApiError),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn vm<S: VmService>(State(context): State<Context<S>>) -> Reply {
    Ok(Json(context.service.vm().await?).into_response())
}

/// Removes a VM that is created or stopped. Nothing to remove is a success.
#[utoipa::path(delete, path = "/v1/vm", operation_id = "delete", tag = "vm", responses(
    (status = 204, description = "There is no VM any more."),
    (status = 409, description = "It runs: shut it down first.", body = ApiError),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn delete<S: VmService>(State(context): State<Context<S>>) -> Reply {
    context.service.delete().await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Lets a created VM run. One that runs already is a success.
#[utoipa::path(post, path = "/v1/vm/start", operation_id = "start", tag = "vm", responses(
    (status = 200, description = "It runs.", body = VmView),
    (status = 404, description = "There is no VM.", body = ApiError),
    (status = 409, description = "It is paused, shutting down or stopped.", body = ApiError),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn start<S: VmService>(State(context): State<Context<S>>) -> Reply {
    Ok(Json(context.service.start().await?).into_response())
}

/// Presses the power button; what still runs when the time is over is forced off. The reply does not wait for it.
#[utoipa::path(post, path = "/v1/vm/shutdown", operation_id = "shutdown", tag = "vm",
    request_body(description = "Defaults where absent.", content = Option<ShutdownRequest>, content_type = "application/json"),
    responses(
    (status = 202, description = "It is shutting down or stopped.", body = VmView),
    (status = 400, description = "The body is not what is expected.", body = ApiError),
    (status = 404, description = "There is no VM.", body = ApiError),
    (status = 408, description = "The body did not arrive in time.", body = ApiError),
    (status = 409, description = "It was not started.", body = ApiError),
    (status = 413, description = "The body is too large.", body = ApiError),
    (status = 415, description = "The body is no JSON.", body = ApiError),
    (status = 422, description = "The time is too long.", body = ApiError),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn shutdown<S: VmService>(
    State(context): State<Context<S>>,
    request: Request,
) -> Reply {
    let (headers, body) = split(request);
    let body = read(&headers, body).await?;
    let request: ShutdownRequest = if body.is_empty() {
        ShutdownRequest::default()
    } else {
        require_type(&headers, &["application/json"])?;
        decode::<Option<_>>(&body)?.unwrap_or_default()
    };
    request.validate().map_err(|error| invalid(&error))?;
    let vm = context.service.shutdown(request).await?;
    Ok((StatusCode::ACCEPTED, Json(vm)).into_response())
}

/// Resets a running VM, as its reset button would.
#[utoipa::path(post, path = "/v1/vm/reset", operation_id = "reset", tag = "vm", responses(
    (status = 200, description = "It starts anew.", body = VmView),
    (status = 404, description = "There is no VM.", body = ApiError),
    (status = 409, description = "It does not run.", body = ApiError),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn reset<S: VmService>(State(context): State<Context<S>>) -> Reply {
    Ok(Json(context.service.reset().await?).into_response())
}

/// Parks the processors of a running VM. One that is paused already is a success.
#[utoipa::path(post, path = "/v1/vm/pause", operation_id = "pause", tag = "vm", responses(
    (status = 200, description = "It is paused.", body = VmView),
    (status = 404, description = "There is no VM.", body = ApiError),
    (status = 409, description = "It was not started, or is shutting down or stopped.", body = ApiError),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn pause<S: VmService>(State(context): State<Context<S>>) -> Reply {
    Ok(Json(context.service.pause().await?).into_response())
}

/// Lets a paused VM run on; requests of its disks that failed and were kept are tried again. One that runs already is a success.
#[utoipa::path(post, path = "/v1/vm/resume", operation_id = "resume", tag = "vm", responses(
    (status = 200, description = "It runs.", body = VmView),
    (status = 404, description = "There is no VM.", body = ApiError),
    (status = 409, description = "It was not started, or is shutting down or stopped.", body = ApiError),
    (status = 422, description = "A disk still cannot be opened; the VM stays paused.", body = ApiError),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn resume<S: VmService>(State(context): State<Context<S>>) -> Reply {
    Ok(Json(context.service.resume().await?).into_response())
}

async fn not_found(uri: Uri) -> ApiError {
    ApiError::new(ErrorCode::NotFound, format!("there is no {}", uri.path()))
}

async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    let message = format!("{} has no method {method}", uri.path());
    ApiError::new(ErrorCode::MethodNotAllowed, message)
}

fn split(request: Request) -> (HeaderMap, Body) {
    let (head, body) = request.into_parts();
    (head.headers, body)
}

fn require_type(headers: &HeaderMap, allowed: &[&str]) -> Result<(), ApiError> {
    let header = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let essence = header.split(';').next().unwrap_or_default().trim();
    if allowed
        .iter()
        .any(|allowed| essence.eq_ignore_ascii_case(allowed))
    {
        return Ok(());
    }
    let message = format!(
        "content type {essence:?} is not accepted, expected {}",
        allowed.join(" or ")
    );
    Err(ApiError::new(ErrorCode::UnsupportedMediaType, message))
}

/// Reads a JSON body.
pub(super) async fn json<T: serde::de::DeserializeOwned>(request: Request) -> Result<T, ApiError> {
    let (headers, body) = split(request);
    require_type(&headers, &["application/json"])?;
    decode(&read(&headers, body).await?)
}

async fn read(headers: &HeaderMap, body: Body) -> Result<Vec<u8>, ApiError> {
    let too_large = || {
        let message = format!("the body is larger than {} bytes", limits::BODY_BYTES);
        ApiError::new(ErrorCode::TooLarge, message)
    };
    let announced = headers
        .get(CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse().ok());
    if announced.is_some_and(|length: u64| length > limits::BODY_BYTES as u64) {
        return Err(too_large());
    }
    match timeout(
        limits::REQUEST_TIMEOUT,
        Limited::new(body, limits::BODY_BYTES).collect(),
    )
    .await
    {
        Ok(Ok(body)) => Ok(body.to_bytes().into()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(error)) => Err(ApiError::new(
            ErrorCode::Malformed,
            format!("the body is broken: {error}"),
        )),
        Err(_) => Err(ApiError::new(
            ErrorCode::Timeout,
            "the body did not arrive in time",
        )),
    }
}

fn decode<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    parse_as(body, BODY).map_err(|error| ApiError::definition(ErrorCode::Malformed, &error))
}

pub(super) fn invalid(error: &DefinitionError) -> ApiError {
    ApiError::definition(ErrorCode::Invalid, error)
}
