"""Clients of a running service: `Client`, and `AsyncClient` with the same methods as coroutines.

    with hashseek.Client("http://127.0.0.1:8000") as client:
        for hit in client.search("query.jpg", k=5).hits:
            print(hit.distance, hit.path)

A request that gets 429, 502, 503 or 504, or whose connection breaks, is sent again; the service makes each change only
once. Images are paths or the bytes of files. Importing this module loads neither torch nor FastAPI.
"""

import asyncio
import inspect
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, wraps
from operator import index
from pathlib import Path
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypedDict, TypeVar, Unpack, get_args
from urllib.parse import quote
from uuid import uuid4

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from hashseek.api.messages.schemas import (
    NDJSON,
    AddedImage,
    DuplicateGroups,
    Encoded,
    ImagePage,
    ImageRecord,
    ProblemDetails,
    Removed,
    SearchAnswer,
    SearchAnswers,
    Stats,
)
from hashseek.retrieval.errors import BadConfig, BadImage, HashseekError

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
H = TypeVar("H", httpx.Client, httpx.AsyncClient)
ImageFile = str | Path | bytes

_PAGE = 1000  # records in one answer
_BATCH = 64  # images in one request
_BATCH_BYTES = 2**24  # of their files, unless one image is larger; half of a service's default limit
_AT_ONCE = 16  # requests of an AsyncClient; among a thousand that wait, httpx takes minutes to choose
_TEMPORARY = (429, 502, 503, 504)  # 502 and 504 come from a proxy
_INVALID = (400, 413, 422)  # answers to a batch that is too large, or has invalid details
_LONGEST_WAIT = 60.0  # seconds before a request is sent again


class ServiceError(HashseekError):
    """The service refused a request, or did not answer.

    Attributes:
        status: the HTTP status; None if there was no response.
        kind: the class of the error, such as UnknownImage; empty if unknown.
    """

    def __init__(self, message: str, *, status: int | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class Filters(TypedDict, total=False):
    """Which images; see docs/how-to/filter-searches.md."""

    label: Sequence[str]
    any_label: Sequence[str]
    without: Sequence[str]
    where: Sequence[str]
    id: Sequence[int]
    key: Sequence[str]
    added_after: str
    added_before: str


class SearchOptions(Filters, total=False):
    """How to search; see docs/reference/http-api.md."""

    k: int
    offset: int
    max_distance: int
    min_precision: float
    effort: int
    rank: Literal["hamming", "asymmetric", "float"]
    oversample: int
    include: Sequence[Literal["histogram"]]


class FileSearchOptions(SearchOptions, total=False):
    """How to search with image files."""

    combine: Literal["mean", "union"]


class Query(TypedDict, total=False):
    """What to search with: one of these."""

    image_id: int
    image_key: str
    code: str
    vector: Sequence[float]


class Details(TypedDict, total=False):
    """The details of an image."""

    key: str
    labels: Sequence[str]
    attributes: Mapping[str, Any]


Image = ImageFile | tuple[ImageFile, Details]

_LISTS = {"label", "any_label", "without", "where", "id", "key", "include"}
_ONE_OF = {"any_label", "id", "key"}  # an image must match one value of each of these


@dataclass(frozen=True)
class _Call(Generic[T]):
    """A request, and how its answer is read. `content`: arguments of httpx."""

    method: str
    path: str
    read: Callable[[bytes], T]
    content: dict[str, Any] = field(default_factory=dict)


class _Calls:
    """The requests of both clients."""

    @staticmethod
    def search(*images: ImageFile, **options: Unpack[FileSearchOptions]) -> _Call[SearchAnswer]:
        """The stored images most similar to an image, or to several together: the mean of their outputs, or a union."""
        files = [("image", _upload(image)) for image in images]
        return _Call("POST", "/v1/search", _model(SearchAnswer), {"files": files, "data": _fields(options)})

    @staticmethod
    def search_url(url: str, **options: Unpack[SearchOptions]) -> _Call[SearchAnswer]:
        """The stored images most similar to a picture that the service downloads from a host that it allows."""
        return _Call("POST", "/v1/search", _model(SearchAnswer), _json({"url": url, **_fields(options)}))

    @staticmethod
    def search_each(queries: Sequence[Query], **options: Unpack[SearchOptions]) -> _Call[list[SearchAnswer]]:
        """An answer for each of up to 64 queries, such as {"image_id": 12} or {"code": "b1c47f3a0d22"}."""
        body = {"queries": list(queries), **_fields(options)}
        read = _model(SearchAnswers)
        return _Call("POST", "/v1/search", lambda content: read(content).answers, _json(body))

    @staticmethod
    def similar(image_id: int, **options: Unpack[SearchOptions]) -> _Call[SearchAnswer]:
        """The stored images most similar to a stored one, which is among them if it matches the filters."""
        return _Call("GET", f"{_path_of_id(image_id)}/similar", _model(SearchAnswer), {"params": _fields(options)})

    @staticmethod
    def encode(image: ImageFile) -> _Call[Encoded]:
        """The code of an image, in hex. Nothing is stored."""
        return _Call("POST", "/v1/encode", _model(Encoded), {"files": {"image": _upload(image)}})

    @staticmethod
    def encode_vector(vector: Sequence[float]) -> _Call[Encoded]:
        """The code of a vector, in hex."""
        return _Call("POST", "/v1/encode", _model(Encoded), _json({"vector": list(vector)}))

    @staticmethod
    def add(
        image: ImageFile,
        *,
        key: str | None = None,
        labels: Sequence[str] = (),
        attributes: Mapping[str, Any] | None = None,
    ) -> _Call[AddedImage]:
        """Store an image. Without a key, its content decides whether it is new; with a key, the key does."""
        if key == "":  # an empty field of a form is not given
            raise BadConfig("the key is empty: use 1 to 512 characters, or leave it out")
        given = {"key": key, "attributes": _dumped(dict(attributes)) if attributes else None}
        data = {"labels": _list(labels), **{name: value for name, value in given.items() if value is not None}}
        return _Call("POST", "/v1/images", _model(AddedImage), {"files": {"image": _upload(image)}, "data": data})

    @staticmethod
    def batch(images: Sequence[Image]) -> _Call[list[AddedImage | HashseekError]]:
        """Store up to 64 images: `add_many` sends this."""
        given = [image if isinstance(image, tuple) else (image, Details()) for image in images]
        files = [("image", _upload(image)) for image, _ in given]
        details = [{name: value for name, value in one.items() if value is not None} for _, one in given]
        data = {"details": _dumped(details)} if any(details) else {}
        return _Call("POST", "/v1/batch", _results, {"files": files, "data": data})

    @staticmethod
    def get(image: int | str) -> _Call[ImageRecord]:
        """The record of the image with this id (int) or key (str)."""
        return _Call("GET", _path(image), _model(ImageRecord))

    @staticmethod
    def change(
        image: int | str, *, labels: Sequence[str] | None = None, attributes: Mapping[str, Any] | None = None
    ) -> _Call[ImageRecord]:
        """Replace the labels or attributes, or both, of the image with this id (int) or key (str)."""
        given = {
            "labels": None if labels is None else _list(labels),
            "attributes": None if attributes is None else dict(attributes),
        }
        body = {name: value for name, value in given.items() if value is not None}
        return _Call("PATCH", _path(image), _model(ImageRecord), _json(body))

    @staticmethod
    def delete(image: int | str) -> _Call[None]:
        """Delete the image with this id (int) or key (str)."""
        return _Call("DELETE", _path(image), lambda _: None)

    @staticmethod
    def delete_where(expected: int, **filters: Unpack[Filters]) -> _Call[Removed]:
        """Delete the images that match the filters, if their number is the expected one."""
        return _Call("DELETE", "/v1/images", _model(Removed), {"params": {"expected": expected, **_fields(filters)}})

    @staticmethod
    def page(*, after: int = 0, limit: int = _PAGE, **filters: Unpack[Filters]) -> _Call[ImagePage]:
        """Some of the stored images that match the filters, by ascending id."""
        params = {"after": after, "limit": limit, **_fields(filters)}
        return _Call("GET", "/v1/images", _model(ImagePage), {"params": params})

    @staticmethod
    def file(image_id: int, *, size: int | None = None) -> _Call[bytes]:
        """The file of a stored image, or a JPEG thumbnail with at most `size` pixels on each side."""
        return _Call("GET", f"{_path_of_id(image_id)}/file", bytes, {"params": {} if size is None else {"size": size}})

    @staticmethod
    def duplicates(radius: int, *, limit: int = 20, offset: int = 0) -> _Call[DuplicateGroups]:
        """Some of the groups of images linked by steps of at most `radius` bits, without those that were kept."""
        params = {"radius": radius, "limit": limit, "offset": offset}
        return _Call("GET", "/v1/duplicates", _model(DuplicateGroups), {"params": params})

    @staticmethod
    def keep_duplicates(ids: Sequence[int]) -> _Call[None]:
        """Keep all images of a group: `duplicates` leaves it out until it gains another image."""
        return _Call("POST", "/v1/duplicates/kept", lambda _: None, _json({"ids": list(ids)}))

    @staticmethod
    def stats() -> _Call[Stats]:
        """What the collection holds."""
        return _Call("GET", "/v1/stats", _model(Stats))


def _blocking(make: Callable[P, _Call[T]]) -> Callable[Concatenate["Client", P], T]:
    @wraps(make)
    def method(client: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        with _refusing_invalid_text():
            return client._send(make(*args, **kwargs))

    return _with_signature(method, make)


def _awaited(make: Callable[P, _Call[T]]) -> Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, T]]:
    @wraps(make)
    async def method(client: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        async with client._slots:
            with _refusing_invalid_text():
                return await client._send(make(*args, **kwargs))

    return _with_signature(method, make)


@contextmanager
def _refusing_invalid_text() -> Iterator[None]:
    """Refuse text that is not Unicode, such as the name of a file that is not UTF-8."""
    try:
        yield
    except UnicodeEncodeError as error:
        part = error.object[max(error.start - 40, 0) : error.end + 40]
        raise BadConfig(f"{part!r} cannot be sent: use text that can be written as UTF-8") from None


def _with_signature(method: F, make: Callable[..., _Call[Any]]) -> F:
    """The method with the signature of the static function `make` and `self`, for `help` and mocks."""
    signature = inspect.signature(make)
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *signature.parameters.values()]
    [returned] = get_args(signature.return_annotation)
    method.__signature__ = signature.replace(parameters=parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return method


class _Batches:
    """Batches of images, which are read as they are needed. A batch that is refused is divided and sent again."""

    def __init__(self, images: Iterable[Image]) -> None:
        self._new = _in_batches(images)
        self._divided: list[list[Image]] = []  # the next one last

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Image]:
        return self._divided.pop() if self._divided else next(self._new)

    def divide(self, batch: list[Image], error: HashseekError) -> list[AddedImage | HashseekError]:
        """The results of a batch that failed: the error of a single image. Several are divided to find the bad ones.

        Raises:
            ServiceError: `error`, if no image is the reason for it.
        """
        if isinstance(error, ServiceError) and error.status not in _INVALID:
            raise error
        if len(batch) == 1:
            return [error]
        half = len(batch) // 2
        self._divided += [batch[half:], batch[:half]]
        return []


def _in_batches(images: Iterable[Image]) -> Iterator[list[Image]]:
    batch: list[Image] = []
    n_bytes = 0
    for image in images:
        size = _size(image[0] if isinstance(image, tuple) else image)
        if batch and n_bytes + size > _BATCH_BYTES:
            yield batch
            batch, n_bytes = [], 0
        batch.append(image)
        n_bytes += size
        if len(batch) == _BATCH:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


def _size(image: ImageFile) -> int:
    """Bytes of a file; 0 if it cannot be read, which `_upload` reports."""
    if isinstance(image, bytes):
        return len(image)
    try:
        return Path(image).stat().st_size
    except (OSError, TypeError, ValueError):
        return 0


_Outcome = httpx.Response | httpx.HTTPError | httpx.InvalidURL
_Broken = httpx.ReadError | httpx.WriteError | httpx.RemoteProtocolError  # a connection that was established


class _Connection(Generic[H]):
    """Setup that both clients share."""

    _new: type[H]

    def __init__(
        self,
        url: str,
        *,
        collection: str | None = None,
        api_key: str | None = None,
        timeout: float = 60,
        retries: int = 5,
        http: H | None = None,
    ) -> None:
        self.url = url.rstrip("/") + (f"/collections/{quote(collection, safe='')}" if collection else "")
        self.retries = retries
        self._headers = _headers(api_key)
        try:
            self._http: H = http or self._new(timeout=timeout)
        except (httpx.InvalidURL, ValueError) as error:  # such as ALL_PROXY=socks://127.0.0.1:1080
            raise ServiceError(f"{error}: correct or unset ALL_PROXY, HTTP_PROXY and HTTPS_PROXY") from None
        self._reached = False  # whether a connection to the service has been established yet

    def _may_try_again(self, outcome: _Outcome, attempt: int) -> bool:
        self._reached |= isinstance(outcome, httpx.Response | _Broken)
        return attempt < self.retries and _is_temporary(outcome, reached=self._reached)

    def _headers_of(self, call: _Call[Any]) -> dict[str, str]:
        return self._headers if call.method == "GET" else {**self._headers, "Idempotency-Key": uuid4().hex}


class Client(_Connection[httpx.Client]):
    """A service at a URL. Close it after use, or use it in a `with` statement.

    Args:
        url: the URL of the service.
        collection: the name of the collection, if the service has several.
        api_key: needed if the service requires keys; default: the environment variable HASHSEEK_API_KEY.
        timeout: seconds to wait for a response.
        retries: how often a request is repeated while it gets 429, 502, 503 or 504, if the connection
            breaks, or if a service that has answered before cannot be reached, since it may be restarting. A change has
            an Idempotency-Key, so it is made only once.
        http: the client to use instead of a new `httpx.Client`; for example one with your own certificates.

    Raises (every method):
        ServiceError: the service refused the request, or did not answer.
    """

    _new = httpx.Client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    search = _blocking(_Calls.search)
    search_url = _blocking(_Calls.search_url)
    search_each = _blocking(_Calls.search_each)
    similar = _blocking(_Calls.similar)
    encode = _blocking(_Calls.encode)
    encode_vector = _blocking(_Calls.encode_vector)
    add = _blocking(_Calls.add)
    get = _blocking(_Calls.get)
    change = _blocking(_Calls.change)
    delete = _blocking(_Calls.delete)
    delete_where = _blocking(_Calls.delete_where)
    page = _blocking(_Calls.page)
    file = _blocking(_Calls.file)
    duplicates = _blocking(_Calls.duplicates)
    keep_duplicates = _blocking(_Calls.keep_duplicates)
    stats = _blocking(_Calls.stats)

    def add_many(self, images: Iterable[Image]) -> Iterator[AddedImage | HashseekError]:
        """Store any number of images; yields the stored image or the error for each, in order.

        Args:
            images: files, or (file, details) such as ("cat.jpg", {"key": "shop/4711", "labels": ["cat"]}). They are
                read while they are sent, at most 64 files or 16 MiB at a time, or a single larger file.

        If a request is sent again, images that it had stored before are reported as "known".
        """
        for batch in (batches := _Batches(images)):
            try:
                results = self._send(_Calls.batch(batch))
            except HashseekError as error:
                results = batches.divide(batch, error)
            yield from results

    def images(self, **filters: Unpack[Filters]) -> Iterator[ImageRecord]:
        """All stored images that match the filters, by ascending id; requested as they are needed."""
        after: int | None = 0
        while after is not None:
            page = self.page(after=after, **filters)
            yield from page.images
            after = page.next

    def _send(self, call: _Call[T]) -> T:
        url, headers = self.url + call.path, self._headers_of(call)
        for attempt in range(self.retries + 1):
            outcome: _Outcome
            try:
                outcome = self._http.request(call.method, url, headers=headers, **call.content)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                outcome = error
            if not self._may_try_again(outcome, attempt):
                break
            time.sleep(_wait(outcome, attempt))
        return _read(call, outcome, self.url)


class AsyncClient(_Connection[httpx.AsyncClient]):
    """`Client` for asyncio: its methods are coroutines; `images` and `add_many` are asynchronous iterators.

    It sends at most 16 requests at a time; other calls wait.
    """

    _new = httpx.AsyncClient

    @cached_property
    def _slots(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(_AT_ONCE)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    search = _awaited(_Calls.search)
    search_url = _awaited(_Calls.search_url)
    search_each = _awaited(_Calls.search_each)
    similar = _awaited(_Calls.similar)
    encode = _awaited(_Calls.encode)
    encode_vector = _awaited(_Calls.encode_vector)
    add = _awaited(_Calls.add)
    get = _awaited(_Calls.get)
    change = _awaited(_Calls.change)
    delete = _awaited(_Calls.delete)
    delete_where = _awaited(_Calls.delete_where)
    page = _awaited(_Calls.page)
    file = _awaited(_Calls.file)
    duplicates = _awaited(_Calls.duplicates)
    keep_duplicates = _awaited(_Calls.keep_duplicates)
    stats = _awaited(_Calls.stats)

    async def add_many(self, images: Iterable[Image]) -> AsyncIterator[AddedImage | HashseekError]:
        """`Client.add_many` as an asynchronous iterator over an ordinary iterable."""
        for batch in (batches := _Batches(images)):
            try:
                async with self._slots:
                    results = await self._send(_Calls.batch(batch))
            except HashseekError as error:
                results = batches.divide(batch, error)
            for result in results:
                yield result

    async def images(self, **filters: Unpack[Filters]) -> AsyncIterator[ImageRecord]:
        """All stored images that match the filters, by ascending id; requested as they are needed."""
        after: int | None = 0
        while after is not None:
            page = await self.page(after=after, **filters)
            for image in page.images:
                yield image
            after = page.next

    async def _send(self, call: _Call[T]) -> T:
        url, headers = self.url + call.path, self._headers_of(call)
        for attempt in range(self.retries + 1):
            outcome: _Outcome
            try:
                outcome = await self._http.request(call.method, url, headers=headers, **call.content)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                outcome = error
            if not self._may_try_again(outcome, attempt):
                break
            await asyncio.sleep(_wait(outcome, attempt))
        return _read(call, outcome, self.url)


def _is_temporary(outcome: _Outcome, *, reached: bool) -> bool:
    """Whether the service is busy or being restarted, or the connection broke after it was established.

    A refused connection is a restart if the service has been reached before, otherwise most often a wrong URL.
    """
    if isinstance(outcome, httpx.ConnectError):
        return reached
    if isinstance(outcome, Exception):
        return isinstance(outcome, _Broken)
    if outcome.headers.get("Content-Type") == NDJSON:  # a batch, some of whose images may be sent again
        return any(json.loads(line).get("status") in _TEMPORARY for line in outcome.content.splitlines())
    return outcome.status_code in _TEMPORARY


def _wait(outcome: _Outcome, attempt: int) -> float:
    """Seconds until the request is sent again: as long as the service asks for, and longer with each attempt."""
    after = "" if isinstance(outcome, Exception) else outcome.headers.get("Retry-After", "")
    return min(float(after) if after.isdigit() else 1.0, _LONGEST_WAIT) + attempt * random.random()


def _read(call: _Call[T], response: _Outcome, url: str) -> T:
    if isinstance(response, httpx.TimeoutException):
        raise ServiceError(f"{url} did not answer in time: try again, or increase timeout=SECONDS")
    if isinstance(response, httpx.InvalidURL):  # of a client that has been created, so not its own URL
        raise BadConfig(f"the request cannot be sent ({response}): use fewer or shorter filters and keys")
    if isinstance(response, Exception):
        raise ServiceError(
            f"no service answers at {url} ({response}): start one with `hashseek serve`, or correct the URL"
        )
    if not response.is_success:
        try:
            problem = response.json()
            detail, kind = str(problem["detail"]), str(problem["type"]).removeprefix("urn:hashseek:")
        except (ValueError, KeyError, TypeError):
            detail, kind = f"{response.status_code} {response.reason_phrase}", ""
        message = f"the service refused {call.method} {url}{call.path}: {detail}"
        if response.status_code == httpx.codes.UNAUTHORIZED:
            message += " (set HASHSEEK_API_KEY, or pass api_key)"
        raise ServiceError(message, status=response.status_code, kind=kind)
    try:
        return call.read(response.content)
    except ValidationError:
        raise ServiceError(f"{url} is not a Hashseek service of this version", status=response.status_code) from None


def _headers(api_key: str | None) -> dict[str, str]:
    key = (api_key or os.environ.get("HASHSEEK_API_KEY", "")).strip()  # a secret read from a file ends in a line break
    if not (key.isascii() and key.isprintable()):
        raise BadConfig("the API key contains invalid characters: check api_key and HASHSEEK_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _model(model: type[M]) -> Callable[[bytes], M]:
    return model.model_validate_json


def _results(content: bytes) -> list[AddedImage | HashseekError]:
    """The answer of a batch for each image."""
    read = TypeAdapter[AddedImage | ProblemDetails](AddedImage | ProblemDetails).validate_json
    return [_result(read(line)) for line in content.splitlines()]


def _result(found: AddedImage | ProblemDetails) -> AddedImage | ServiceError:
    if isinstance(found, AddedImage):
        return found
    return ServiceError(found.detail, status=found.status, kind=found.type.removeprefix("urn:hashseek:"))


def _fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as request parameters: a single value stands for a list of one, and None means not given."""
    fields = {name: _number(value) for name, value in options.items() if value is not None}
    for name in _LISTS & fields.keys():
        value = fields[name]
        fields[name] = [value] if isinstance(value, str | int) else [_number(one) for one in value]
        if name in _ONE_OF and not fields[name]:
            raise BadConfig(f"{name} is an empty list, which no image can match: leave it out to include all images")
    return fields


def _number(value: Any) -> Any:
    """A NumPy number or array as a Python object; anything else unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def _plain(value: Any) -> Any:
    """For `json.dumps`: converts objects that it does not support."""
    if (number := _number(value)) is value:
        raise BadConfig(f"{value!r} cannot be sent as JSON: use strings, numbers, lists and dictionaries")
    return number


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, default=_plain, allow_nan=False)
    except ValueError:
        raise BadConfig("NaN and infinity cannot be sent as JSON: remove or replace them") from None


def _json(body: dict[str, Any]) -> dict[str, Any]:
    """Arguments of httpx for a JSON body."""
    return {"json": json.loads(_dumped(body))}


def _list(labels: Sequence[str]) -> list[str]:
    if isinstance(labels, str):
        raise BadConfig(f"labels must be a list of strings, not one string: write [{labels[:40]!r}]")
    return list(labels)


def _upload(image: ImageFile) -> tuple[str, bytes]:
    """(name, content) of a file; the service keeps no name that ends in a slash."""
    if isinstance(image, bytes):
        return "/", image
    if not isinstance(image, (str, os.PathLike)):
        raise BadImage(f"{type(image).__name__} is not an image: use a path or the bytes of a file")
    path = Path(image)
    try:
        return os.fsencode(path.name).decode(errors="replace"), path.read_bytes()  # not all names are UTF-8
    except OSError as error:
        raise BadImage(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise BadImage(f"{str(path)!r} is not a path: it contains a NUL character") from None


def _path(image: int | str) -> str:
    if isinstance(image, str):
        key = quote(image, safe="").replace(".", "%2E")  # or httpx would resolve a key like ".."
        return f"/v1/images/by-key/{key}"
    return _path_of_id(image)


def _path_of_id(image_id: int) -> str:
    try:
        return f"/v1/images/{index(image_id)}"
    except TypeError:
        raise BadConfig(f"{image_id!r} is not an id: to look up the id of a key, use get(KEY).id") from None
