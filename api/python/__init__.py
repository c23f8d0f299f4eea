"""Image retrieval with deep hashing.

    import hashseek

    with hashseek.open_collection("my-collection", checkpoint="model.safetensors") as collection:
        collection.add("photos")
        for hit in collection.search("query.jpg", k=5):
            print(hit.distance, hit.image.path)

These names are the public Python interface; docs/python-api.md shows each of them. They are imported on first use, so
that `import hashseek` itself loads neither torch nor FAISS.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hashseek.retrieval.errors import HashseekError

if TYPE_CHECKING:
    from hashseek.api.client import AsyncClient, Client, ServiceError
    from hashseek.indexing.catalog.filters import make_filter
    from hashseek.indexing.searcher import Hit
    from hashseek.interface import (
        ImageCollection,
        create_collection,
        create_vector_collection,
        encode,
        evaluate,
        load_checkpoint,
        open_collection,
        train,
    )
    from hashseek.retrieval.encoder import Encoder
    from hashseek.training.losses import build_loss

__all__ = [
    "AsyncClient",
    "Client",
    "Encoder",
    "HashseekError",
    "Hit",
    "ImageCollection",
    "ServiceError",
    "build_loss",
    "create_collection",
    "create_vector_collection",
    "encode",
    "evaluate",
    "load_checkpoint",
    "make_filter",
    "open_collection",
    "train",
]

_ELSEWHERE = {
    "AsyncClient": "hashseek.api.client",
    "Client": "hashseek.api.client",
    "ServiceError": "hashseek.api.client",
    "Encoder": "hashseek.retrieval.encoder",
    "Hit": "hashseek.indexing.searcher",
    "build_loss": "hashseek.training.losses",
    "make_filter": "hashseek.indexing.catalog.filters",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ELSEWHERE.get(name, "hashseek.interface")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
