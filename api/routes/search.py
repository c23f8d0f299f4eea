"""Searching with uploaded images, or with stored ones, codes and vectors; encoding."""

import time
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Response
from pydantic_core import to_json

from hashseek.api.collections.service import Service
from hashseek.api.messages.parameters import (
    EncodeBody,
    EncodeForm,
    SearchBody,
    SearchForm,
    SearchParameters,
    SearchQuery,
)
from hashseek.api.messages.reading import body_of, documented_body, documented_query, query_of
from hashseek.api.messages.schemas import Encoded, SearchAnswer, SearchAnswers, hit_content
from hashseek.api.routes.dependencies import URL_SECONDS, NoQueryDep, SearcherDep, ServiceDep
from hashseek.indexing.remote import fetch
from hashseek.indexing.searcher import Answer, Searcher, SearchOptions
from hashseek.retrieval.errors import BadConfig, ForeignCodes

router = APIRouter(prefix="/v1", tags=["search"])


def _search_stored(service: Service, searcher: Searcher, body: SearchBody) -> Response:
    """The images most similar to a stored one, a code, a vector or a picture by URL, or to each of several queries."""
    fingerprint = searcher.collection.fingerprint
    if body.fingerprint not in (None, fingerprint):
        raise ForeignCodes(f"the collection has codes of checkpoint {fingerprint}, not of {body.fingerprint[:80]}")
    queries = body.queries or (body,)
    options = body.options(max_k=service.settings.max_k, n_queries=len(queries))
    if body.url is not None:
        answers = [searcher.search_files([_download(service, body.url)], options, name=body.url)]
    else:
        answers = [_search_with(searcher, query, options) for query in queries]
    contents = [_content(service, searcher, options, answer, n_queries=len(queries)) for answer in answers]
    return _json(contents[0] if body.queries is None else {"answers": contents})


def _download(service: Service, url: str) -> bytes:
    settings = service.settings
    if not settings.url_hosts:
        raise BadConfig(
            "this service does not download pictures: upload the picture, or start the service with --url-host HOST"
        )
    allowed = [host.lower() for host in settings.url_hosts]
    return fetch(url, only=allowed, max_bytes=settings.max_upload_bytes, seconds=URL_SECONDS)


def _search_with(searcher: Searcher, query: SearchQuery, options: SearchOptions) -> Answer:
    if query.code is not None:
        return searcher.search_code(np.frombuffer(bytes.fromhex(query.code), np.uint8), options)
    if query.vector is not None:
        return searcher.search_vectors(np.array([query.vector]), options)[0]
    if query.image_id is not None:
        return searcher.similar(query.image_id, options)
    return searcher.similar(searcher.collection.by_key(str(query.image_key)).id, options)


@router.post(
    "/search",
    response_model=SearchAnswer | SearchAnswers,
    dependencies=[NoQueryDep],
    openapi_extra=documented_body(SearchForm, SearchBody),
)
def search(
    service: ServiceDep,
    searcher: SearcherDep,
    body: Annotated[SearchForm | SearchBody, body_of(SearchForm, SearchBody)],
) -> Response:
    """The stored images that match the filters and are most similar to an uploaded one, or to several together.

    To search with a stored image, a code, a vector or a URL, send JSON: the same parameters, and one of image_id,
    image_key, code, vector and url, or a list of up to 64 queries.
    """
    if isinstance(body, SearchBody):
        return _search_stored(service, searcher, body)
    options = body.options(max_k=service.settings.max_k)
    files = [image.file.read() for image in body.image]
    answer = searcher.search_files(files, options, combine=body.combine, name="the upload")
    return _json(_content(service, searcher, options, answer))


@router.get("/images/{image_id}/similar", response_model=SearchAnswer, openapi_extra=documented_query(SearchParameters))
def similar(
    image_id: int,
    service: ServiceDep,
    searcher: SearcherDep,
    parameters: Annotated[SearchParameters, query_of(SearchParameters)],
) -> Response:
    """The stored images most similar to a stored one, which is among them if it matches the filters."""
    options = parameters.options(max_k=service.settings.max_k)
    return _json(_content(service, searcher, options, searcher.similar(image_id, options)))


@router.post("/encode", dependencies=[NoQueryDep], openapi_extra=documented_body(EncodeForm, EncodeBody))
def encode(searcher: SearcherDep, body: Annotated[EncodeForm | EncodeBody, body_of(EncodeForm, EncodeBody)]) -> Encoded:
    """The code of an uploaded image, or of a vector sent as JSON. Nothing is stored."""
    started = time.perf_counter()
    if isinstance(body, EncodeBody):
        [query] = searcher.queries_of(np.array([body.vector]))
    else:
        query = searcher.query_of(body.image.file.read(), name="the upload")
    return Encoded(
        code=query.code.tobytes().hex(),
        n_bits=searcher.encoder.n_bits,
        fingerprint=searcher.encoder.fingerprint,
        encode_ms=round(1000 * (time.perf_counter() - started), 3),
    )


def _content(
    service: Service, searcher: Searcher, options: SearchOptions, answer: Answer, *, n_queries: int = 1
) -> dict[str, Any]:
    """The content of a `SearchAnswer`; `n_queries`: of the request."""
    collection, following = searcher.collection, options.offset + options.k
    may_follow = (following + options.k) * n_queries <= service.settings.max_k
    return {
        "n_bits": collection.n_bits,
        "n_images": len(collection),
        "fingerprint": collection.fingerprint,
        "encode_ms": round(answer.encode_ms, 3),
        "search_ms": round(answer.search_ms, 3),
        "ranked_by": answer.rank,
        "is_exact": answer.is_exact,
        "next_offset": following if answer.is_full and may_follow else None,
        "histogram": None if answer.histogram is None else answer.histogram.tolist(),
        "hits": [hit_content(hit) for hit in answer.hits],
    }


def _json(content: dict[str, Any]) -> Response:
    """An answer without pydantic models, which would take as long as the search itself."""
    return Response(to_json(content), media_type="application/json")
