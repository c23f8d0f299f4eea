"""The application: routes, errors, limits."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import Depends, FastAPI, Request, Response
from fastapi.staticfiles import StaticFiles
from fastapi_offline import FastAPIOffline

from hashseek.api import problems
from hashseek.api.parameters import check_parameters, without_empty
from hashseek.api.routes import health, images, search, web
from hashseek.api.schemas import Problem
from hashseek.api.service import Service
from hashseek.api.settings import Settings


def create_app(settings: Settings) -> FastAPI:
    """The service over one collection; it loads when the application starts."""
    service = Service(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    app = FastAPIOffline(
        title="Hashseek",
        version=version("hashseek"),
        description="Image retrieval with deep hashing: the stored images most similar to a picture.",
        lifespan=lifespan,
        responses={
            code: {
                "description": "A problem.",
                "content": {problems.MEDIA_TYPE: {"schema": Problem.model_json_schema()}},
            }
            for code in ("4XX", "5XX")
        },
    )
    app.state.service = service
    problems.install(app)
    app.add_middleware(problems.BodyLimit, max_bytes=settings.max_upload_bytes)

    @app.middleware("http")
    async def at_the_door(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        request.scope["query_string"] = without_empty(request.scope["query_string"])
        response = await call_next(request)
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    for group in (search, images):
        app.include_router(group.router, dependencies=[Depends(check_parameters)])
    for group in (health, web):
        app.include_router(group.router)
    app.mount("/web", StaticFiles(directory=web.FOLDER), name="web")
    return app
