//! The operations on disks and their jobs.

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::response::IntoResponse;
use axum::routing::{get, post, put};
use axum::{Json, Router};

use super::VmService;
use super::routes::{Context, Reply, invalid, json};
use crate::definition::LimitsConfig;
use crate::disks::{DiskView, JobChange, JobRequest, JobView, ResizeRequest, SnapshotRequest};
use crate::types::{ApiError, ErrorCode};

pub(super) fn router<S: VmService>() -> Router<Context<S>> {
    Router::new()
        .route("/v1/vm/disks", get(disks::<S>))
        .route("/v1/vm/disks/snapshot", post(snapshot::<S>))
        .route("/v1/vm/disks/{id}/resize", post(resize::<S>))
        .route("/v1/vm/disks/{id}/limits", put(limit::<S>))
        .route("/v1/vm/disks/{id}/jobs", post(begin_job::<S>))
        .route("/v1/vm/jobs", get(jobs::<S>))
        .route(
            "/v1/vm/jobs/{id}",
            get(job::<S>).patch(change_job::<S>).delete(delete_job::<S>),
        )
}

type Named = Result<Path<String>, PathRejection>;

/// The part of the path that names a disk or a job; no UTF-8, no such thing.
fn named(path: Named) -> Result<String, ApiError> {
    let Path(name) =
        path.map_err(|error| ApiError::new(ErrorCode::NotFound, format!("the path: {error}")))?;
    Ok(name)
}

/// The disks, in the definition's order: their images, sizes, limits and counters.
#[utoipa::path(get, path = "/v1/vm/disks", operation_id = "disks", tag = "disks",
    responses(
    (status = 200, description = "All of them.", body = Vec<DiskView>),
    (status = 404, description = "There is no VM.", body = ApiError),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn disks<S: VmService>(State(context): State<Context<S>>) -> Reply {
    Ok(Json(context.service.disks().await?).into_response())
}

/// Makes a disk larger, for the guest to see at once. The size that it has already is a success.
#[utoipa::path(post, path = "/v1/vm/disks/{id}/resize", operation_id = "resize", tag = "disks",
    params(("id" = String, Path, description = "A disk's id.", pattern = "^[A-Za-z0-9][-A-Za-z0-9_.]{0,31}$")),
    request_body(content = ResizeRequest, content_type = "application/json"),
    responses(
    (status = 200, description = "It has this size.", body = DiskView),
    (status = 400, description = "The body is not what is expected.", body = ApiError),
    (status = 408, description = "The body did not arrive in time.", body = ApiError),
    (status = 413, description = "The body is too large.", body = ApiError),
    (status = 415, description = "The body is no JSON.", body = ApiError),
    (status = 404, description = "There is no VM, or no such disk.", body = ApiError),
    (status = 409, description = "A job is under way on the disk, or the VM is ending.", body = ApiError),
    (status = 422, description = "The size cannot be, or the host refuses.", body = ApiError),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn resize<S: VmService>(
    State(context): State<Context<S>>,
    path: Named,
    request: Request,
) -> Reply {
    let body: ResizeRequest = json(request).await?;
    body.validate().map_err(|error| invalid(&error))?;
    Ok(Json(context.service.resize(named(path)?, body).await?).into_response())
}

/// Lets disks continue in new overlays; their images stop changing, all at the same instant.
#[utoipa::path(post, path = "/v1/vm/disks/snapshot", operation_id = "snapshot", tag = "disks",
    request_body(content = SnapshotRequest, content_type = "application/json"),
    responses(
    (status = 200, description = "The disks, each with its overlay on top.", body = Vec<DiskView>),
    (status = 400, description = "The body is not what is expected.", body = ApiError),
    (status = 408, description = "The body did not arrive in time.", body = ApiError),
    (status = 413, description = "The body is too large.", body = ApiError),
    (status = 415, description = "The body is no JSON.", body = ApiError),
    (status = 404, description = "There is no VM, or no such disk.", body = ApiError),
    (status = 409, description = "A job is under way on a disk, or the VM is ending.", body = ApiError),
    (status = 422, description = "An overlay cannot be made, or a disk is read-only; nothing has changed.", body = ApiError),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn snapshot<S: VmService>(
    State(context): State<Context<S>>,
    request: Request,
) -> Reply {
    let body: SnapshotRequest = json(request).await?;
    body.validate().map_err(|error| invalid(&error))?;
    Ok(Json(context.service.snapshot(body).await?).into_response())
}

/// Changes what a disk may use, or the group that it belongs to; what is not stated is not limited any more.
#[utoipa::path(put, path = "/v1/vm/disks/{id}/limits", operation_id = "limit", tag = "disks",
    params(("id" = String, Path, description = "A disk's id.", pattern = "^[A-Za-z0-9][-A-Za-z0-9_.]{0,31}$")),
    request_body(content = LimitsConfig, content_type = "application/json"),
    responses(
    (status = 200, description = "These limits hold.", body = DiskView),
    (status = 400, description = "The body is not what is expected.", body = ApiError),
    (status = 408, description = "The body did not arrive in time.", body = ApiError),
    (status = 413, description = "The body is too large.", body = ApiError),
    (status = 415, description = "The body is no JSON.", body = ApiError),
    (status = 404, description = "There is no VM, or no such disk.", body = ApiError),
    (status = 409, description = "The VM is ending.", body = ApiError),
    (status = 422, description = "A rate is out of its range.", body = ApiError),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn limit<S: VmService>(
    State(context): State<Context<S>>,
    path: Named,
    request: Request,
) -> Reply {
    let body: LimitsConfig = json(request).await?;
    body.check("").map_err(|error| invalid(&error))?;
    Ok(Json(context.service.limit(named(path)?, body).await?).into_response())
}

/// Begins a job on a disk, beside the guest's requests. The reply does not wait for its end.
#[utoipa::path(post, path = "/v1/vm/disks/{id}/jobs", operation_id = "begin_job", tag = "disks",
    params(("id" = String, Path, description = "A disk's id.", pattern = "^[A-Za-z0-9][-A-Za-z0-9_.]{0,31}$")),
    request_body(content = JobRequest, content_type = "application/json"),
    responses(
    (status = 202, description = "It has begun.", body = JobView),
    (status = 400, description = "The body is not what is expected.", body = ApiError),
    (status = 408, description = "The body did not arrive in time.", body = ApiError),
    (status = 413, description = "The body is too large.", body = ApiError),
    (status = 415, description = "The body is no JSON.", body = ApiError),
    (status = 404, description = "There is no VM, or no such disk.", body = ApiError),
    (status = 409, description = "Another job is under way on the disk, or the VM is ending.", body = ApiError),
    (status = 422, description = "The disk is not one that this could be done on.", body = ApiError),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn begin_job<S: VmService>(
    State(context): State<Context<S>>,
    path: Named,
    request: Request,
) -> Reply {
    let body: JobRequest = json(request).await?;
    let job = context.service.begin_job(named(path)?, body).await?;
    Ok((axum::http::StatusCode::ACCEPTED, Json(job)).into_response())
}

/// All jobs that were not removed, oldest first; of those that are over the last 32.
#[utoipa::path(get, path = "/v1/vm/jobs", operation_id = "jobs", tag = "disks",
    responses(
    (status = 200, description = "All of them.", body = Vec<JobView>),
    (status = 404, description = "There is no VM.", body = ApiError),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn jobs<S: VmService>(State(context): State<Context<S>>) -> Reply {
    Ok(Json(context.service.jobs().await?).into_response())
}

/// One job.
#[utoipa::path(get, path = "/v1/vm/jobs/{id}", operation_id = "job", tag = "disks",
    params(("id" = String, Path, description = "A job.", pattern = "^[0-9]{1,19}$")),
    responses(
    (status = 200, description = "How far it is.", body = JobView),
    (status = 404, description = "There is no VM, or no such job.", body = ApiError),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn job<S: VmService>(State(context): State<Context<S>>, path: Named) -> Reply {
    Ok(Json(context.service.job(named(path)?).await?).into_response())
}

/// Changes a job's rate, or lets it wait or go on. One that is over stays as it is.
#[utoipa::path(patch, path = "/v1/vm/jobs/{id}", operation_id = "change_job", tag = "disks",
    params(("id" = String, Path, description = "A job.", pattern = "^[0-9]{1,19}$")),
    request_body(content = JobChange, content_type = "application/json"),
    responses(
    (status = 200, description = "Changed.", body = JobView),
    (status = 400, description = "The body is not what is expected.", body = ApiError),
    (status = 408, description = "The body did not arrive in time.", body = ApiError),
    (status = 413, description = "The body is too large.", body = ApiError),
    (status = 415, description = "The body is no JSON.", body = ApiError),
    (status = 404, description = "There is no VM, or no such job.", body = ApiError),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn change_job<S: VmService>(
    State(context): State<Context<S>>,
    path: Named,
    request: Request,
) -> Reply {
    let body: JobChange = json(request).await?;
    Ok(Json(context.service.change_job(named(path)?, body).await?).into_response())
}

/// Cancels a job that is under way; forgets one that is over.
#[utoipa::path(delete, path = "/v1/vm/jobs/{id}", operation_id = "delete_job", tag = "disks",
    params(("id" = String, Path, description = "A job.", pattern = "^[0-9]{1,19}$")),
    responses(
    (status = 200, description = "It ends, or is forgotten.", body = JobView),
    (status = 404, description = "There is no VM, or no such job.", body = ApiError),
    (status = 500, description = "A failure that no request should cause.", body = ApiError),
))]
pub(super) async fn delete_job<S: VmService>(
    State(context): State<Context<S>>,
    path: Named,
) -> Reply {
    Ok(Json(context.service.delete_job(named(path)?).await?).into_response())
}
