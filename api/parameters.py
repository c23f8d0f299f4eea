"""Refuses parameters that an operation does not have: a filter with a misspelled name would let everything through.

An empty value counts as not given, as forms send one for every field that was left alone. Of a field of a form that
takes one value FastAPI knows that; the rest is here.
"""

from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BeforeValidator

from hashseek.retrieval.errors import BadConfig


def _without_empty(values: Any) -> Any:
    return [value for value in values if value != ""] if isinstance(values, list) else values


GIVEN = BeforeValidator(_without_empty)  # for lists of a form: leaves empty values out


def without_empty(query: bytes) -> bytes:
    """The query of an address without parameters that have no value."""
    return b"&".join(part for part in query.split(b"&") if part.partition(b"=")[2])


async def check_parameters(request: Request) -> None:
    """Refuse a parameter that the operation does not have, or one value too many; what is known is in the schema.

    Raises:
        BadConfig: it names the parameter, and what was meant or where it belongs.
    """
    in_query, in_form = _known(request.app, request.scope["route"].path_format, request.method.lower())
    _check(request.query_params.multi_items(), in_query, in_form, "parameter", "field of the form")
    if in_form:  # parsed already, and kept by the request
        _check((await request.form()).multi_items(), in_form, in_query, "field", "parameter in the address")


def _check(
    given: Sequence[tuple[str, object]], known: dict[str, bool], elsewhere: dict[str, bool], kind: str, other: str
) -> None:
    filled = {name for name, value in given if value != ""}
    for name, times in Counter(name for name, _ in given).items():
        if times == 1 and name not in filled:
            continue  # as if it were not there
        if name in known:
            if times > 1 and not known[name]:
                raise BadConfig(f"the {kind} {name!r} is given {times} times and takes one value: send it once")
            continue
        near = get_close_matches(name, known, 1)
        if name in elsewhere:
            remedy = f"it is a {other} here"
        elif near:
            remedy = f"did you mean {near[0]!r}?"
        else:
            remedy = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        raise BadConfig(f"this request has no {kind} {name[:40]!r}, and it was not carried out: {remedy}")


def _known(app: FastAPI, path: str, method: str) -> tuple[dict[str, bool], dict[str, bool]]:
    """(parameters of the query, fields of the form): name -> whether it takes several values."""
    schema: dict[str, Any] = app.openapi()
    operation = schema["paths"][path][method]
    query = {one["name"]: _is_list(one["schema"]) for one in operation.get("parameters", ()) if one["in"] == "query"}
    form: dict[str, bool] = {}
    for content in operation.get("requestBody", {}).get("content", {}).values():
        name = content["schema"].get("$ref", "").rpartition("/")[2]
        fields = schema["components"]["schemas"][name]["properties"] if name else {}
        form |= {field: _is_list(one) for field, one in fields.items()}
    return query, form


def _is_list(schema: dict[str, Any]) -> bool:
    return any(one.get("type") == "array" for one in (schema, *schema.get("anyOf", ())))
