"""Stored images: list them, get records and files, add, change, delete."""

import hashlib
import logging
import os
import re
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from anyio import to_thread
from fastapi import APIRouter, Depends, Request, Response, UploadFile, status
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.convertors import PathConvertor, register_url_convertor

from hashseek.api.decoding import Decoders
from hashseek.api.messages.parameters import (
    AddForm,
    AddManyForm,
    DeleteParameters,
    FileParameters,
    ImageChanges,
    ImageDetails,
    PageParameters,
)
from hashseek.api.messages.problems import FileGone, FileNotSent, UnexpectedNumber, describe
from hashseek.api.messages.reading import body_of, documented_body, documented_query, query_of
from hashseek.api.messages.schemas import (
    NDJSON,
    AddedImage,
    ImagePage,
    ImageRecord,
    ProblemDetails,
    Removed,
    schema_ref,
    shown_path,
)
from hashseek.api.routes.dependencies import (
    URL_SECONDS,
    CollectionsDep,
    NoQueryDep,
    SearcherDep,
    WritableDep,
    refuse_body,
)
from hashseek.indexing.catalog import NewImage, StoredImage
from hashseek.indexing.catalog.records import StoredCode
from hashseek.indexing.printing import counted
from hashseek.indexing.remote import MAX_BYTES, is_remote
from hashseek.indexing.searcher import Searcher
from hashseek.indexing.uris import is_there, open_uri
from hashseek.retrieval.errors import BadConfig, BadImage, HashseekError, UnknownImage
from hashseek.retrieval.images import LoadedFile
from hashseek.retrieval.tar_members import stored_in

_SUFFIX = {
    "image/jpeg": ".jpg",
    "image/png": ".png",
    "image/webp": ".webp",
    "image/gif": ".gif",
    "image/bmp": ".bmp",
    "image/tiff": ".tif",
    "image/avif": ".avif",
    "image/heif": ".heic",
}
# First bytes of the supported image formats. A path that once led to an image may now lead to a secret.
_SIGNATURES = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|BM|II[*+]\0|II\0\*|MM\0[*+]|MM\*\0|RIFF.{4}WEBP|.{4}ftyp", re.DOTALL
)

_FILE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file.", "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}},
    304: {"description": "Not modified: the client already has the file."},
}

_LINE = {"oneOf": [schema_ref(AddedImage), schema_ref(ProblemDetails)]}


class _AnyText(PathConvertor):
    regex = r"[\s\S]*"  # `path` leaves out a line break at the end, which would make it another key


register_url_convertor("text", _AnyText())
log = logging.getLogger("hashseek")

router = APIRouter(prefix="/v1/images", tags=["images"])
batch_router = APIRouter(prefix="/v1", tags=["images"])


@router.get("", openapi_extra=documented_query(PageParameters))
def list_images(searcher: SearcherDep, parameters: Annotated[PageParameters, query_of(PageParameters)]) -> ImagePage:
    """Stored images that match the filters, by ascending id."""
    page = searcher.collection.browse(
        parameters.among(), after=parameters.after, offset=parameters.offset, limit=parameters.limit
    )
    return ImagePage(images=[ImageRecord.of(stored) for stored in page.images], total=page.total, next=page.next)


@router.delete("", dependencies=[WritableDep, Depends(refuse_body)], openapi_extra=documented_query(DeleteParameters))
def delete_images(
    searcher: SearcherDep, parameters: Annotated[DeleteParameters, query_of(DeleteParameters)]
) -> Removed:
    """Delete all images that match the filters, if their number is the expected one. At least one filter is needed.

    `GET /v1/images` with the same filters returns it as `total`. Files outside the collection's folder are kept.
    """
    among = parameters.among()
    if among is None:
        raise BadConfig("nothing was deleted: name at least one filter, such as label")
    ids = searcher.collection.ids_where(among).tolist()
    if len(ids) != parameters.expected:
        raise UnexpectedNumber(
            f"nothing was deleted: the filters match {counted(len(ids), 'image')}, not {parameters.expected:,}"
        )
    searcher.collection.remove(ids, missing_ok=True)
    return Removed(removed=len(ids))


# Defined before the routes with an id, which would read "by-key" as an id.
@router.get("/by-key/{key:text}", dependencies=[NoQueryDep])
def get_image_by_key(key: str, searcher: SearcherDep) -> ImageRecord:
    """The record of the image with this key, which may contain slashes."""
    return ImageRecord.of(searcher.collection.by_key(key))


@router.patch("/by-key/{key:text}", dependencies=[WritableDep, NoQueryDep])
def change_image_by_key(key: str, searcher: SearcherDep, changes: ImageChanges) -> ImageRecord:
    """Replace the labels or attributes of the image with this key."""
    return change_image(searcher.collection.by_key(key).id, searcher, changes)


@router.delete("/by-key/{key:text}", status_code=status.HTTP_204_NO_CONTENT, dependencies=[WritableDep, NoQueryDep])
def delete_image_by_key(key: str, searcher: SearcherDep) -> None:
    """Delete the image with this key. A file outside the collection's folder is kept."""
    delete_image(searcher.collection.by_key(key).id, searcher)


@router.get("/{image_id}", dependencies=[NoQueryDep])
def get_image(image_id: int, searcher: SearcherDep) -> ImageRecord:
    """The record of a stored image."""
    return ImageRecord.of(searcher.collection.one(image_id))


@router.patch("/{image_id}", dependencies=[WritableDep, NoQueryDep])
def change_image(image_id: int, searcher: SearcherDep, changes: ImageChanges) -> ImageRecord:
    """Replace the labels or attributes of an image; what is not given is kept."""
    collection = searcher.collection
    return ImageRecord.of(collection.update(image_id, labels=changes.labels, attributes=changes.attributes))


@router.get(
    "/{image_id}/file", response_class=Response, responses=_FILE, openapi_extra=documented_query(FileParameters)
)
async def get_file(
    image_id: int,
    searcher: SearcherDep,
    collections: CollectionsDep,
    parameters: Annotated[FileParameters, query_of(FileParameters)],
    request: Request,
) -> Response:
    """The file of a stored image, or a JPEG thumbnail of it. 304 if the client sends the current ETag."""
    known = request.headers.get("if-none-match", "")
    allow_private = collections.settings.allow_private
    work = partial(_file, image_id, searcher, collections.decoders, parameters.size, known, allow_private)
    return await to_thread.run_sync(work, limiter=collections.file_reads)


def _file(
    image_id: int, searcher: Searcher, decoders: Decoders, size: int | None, known: str, allow_private: bool
) -> Response:
    """The response of `get_file`; `known` are the ETags that the client has."""
    stored = searcher.collection.one(image_id)
    if not stored.path:
        raise UnknownImage(f"{image_id} is a stored vector, which has no file")
    uri, shown = searcher.collection.uri_of(stored), shown_path(stored.path)
    # Browsers ask again each time: another picture can take the same id.
    headers = {"Cache-Control": "private, no-cache", "ETag": f'"{stored.sha256}-{size or 0}"'}
    if headers["ETag"] in known:
        return Response(status_code=status.HTTP_304_NOT_MODIFIED, headers=headers)
    try:
        if size is None and Path(uri).is_file():
            # Opened once: a change of the image may delete the file before it has been sent.
            opened = Path(uri).open("rb")  # noqa: SIM115
            chunks = _chunks(opened)
            first = next(chunks, b"")
            _check_signature(image_id, first)
            headers["Content-Length"] = str(os.fstat(opened.fileno()).st_size)
            return StreamingResponse(chain([first], chunks), media_type=stored.media_type, headers=headers)
        # A file, a member of a tar, or a URL: `index add --url-megabytes` may have allowed a larger one.
        most = max(MAX_BYTES, stored.bytes)
        data = open_uri(uri, allow_private=allow_private, max_bytes=most, seconds=URL_SECONDS)
    except (BadImage, OSError) as error:
        if is_remote(uri):
            log.warning("image %d: %s", image_id, error)
            raise FileNotSent(f"image {image_id} was indexed by URL, which cannot be read at the moment") from None
        tar = stored_in(Path(uri))  # of a member of a tar; otherwise the file itself
        reason = str(error).replace(uri, shown).replace(str(tar), tar.name)
        raise FileGone(f"image {image_id} is stored, but its file can no longer be read: {reason}") from None
    _check_signature(image_id, data)
    if size is None:
        return Response(data, media_type=stored.media_type, headers=headers)
    thumbnail = decoders.thumbnail(data, size, name=shown)
    return Response(thumbnail, media_type="image/jpeg", headers=headers)


def _chunks(opened: BinaryIO) -> Iterator[bytes]:
    with opened:
        while data := opened.read(2**16):
            yield data


def _check_signature(image_id: int, data: bytes) -> None:
    """Raise `FileGone` unless `data` begins like an image."""
    if _SIGNATURES.match(data) is None:
        raise FileGone(f"image {image_id} is stored, but its file is no longer an image")


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    responses={status.HTTP_200_OK: {"model": AddedImage, "description": "The image was already stored, or updated."}},
    dependencies=[WritableDep, NoQueryDep],
    openapi_extra=documented_body(AddForm),
)
def add_image(searcher: SearcherDep, form: Annotated[AddForm, body_of(AddForm)], response: Response) -> AddedImage:
    """Store an image (201), or return the stored one (200). Searches find it at once.

    Without a key, the content decides: an image that is already stored keeps its record, which gets the new file if its
    own is gone. With a key, the key decides: a new key adds a record; a known key replaces the image, and its labels
    and attributes if the request has any. So sending a request again changes nothing. The file's name is kept as the
    attribute `filename`, unless the request sets that attribute.
    """
    added = _add(searcher, form.image, labels=form.labels, key=form.key, attributes=form.attributes)
    if not added.created:
        response.status_code = status.HTTP_200_OK
    return added


@batch_router.post(
    "/batch",
    response_class=StreamingResponse,
    responses={200: {"description": "A line for each image, in order.", "content": {NDJSON: {"schema": _LINE}}}},
    dependencies=[WritableDep, NoQueryDep],
    openapi_extra=documented_body(AddManyForm),
)
def add_images(
    searcher: SearcherDep, form: Annotated[AddManyForm, body_of(AddManyForm)], request: Request
) -> StreamingResponse:
    """Store several images, each as `POST /v1/images` does. If one cannot be stored, the others still are.

    The response has a line of JSON for each image, in order, as soon as it is stored: the response of
    `POST /v1/images`, or the problem.
    """
    n_images, n_details = len(form.image), len(form.details)
    if n_details not in (0, n_images):
        raise BadConfig(
            f"got {counted(n_images, 'image')} but details of {n_details}: send details of every image or of none"
        )

    def lines() -> Iterator[bytes]:
        for number, upload in enumerate(form.image):
            about = form.details[number] if form.details else ImageDetails()
            labels, attributes = about.labels or [], about.attributes or {}
            try:
                line: BaseModel = _add(searcher, upload, labels=labels, key=about.key, attributes=attributes)
            except (HashseekError, OSError) as error:
                line = describe(request, error)
            yield line.model_dump_json().encode() + b"\n"

    return StreamingResponse(lines(), media_type=NDJSON)


def _add(
    searcher: Searcher, upload: UploadFile, *, labels: list[str], key: str | None, attributes: dict[str, Any]
) -> AddedImage:
    collection, encoder = searcher.collection, searcher.image_encoder
    data = upload.file.read()
    sha256 = hashlib.sha256(data).hexdigest()
    image: StoredImage | LoadedFile
    if (known := collection.by_content(sha256)) is not None:
        stored, encoded = known  # the same content has one code, whichever engine is in use now
        if key is None and is_there(collection.uri_of(stored)):
            return AddedImage.of(stored, created=False, change="known")
        image = stored
    else:
        image, query = searcher.encode_file(data, name="the upload")
        encoded = StoredCode(query.code, encoder.engine, query.feature)
    named = {"filename": name} if (name := _base_name(upload.filename or "")) else {}
    if not attributes and key is not None and (ids := collection.ids_by_key([key])):
        before = collection.one(ids[key])
        attributes = before.attributes if before.sha256 == sha256 else {**before.attributes, **named}
    else:
        attributes = {**named, **attributes}
    new = NewImage(
        path="",  # the file is named by its hash
        sha256=sha256,
        width=image.width,
        height=image.height,
        bytes=len(data),
        media_type=image.media_type,
        labels=tuple(labels),
        key=key,
        attributes=attributes,
        **encoded._asdict(),
    )
    image_id, change = collection.add_with_file(new, data, suffix=_SUFFIX.get(image.media_type, ""))
    return AddedImage.of(collection.one(image_id), created=change == "added", change=change)


def _base_name(filename: str) -> str:
    """A file's name without folders and unprintable characters, at most 255 characters long."""
    name = filename.replace("\\", "/").rpartition("/")[2]
    return "".join(filter(str.isprintable, name))[-255:]


@router.delete("/{image_id}", status_code=status.HTTP_204_NO_CONTENT, dependencies=[WritableDep, NoQueryDep])
def delete_image(image_id: int, searcher: SearcherDep) -> None:
    """Delete an image. A file outside the collection's folder is kept."""
    searcher.collection.remove([image_id])
