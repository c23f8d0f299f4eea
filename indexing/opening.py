"""Opens a collection wherever it is: in a folder, or in Milvus."""

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from hashseek.indexing.collection import CATALOG, Collection, delete_if_unused, open_or_create
from hashseek.indexing.milvus.milvus_store import MilvusStore
from hashseek.indexing.milvus_uri import is_in_milvus, parse_uri
from hashseek.retrieval.errors import BadConfig

# The type for adding, searching and serving, which use only what both have. mypy checks that, and
# tests/indexing/test_stores.py checks that both behave the same.
Store = Collection | MilvusStore


def open_store(
    place: Path,
    *,
    checkpoint: Path | None = None,
    read_only: bool = False,
    create: bool = False,
    keep_features: bool = False,
) -> Store:
    """Open the collection in a folder, see `Collection`, or at a Milvus URI, see `MilvusStore`.

    With `create`, it is created for `checkpoint` if it does not exist, see `open_or_create`.

    Raises:
        BadCollection: there is no such collection, or the server does not answer.
        ForeignCodes: it was made with another checkpoint.
        BadConfig: `keep_features`, where that is not possible; or an invalid URI.
    """
    if not is_in_milvus(place):
        if create:
            return open_or_create(place, checkpoint=checkpoint, keep_features=keep_features)
        return Collection(place, read_only=read_only)
    uri = parse_uri(place)
    if keep_features:
        raise BadConfig(f"{uri} is in Milvus and cannot store features: leave out --keep-features, or use a folder")
    return MilvusStore(uri, checkpoint=checkpoint, create=create, read_only=read_only)


@contextmanager
def open_for_adding(
    place: Path, *, checkpoint: Path | None, keep_features: bool = False, keep_empty: bool = False
) -> Iterator[Store]:
    """`open_store`, creating the collection if needed and closing it at the end.

    A new folder that is still empty is deleted, unless `keep_empty`: a refused or failed first `index add` does not
    leave behind an empty collection bound to its checkpoint.
    """
    has_folder, is_new = place.is_dir(), not (place / CATALOG).is_file()
    with closing(open_store(place, checkpoint=checkpoint, create=True, keep_features=keep_features)) as store:
        try:
            yield store
        finally:
            if is_new and not keep_empty and isinstance(store, Collection):
                delete_if_unused(store)
                if not has_folder:
                    with suppress(OSError):  # it is not empty
                        place.rmdir()
