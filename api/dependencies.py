"""What routes ask for."""

from typing import Annotated, Any

from fastapi import Depends, File, Form, Query, Request, UploadFile
from pydantic import WithJsonSchema

from hashseek.api.parameters import GIVEN
from hashseek.api.problems import ReadOnly
from hashseek.api.service import Service
from hashseek.indexing.catalog.filters import Filter, make_filter
from hashseek.indexing.searcher import Searcher
from hashseek.retrieval.errors import BadConfig, BadImage


def get_service(request: Request) -> Service:
    """The service of this application."""
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(get_service)]


def get_searcher(service: ServiceDep) -> Searcher:
    """The searcher, or the problem that it is not there yet."""
    return service.searcher


SearcherDep = Annotated[Searcher, Depends(get_searcher)]


def require_writable(service: ServiceDep) -> None:
    """The problem that nothing may be changed, if so."""
    if service.settings.read_only:
        raise ReadOnly("the service was started read-only: start it without --read-only to add or remove images")


WritableDep = Depends(require_writable)


def read_upload(image: Annotated[UploadFile, File(description="The picture.")]) -> bytes:
    """The bytes of the uploaded picture."""
    data = image.file.read()
    if not data:
        raise BadImage("the upload is empty (0 bytes)")
    return data


UploadDep = Annotated[bytes, Depends(read_upload)]


def check_k(service: Service, k: int | None) -> int:
    """`k` if the service gives so many results; if none is asked for, the usual number, or what the service gives.

    Raises:
        BadConfig: it does not give so many.
    """
    if k is None:
        return min(USUAL_K, service.settings.max_k)
    if not 1 <= k <= service.settings.max_k:
        raise BadConfig(f"k is the number of results and must be 1 to {service.settings.max_k:,}, not {k}")
    return k


USUAL_K = 10

# The schema says the lower limits, but we check them ourselves: our sentences say more than the framework's.
_K = (
    f"Number of results, {USUAL_K} if not given (or as many as the service gives, if that is less); more than the "
    "collection holds gives all."
)
_MAX_DISTANCE: Any = {
    "description": "Leave out what is further away (bits).",
    "json_schema_extra": {"minimum": 0},
}
# None is what is not given, and nothing that could be sent.
_WHOLE = WithJsonSchema({"type": "integer", "minimum": 1, "description": _K})
KForm = Annotated[int | None, _WHOLE, Form(description=_K)]
KQuery = Annotated[int | None, _WHOLE, Query(description=_K)]
MaxDistanceForm = Annotated[int | None, Form(**_MAX_DISTANCE)]
MaxDistanceQuery = Annotated[int | None, Query(**_MAX_DISTANCE)]
_MIN_PRECISION: Any = {
    "description": "Instead of a distance: the largest radius within which so large a share of the images is expected "
    "to be relevant. The collection needs a calibration (`hashseek index calibrate`).",
    "json_schema_extra": {"minimum": 0, "maximum": 1},
}
MinPrecisionForm = Annotated[float | None, Form(**_MIN_PRECISION)]
MinPrecisionQuery = Annotated[float | None, Query(**_MIN_PRECISION)]
_EFFORT: Any = {
    "description": "Of an approximate index, how hard to look: /v1/stats names some values. An exact index takes none."
}
EffortForm = Annotated[int | None, Form(**_EFFORT)]
EffortQuery = Annotated[int | None, Query(**_EFFORT)]

# What both ways to search say of their filter; repeat a parameter to name several.
_LABEL: Any = {"description": "Only images that carry this label; of several, all of them."}
_ANY_LABEL: Any = {"description": "Only images that carry at least one of these labels."}
_WITHOUT: Any = {"description": "No image that carries one of these labels."}
_WHERE: Any = {
    "description": "Only images with such attributes: `camera=X`, `year>=2015` (or `<=`, `>`, `<`), `title^=abc`, "
    'a text that begins so; `camera.model=X` looks into an object; quotes, as in `zip="01234"`, compare as text. '
    "Of several, all must hold."
}
_ID: Any = {"description": "Only these ids."}
_KEY: Any = {"description": "Only images with these keys."}
_AFTER: Any = {
    "description": "Only images added then or later: an ISO 8601 date or time, UTC unless it says otherwise."
}
_BEFORE: Any = {"description": "Only images added earlier than that."}
Texts = Annotated[list[str] | None, GIVEN]
Ids = Annotated[list[int] | None, GIVEN]


def filter_of_form(
    label: Annotated[Texts, Form(**_LABEL)] = None,
    any_label: Annotated[Texts, Form(**_ANY_LABEL)] = None,
    without: Annotated[Texts, Form(**_WITHOUT)] = None,
    where: Annotated[Texts, Form(**_WHERE)] = None,
    only_id: Annotated[Ids, Form(alias="id", **_ID)] = None,
    only_key: Annotated[Texts, Form(alias="key", **_KEY)] = None,
    added_after: Annotated[str | None, Form(**_AFTER)] = None,
    added_before: Annotated[str | None, Form(**_BEFORE)] = None,
) -> Filter | None:
    """The filter of a search whose parameters are a form."""
    return _filter(label, any_label, without, where, only_id, only_key, added_after, added_before)


def filter_of_query(
    label: Annotated[Texts, Query(**_LABEL)] = None,
    any_label: Annotated[Texts, Query(**_ANY_LABEL)] = None,
    without: Annotated[Texts, Query(**_WITHOUT)] = None,
    where: Annotated[Texts, Query(**_WHERE)] = None,
    only_id: Annotated[Ids, Query(alias="id", **_ID)] = None,
    only_key: Annotated[Texts, Query(alias="key", **_KEY)] = None,
    added_after: Annotated[str | None, Query(**_AFTER)] = None,
    added_before: Annotated[str | None, Query(**_BEFORE)] = None,
) -> Filter | None:
    """The filter of a search whose parameters are in the address."""
    return _filter(label, any_label, without, where, only_id, only_key, added_after, added_before)


def _filter(
    label: Texts,
    any_label: Texts,
    without: Texts,
    where: Texts,
    ids: Ids,
    keys: Texts,
    added_after: str | None,
    added_before: str | None,
) -> Filter | None:
    return make_filter(
        all_labels=label or (),
        any_labels=any_label or (),
        no_labels=without or (),
        where=where or (),
        ids=ids or (),
        keys=keys or (),
        added_after=added_after,
        added_before=added_before,
    )


FilterForm = Annotated[Filter | None, Depends(filter_of_form)]
FilterQuery = Annotated[Filter | None, Depends(filter_of_query)]
