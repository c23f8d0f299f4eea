"""What routes depend on: the service, its searcher, and the right to write.

Nothing here waits, so all are `async`: FastAPI would run each of the others in a thread.
"""

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated, Any, TypeVar, get_origin

from fastapi import Depends, HTTPException, Path, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from hashseek.api.collections.collections import Collections
from hashseek.api.collections.service import Service
from hashseek.api.messages.parameters import NoParameters
from hashseek.api.messages.problems import ReadOnly
from hashseek.api.messages.schemas import url_prefix
from hashseek.indexing.collection import Collection
from hashseek.indexing.searcher import Searcher
from hashseek.retrieval.errors import BadConfig

Model = TypeVar("Model", bound=BaseModel)


async def get_collections(request: Request) -> Collections:
    """The collections of this application."""
    collections: Collections = request.app.state.collections
    return collections


async def get_service(request: Request) -> Service:
    """The collection that the path names, or the only one."""
    service = (await get_collections(request)).get(request.path_params.get("collection", ""))
    url_prefix.set(service.url_prefix)
    return service


async def get_searcher(request: Request) -> AsyncIterator[Searcher]:
    """The searcher, or an error while there is none. The collection is kept until the request is answered."""
    service = await get_service(request)
    searcher = service.searcher
    service.in_use += 1
    try:
        yield searcher
    finally:
        service.in_use -= 1


# They call each other. FastAPI would take as long for a dependency of a dependency as for one of a route.
CollectionsDep = Annotated[Collections, Depends(get_collections)]
ServiceDep = Annotated[Service, Depends(get_service)]
SearcherDep = Annotated[Searcher, Depends(get_searcher)]


def local(searcher: Searcher) -> Collection:
    """The collection, if it is in a folder.

    Raises:
        BadConfig: another program keeps it.
    """
    if not isinstance(searcher.collection, Collection):
        raise BadConfig(f"{searcher.collection.place} is no folder, which this request needs")
    return searcher.collection


async def name_collection(collection: Annotated[str, Path(description="Name of the collection.")]) -> None:
    """Tell the OpenAPI document that the path has a name; `get_service` reads it."""


async def require_writable(request: Request) -> None:
    """Raise `ReadOnly` if the service may not change its collections."""
    if (await get_collections(request)).settings.read_only:
        raise ReadOnly("the service was started read-only: start it without --read-only to add or remove images")


async def refuse_query(request: Request) -> None:
    """Refuse every parameter in the query string."""
    _validated(NoParameters, dict(request.query_params), "query")


def form_of(model: type[Model]) -> Any:
    """A dependency: the form of a request, which has no query string. `body_of` documents it.

    FastAPI's own way would take 0.1 ms longer for a form of fifteen fields.
    """
    lists = {field.alias or name for name, field in model.model_fields.items() if get_origin(field.annotation) is list}

    async def read(request: Request) -> AsyncIterator[Model]:
        await refuse_query(request)
        try:
            form = await request.form()
        except ClientDisconnect:
            raise HTTPException(HTTPStatus.BAD_REQUEST, "the client has gone") from None
        try:
            given = {name: form.getlist(name) if name in lists else form[name] for name in form}
            # Forms of pages send empty fields.
            yield _validated(model, {name: value for name, value in given.items() if value != ""}, "body")
        finally:
            await form.close()

    return Depends(read)


def body_of(form: type[BaseModel], json: dict[str, Any] | None = None) -> dict[str, Any]:
    """The OpenAPI document of a route's body: a form, or also JSON of this schema."""
    schemas = {"multipart/form-data": form.model_json_schema()} | ({"application/json": json} if json else {})
    return {
        "requestBody": {"required": True, "content": {kind: {"schema": schema} for kind, schema in schemas.items()}}
    }


def _validated(model: type[Model], values: dict[str, Any], where: str) -> Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise RequestValidationError([{**one, "loc": (where, *one["loc"])} for one in error.errors()]) from None


WritableDep = Depends(require_writable)
NoQueryDep = Depends(refuse_query)
