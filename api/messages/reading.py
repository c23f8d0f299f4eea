"""Reads query strings, forms and JSON into pydantic models, and describes them in the OpenAPI document.

FastAPI's own `Query` and `Form` take 0.2 to 0.3 ms longer for the parameters of a search (docs/benchmarks.md), and keep
only the last value if a parameter for one value is repeated.
"""

import json
from collections.abc import AsyncIterator, Callable
from copy import deepcopy
from functools import cache
from http import HTTPStatus
from typing import Any, Literal, TypeVar

from fastapi import Depends, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from hashseek.api.monitoring.logs import ID_HEADER
from hashseek.retrieval.errors import BadConfig

M = TypeVar("M", bound=BaseModel)

# Bytes of JSON in a request. It takes ten times its size in memory, and all requests wait while it is parsed.
MAX_JSON = 2**22
_MAX_FIELDS = 10_000  # of a form: more than all its lists may have, so that each is refused for its own limit


def body_of(model: type[BaseModel], json_body: type[BaseModel] | None = None) -> Any:
    """A dependency that reads a multipart form into a model, or JSON into another. The route needs `documented_body`.

    Raises:
        BadConfig: a field of a form with one value is given twice.
        RequestValidationError: the fields do not fit the model, or the body is not JSON.
        HTTPException: 400, the body is not a form.
    """

    async def read(request: Request) -> AsyncIterator[BaseModel]:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            if json_body is not None and kind == "application/json":
                yield _checked(json_body.model_validate_json, await request.body(), "body")
                return
            async with request.form(max_fields=_MAX_FIELDS, max_part_size=MAX_JSON) as form:
                fields = _schema(model)["properties"]
                # Browsers send fields that were not filled in as empty. A filter that is empty is refused.
                single = {name for name, field in fields.items() if field.get("type") != "array"}
                filled_in = [(name, value) for name, value in form.multi_items() if value != "" or name not in single]
                yield _validated(model, filled_in, "body")
        except ClientDisconnect:  # nobody reads the answer, but it is counted
            raise HTTPException(HTTPStatus.BAD_REQUEST, "the client disconnected before its request arrived") from None

    return Depends(read)


def query_of(model: type[M]) -> Any:
    """A dependency that reads a query string as `body_of` reads a form. The route needs `documented_query`."""

    async def read(request: Request) -> M:
        return _validated(model, request.query_params.multi_items(), "query")

    return Depends(read)


def _validated(model: type[M], pairs: list[tuple[str, Any]], place: Literal["query", "body"]) -> M:
    fields, given = _schema(model)["properties"], dict[str, Any]()
    for name, value in pairs:
        if fields.get(name, {}).get("type") == "array":
            given.setdefault(name, []).append(value)
        elif name in given:
            raise BadConfig(
                f"{name[:40]!r} is given more than once: nothing was done; this request accepts it at most once"
            )
        else:
            given[name] = value
    return _checked(model.model_validate, given, place)


def _checked(validate: Callable[[Any], M], given: Any, place: Literal["query", "body"]) -> M:
    try:
        return validate(given)
    except ValidationError as error:
        errors = [{**one, "loc": (place, *one["loc"])} for one in error.errors(include_url=False)]
        raise RequestValidationError(errors) from None


def documented_query(model: type[BaseModel]) -> dict[str, Any]:
    """What the OpenAPI document says about the parameters that `query_of` reads."""
    schema = _schema_for_docs(model)
    parameters = [
        {
            "name": name,
            "in": "query",
            "required": name in schema.get("required", ()),
            "description": field["description"],
            "schema": field,
        }
        for name, field in schema["properties"].items()
    ]
    return {"parameters": parameters}


def documented_body(form: type[BaseModel], json_body: type[BaseModel] | None = None) -> dict[str, Any]:
    """What the OpenAPI document says about a body that `body_of` reads."""
    schema = _schema_for_docs(form)
    lists = [name for name, field in schema["properties"].items() if field.get("type") == "array"]
    encoding = {name: {"style": "form", "explode": True} for name in lists}  # one field for each value
    content = {"multipart/form-data": {"schema": schema, "encoding": encoding}}
    if json_body is not None:
        content["application/json"] = {"schema": _schema(json_body)}
    # Every request may have it. It is documented where there is a body: openapi-python-client 0.29 fails for operations
    # with two kinds of body and no optional parameter.
    request_id = {"name": ID_HEADER, "in": "header", "schema": {"type": "string"}, "description": "For the log."}
    return {"parameters": [request_id], "requestBody": {"required": True, "content": content}}


def _schema_for_docs(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of a query string or form with which /docs can send a request.

    Swagger UI fills in examples, so optional fields get an empty one. It offers to choose a file for the format binary,
    and for no JSON field if that has no media type.
    """
    schema = deepcopy(_schema(model))
    for name, field in schema["properties"].items():
        for one in (field, field.get("items", {})):
            if one.pop("contentMediaType", None) == "application/octet-stream":
                one["format"] = "binary"
        if name not in schema.get("required", ()):
            for example in field.pop("examples", ())[:1]:
                field["description"] += f" For example {example if isinstance(example, str) else json.dumps(example)}."
            field["example"] = [] if field.get("type") == "array" else ""
    return schema


@cache
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of a model, without references to those of other models."""
    schema = model.model_json_schema()
    text = json.dumps({name: value for name, value in schema.items() if name != "$defs"})
    for name, other in schema.get("$defs", {}).items():
        text = text.replace(json.dumps({"$ref": f"#/$defs/{name}"}), json.dumps(other))
    content: dict[str, Any] = json.loads(text)
    return content
