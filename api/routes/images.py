"""Stored images: listing, records, files, adding, deleting."""

import io
import re
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Form, Query, Response, status
from fastapi.responses import FileResponse

from hashseek.api.dependencies import SearcherDep, UploadDep, WritableDep
from hashseek.api.problems import FileGone
from hashseek.api.schemas import AddedImage, Image, Page
from hashseek.api.service import add_upload, parse_attributes, parse_labels
from hashseek.indexing.ingest.uris import is_there, open_uri
from hashseek.retrieval.errors import BadImage
from hashseek.retrieval.images import decode

# How files of the kinds that are read begin. A path that pointed to a picture may point to somebody's secrets today.
_PICTURE = re.compile(rb"\xff\xd8\xff|\x89PNG|GIF8|BM|II[*+]\0|II\0\*|MM\0[*+]|MM\*\0|RIFF.{4}WEBP|.{4}ftyp", re.DOTALL)

router = APIRouter(prefix="/v1/images", tags=["images"])


@router.get("")
def page(
    searcher: SearcherDep,
    after: Annotated[int, Query(ge=0, le=2**63 - 1, description="Only ids above this one.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 24,
    label: Annotated[str | None, Query(description="Only images with this label.")] = None,
) -> Page:
    """Stored images by ascending id."""
    found = searcher.collection.catalog.page(after=after, limit=limit + 1, label=label)
    images = [Image.of(stored) for stored in found[:limit]]
    return Page(images=images, next=images[-1].id if len(found) > limit else None)


# Before the routes with an id, or one of them would take "by-key" for one.
@router.get("/by-key/{key:path}")
def record_by_key(key: str, searcher: SearcherDep) -> Image:
    """The record of the image with this key, which may contain slashes."""
    return Image.of(searcher.collection.catalog.by_key(key))


@router.delete("/by-key/{key:path}", status_code=status.HTTP_204_NO_CONTENT, dependencies=[WritableDep])
def remove_by_key(key: str, searcher: SearcherDep) -> None:
    """Forget the image with this key; a file outside the collection stays where it is."""
    searcher.collection.remove([searcher.collection.catalog.by_key(key).id])


@router.get("/{image_id}")
def record(image_id: int, searcher: SearcherDep) -> Image:
    """The record of a stored image."""
    return Image.of(searcher.collection.catalog.one(image_id))


@router.get("/{image_id}/file", response_class=Response)
def file(
    image_id: int,
    searcher: SearcherDep,
    size: Annotated[int | None, Query(ge=16, le=1024, description="Longer side of a thumbnail, pixels.")] = None,
) -> Response:
    """The file of a stored image, or a JPEG thumbnail of it."""
    stored = searcher.collection.catalog.one(image_id)
    uri = searcher.collection.uri_of(stored)
    headers = {"Cache-Control": "private, max-age=3600", "ETag": f'"{stored.sha256}-{size or 0}"'}
    if size is None and Path(uri).is_file():
        with Path(uri).open("rb") as opened:
            _check_begin(image_id, opened.read(16))
        return FileResponse(uri, media_type=stored.media_type, headers=headers)
    if not is_there(uri):
        raise FileGone(f"image {image_id} is stored, but its file {stored.path} is no longer there")
    try:
        data = open_uri(uri)  # a file, a member of a tar, or an address
    except BadImage as error:
        raise FileGone(f"image {image_id} is stored, but its file cannot be read any more: {error}") from None
    if size is None:
        _check_begin(image_id, data)
        return Response(data, media_type=stored.media_type, headers=headers)
    with searcher.decoding:
        thumbnail = decode(data, name=stored.path, at_least=size).image
        thumbnail.thumbnail((size, size))
    buffer = io.BytesIO()
    thumbnail.save(buffer, "JPEG", quality=85)
    return Response(buffer.getvalue(), media_type="image/jpeg", headers=headers)


def _check_begin(image_id: int, data: bytes) -> None:
    """Raise `FileGone` unless `data` begins like a picture."""
    if _PICTURE.match(data) is None:
        raise FileGone(f"image {image_id} is stored, but what is in its place now is no picture")


@router.post("", status_code=status.HTTP_201_CREATED, dependencies=[WritableDep])
def add(
    image: UploadDep,
    searcher: SearcherDep,
    response: Response,
    labels: Annotated[str, Form(description="Labels, separated by `;`.")] = "",
    key: Annotated[str | None, Form(description="Your own name for the image, 1 to 512 characters.")] = None,
    attributes: Annotated[str, Form(description="A JSON object of at most 16 KiB, yours to search by.")] = "{}",
) -> AddedImage:
    """Store a picture (201), or find that it is stored already (200); it can be found at once.

    Without a key, content decides: a picture that is there keeps its record. With a key, the key decides: under a new
    one a record is added; under one that is there, picture, labels and attributes are replaced, if they are given.
    """
    stored, change = add_upload(
        searcher, image, labels=parse_labels(labels), key=key, attributes=parse_attributes(attributes)
    )
    created = change == "added"
    if not created:
        response.status_code = status.HTTP_200_OK
    return AddedImage(**Image.of(stored).model_dump(), created=created, change=change)


@router.delete("/{image_id}", status_code=status.HTTP_204_NO_CONTENT, dependencies=[WritableDep])
def remove(image_id: int, searcher: SearcherDep) -> None:
    """Forget an image; a file outside the collection stays where it is."""
    searcher.collection.remove([image_id])
