"""The catalog: the SQLite file that holds everything a collection knows about its images."""

from hashseek.indexing.catalog.catalog import Catalog, SpaceRetired
from hashseek.indexing.catalog.database import (
    BUSY_SECONDS,
    CatalogDamaged,
    CatalogLocked,
    CatalogReplaced,
    DiskFull,
    as_hashseek_error,
    create_catalog,
)
from hashseek.indexing.catalog.records import Change, Changes, NewImage, Space, StoredImage

__all__ = [
    "BUSY_SECONDS",
    "Catalog",
    "CatalogDamaged",
    "CatalogLocked",
    "CatalogReplaced",
    "Change",
    "Changes",
    "DiskFull",
    "NewImage",
    "Space",
    "SpaceRetired",
    "StoredImage",
    "as_hashseek_error",
    "create_catalog",
]
