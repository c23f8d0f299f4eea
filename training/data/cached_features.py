"""Features of a backbone, computed once and cached on disk for training, validation and evaluation.

Files are in `$HASHSEEK_CACHE/features` and may be deleted at any time; the most recently used ones are kept.
"""

import io
import json
import logging
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.checkpoint import digest_weights
from hashseek.retrieval.engines import Engine
from hashseek.retrieval.files import CACHE_REMEDY, cached_file, delete_oldest, mark_used, write_atomically
from hashseek.retrieval.load_ahead import load_ahead
from hashseek.retrieval.models.lazy_backbone import LazyBackbone
from hashseek.retrieval.models.names import is_from_outside
from hashseek.training.data.file_digests import digest_files
from hashseek.training.data.training_images import Images

_KEPT_BYTES = 16 * 2**30

_log = logging.getLogger(__name__)


def features_of(
    network: LazyBackbone,
    images: Images,
    *,
    engine: Engine,
    n_features: int,
    advance: Callable[[int], None] = lambda _: None,
) -> NDArray[np.float32]:
    """Features (n, D) of `images`, from the cache if available.

    The cache key depends on backbone weights, preprocessing, the engine with its version and precision, and each
    file's path, size and modification time. A backbone from outside, whose code may change, is never cached.

    Args:
        network: the backbone.
        images: without broken ones.
        engine: runs the backbone.
        n_features: D, the width of its features.
        advance: called with the number of images finished in each step.
    """
    file = None if is_from_outside(network.name) else _file(network, images, engine)
    cached = None if file is None else _read(file)
    if file is not None and cached is not None:
        mark_used(file)
        advance(len(images))
        return cached
    features = np.empty((len(images), n_features), np.float32)
    loaded = load_ahead(range(len(images)), images.pixels, depth=2 * engine.batch_size)
    for start in range(0, len(images), engine.batch_size):
        place = features[start : start + engine.batch_size]
        place[:] = engine(np.stack([next(loaded) for _ in place]))
        advance(len(place))
    if file is None:
        return features
    buffer = io.BytesIO()
    np.save(buffer, features)
    try:
        write_atomically(file, buffer.getbuffer())
        delete_oldest(file.parent, "*.npy", keep=_KEPT_BYTES)
    except OSError as error:
        _log.warning("features cannot be cached, so the next run will compute them again (%s): %s", error, CACHE_REMEDY)
    return features


def _read(file: Path) -> NDArray[np.float32] | None:
    """The features in `file`; None if the file does not exist or is damaged."""
    if not file.is_file():
        return None
    try:
        features: NDArray[np.float32] = np.load(file)
    except (ValueError, EOFError, OSError) as error:
        _log.warning("cannot read %s (%s): its features are computed again", file, error)
        return None
    return features


def _file(network: LazyBackbone, images: Images, engine: Engine) -> Path:
    library = engine.name.split()[0]
    parts = [network.name, digest_weights(network.tensors), engine.name, version(library)]
    parts += [json.dumps(images.preprocessing.as_dict(), sort_keys=True), digest_files(images.split.paths)]
    return cached_file("features", json.dumps(parts), suffix=".npy")
