"""What other packages use of the catalog, see `hashseek.indexing.catalog.catalog`."""

from hashseek.indexing.catalog.catalog import Catalog, SpaceRetired
from hashseek.indexing.catalog.database import CatalogDamaged, CatalogLocked, CatalogReplaced, DiskFull, create_catalog
from hashseek.indexing.catalog.records import Change, NewImage, StoredImage

__all__ = [
    "Catalog",
    "CatalogDamaged",
    "CatalogLocked",
    "CatalogReplaced",
    "Change",
    "DiskFull",
    "NewImage",
    "SpaceRetired",
    "StoredImage",
    "create_catalog",
]
