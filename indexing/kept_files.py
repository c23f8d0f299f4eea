"""Image files that a collection keeps, under `files/`, named by the hash of their content.

Uploaded images are kept; images that were indexed in place are not.
"""

import os
import re
from dataclasses import replace
from pathlib import Path

from hashseek.indexing.catalog import NewImage
from hashseek.indexing.uris import is_there

FILES = "files"


def kept_path(sha256: str, suffix: str) -> str:
    """The path, within the collection's folder, of a kept file with this content."""
    return f"{FILES}/{sha256[:2]}/{sha256}{suffix}"


def is_kept(path: str) -> bool:
    """Whether a record's path is that of a file that the collection itself keeps."""
    return path.startswith(f"{FILES}/") and ".." not in Path(path).parts  # otherwise it could be anywhere


def with_kept_path(folder: Path, image: NewImage, stored: tuple[str, str] | None) -> NewImage:
    """An image with the path under which the collection in `folder` stores it: `files/...` if it keeps that file.

    A list or an export may name a kept file by its full path, or by a symbolic link to the folder. Stored under such a
    name, the file would be deleted as one that was replaced.

    Args:
        folder: the folder of the collection.
        image: the image to store.
        stored: path and content hash of the record that has its key now, if there is one.
    """
    if stored is not None and is_kept(stored[0]) and stored[1] == image.sha256 and is_there(str(folder / stored[0])):
        return replace(image, path=stored[0])
    name = kept_path(image.sha256, "")
    above, found, suffix = image.path.rpartition(f"/{name}")
    if found and re.fullmatch(r"(\.\w{1,8})?", suffix) and os.path.realpath(above) == os.path.realpath(folder):
        return replace(image, path=name + suffix)
    return image
