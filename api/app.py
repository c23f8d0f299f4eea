"""Assembles the HTTP service: routes, error handlers, the limit on uploads. Called by `hashseek serve` and by tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles
from fastapi_offline import FastAPIOffline

from hashseek.api import problems
from hashseek.api.routes import health, images, search, web
from hashseek.api.schemas import ProblemDetails
from hashseek.api.service import Service
from hashseek.api.settings import Settings


def create_app(settings: Settings) -> FastAPI:
    """The HTTP service for one collection. It begins to load when the application starts."""
    service = Service(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    app = FastAPIOffline(
        title="Hashseek",
        version=version("hashseek"),
        description="Image retrieval with deep hashing: finds the stored images most similar to a given one.",
        lifespan=lifespan,
        generate_unique_id_function=lambda route: route.name,  # stable, for generated clients
        responses={
            code: {
                "description": "An error, as problem JSON.",
                "content": {problems.MEDIA_TYPE: {"schema": ProblemDetails.model_json_schema()}},
            }
            for code in ("4XX", "5XX")
        }
        | {
            "400": {
                "description": "The request cannot be read; in plain text if not even its first line can.",
                "content": {problems.MEDIA_TYPE: {"schema": ProblemDetails.model_json_schema()}, "text/plain": {}},
            }
        },
    )
    app.state.service = service
    problems.install(app)
    app.add_middleware(
        problems.RequestLimits,
        max_bytes=settings.max_upload_bytes,
        max_changing=settings.max_uploads,
        hosts=settings.hosts(),
    )

    for router in (search.json_router, search.router, images.router, health.router, web.router):
        app.include_router(router)
    app.mount("/web", StaticFiles(directory=web.FOLDER), name="web")
    return app
