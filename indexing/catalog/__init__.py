"""The catalog: an SQLite file that is the truth about a collection."""

from indexing.catalog.catalog import Catalog, SpaceRetired
from indexing.catalog.database import (
    BUSY_SECONDS,
    CatalogLocked,
    CatalogReplaced,
    DiskFull,
    create_catalog,
    explained,
)
from indexing.catalog.records import Change, Changes, NewImage, Space, StoredImage

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
