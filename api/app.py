"""Assembles the HTTP service from its middleware, error handlers and routes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from anyio import to_thread
from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware

from hashseek.api.access.limits import RequestLimits
from hashseek.api.access.repeats import HEADER, RepeatedChanges
from hashseek.api.collections.collections import Collections
from hashseek.api.messages import problems
from hashseek.api.messages.schemas import NDJSON, ProblemDetails, schema_ref
from hashseek.api.monitoring import metrics
from hashseek.api.monitoring.logs import ID_HEADER
from hashseek.api.routes import collections as collection_routes
from hashseek.api.routes import duplicates, health, images, reports, search, session, web
from hashseek.api.routes.dependencies import name_collection
from hashseek.api.settings import Settings


def create_app(settings: Settings) -> FastAPI:
    """The HTTP service for one collection or several. Loading begins when the application starts."""
    collections = Collections(settings)
    problem = {problems.MEDIA_TYPE: {"schema": schema_ref(ProblemDetails)}}

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # Each waiting upload holds a thread, and some must be left for other requests.
        to_thread.current_default_thread_limiter().total_tokens = settings.max_uploads + 16
        collections.start()
        yield
        collections.stop()

    app = FastAPIOffline(
        title="Hashseek",
        version=version("hashseek"),
        description="Image retrieval with deep hashing: find the stored images most similar to a query image.",
        lifespan=lifespan,
        generate_unique_id_function=lambda route: route.name,  # stable, for generated clients
        responses={"default": {"description": "An error, as problem JSON.", "content": problem}},
    )
    app.state.collections = collections
    problems.install(app)
    app.add_middleware(RepeatedChanges)
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=1, exclude_content_types=("image/*", NDJSON))
    app.add_middleware(RequestLimits, settings)
    if settings.allowed_origins:  # outside the limits, since a browser's preflight request has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["Authorization", HEADER, ID_HEADER, "traceparent", "tracestate"],
            expose_headers=["Retry-After", ID_HEADER],
        )
    app.add_middleware(metrics.Observed)
    _include_routes(app, settings, several=collections.several)
    # It is kept: made for the first request, it would block all others for 200 ms.
    app.openapi()["components"]["schemas"][ProblemDetails.__name__] = ProblemDetails.model_json_schema()
    return app


def _include_routes(app: FastAPI, settings: Settings, *, several: bool) -> None:
    # RequestLimits checks the keys. This only gives /docs a field for the key.
    keys = [Depends(HTTPBearer(auto_error=False))] if settings.keys else []
    prefix, named = ("/collections/{collection}", [Depends(name_collection)]) if several else ("", [])
    # Images come first: /v1/images/{id}/similar, of the searches, would take /v1/images/by-key/similar.
    image_routers = (images.router, images.batch_router, duplicates.router)
    for router in (*image_routers, search.router, health.router):
        app.include_router(router, prefix=prefix, dependencies=[*keys, *named])
    for router in (
        collection_routes.router,
        reports.router,
        session.router,
        *([collection_routes.changes] if several else []),
    ):
        app.include_router(router, dependencies=keys)
    for router in (health.probes, metrics.router, web.router):
        app.include_router(router)
    if several:
        app.include_router(web.router, prefix=prefix)
    app.mount("/web", StaticFiles(directory=web.FOLDER), name="web")
