"""The catalog: an SQLite file that is the truth about a collection."""

from hashseek.indexing.catalog.catalog import Catalog, SpaceRetired
from hashseek.indexing.catalog.database import (
    BUSY_SECONDS,
    CatalogLocked,
    CatalogReplaced,
    DiskFull,
    create_catalog,
    explained,
)
from hashseek.indexing.catalog.records import Change, Changes, NewImage, Space, StoredImage

__all__ = [
    "BUSY_SECONDS",
    "Catalog",
    "CatalogLocked",
    "CatalogReplaced",
    "Change",
    "Changes",
    "DiskFull",
    "NewImage",
    "Space",
    "SpaceRetired",
    "StoredImage",
    "create_catalog",
    "explained",
]
