"""Data set `pictures`: every image below a folder, without labels."""

from pathlib import Path

from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.images import SUFFIXES
from hashseek.retrieval.label_files import Item, OnError
from hashseek.training.data.datasets.folder import expand
from hashseek.training.data.splits import Splits, unlabelled_splits


def pictures(*, root: str, on_error: OnError = "stop") -> Splits:
    """Every image below a folder, without labels: for losses that use none.

    All images are training images. There are no queries and no database, so nothing can be evaluated.

    Args:
        root: the folder; `$NAME` is taken from the environment.
        on_error: "stop" refuses broken images, "skip" leaves them out.

    Raises:
        BadDataset: there is no such folder, or it has no images.
    """
    place = Path(expand(root))
    if not place.is_dir():
        raise BadDataset(f"there is no folder {place}: check the path")
    found = sorted(path for path in place.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not found:
        raise BadDataset(f"the folder {place} has no images ({', '.join(sorted(SUFFIXES))})")
    items = [Item(path, path.relative_to(place).as_posix(), (), "train") for path in found]
    return unlabelled_splits(items, on_error=on_error)
