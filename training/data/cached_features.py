"""Features of a frozen backbone, computed once and kept on disk for every later run that needs the same ones."""

import hashlib
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hashseek.retrieval.checkpoint import digest_weights
from hashseek.retrieval.devices import pick_dtype
from hashseek.retrieval.files import write_atomically
from hashseek.retrieval.images import Preprocessing, normalizer
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.data.augmentation import Augmentation
from hashseek.training.data.cache_folder import cache_folder, digest_files
from hashseek.training.data.training_images import Images

BATCH = 32

_log = logging.getLogger(__name__)


def features_of(
    model: HashModel,
    images: Images,
    *,
    device: torch.device,
    precision: str,
    advance: Callable[[int], None] = lambda _: None,
) -> NDArray[np.float32]:
    """Features (n, D) of `images`, from the cache if the same were computed before.

    The cache's key holds everything that decides them: backbone weights, preprocessing, precision, and each file's
    path, size and time of change. `advance` is told how many images each step finished.
    """
    dtype = pick_dtype(precision, device)
    file = _file(model, images, dtype)
    cached = _read(file, n_rows=len(images), width=model.n_features)
    if cached is not None:
        advance(len(images))
        return cached
    normalize = normalizer(images.preprocessing, device)
    model = model.to(device).to(memory_format=torch.channels_last).eval()
    rows = []
    every = np.arange(len(images))
    with torch.inference_mode(), torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        for pixels, chosen in images.batches(every, batch_size=BATCH, augmentation=Augmentation.none(), seed=(0,)):
            rows.append(model.features(normalize(pixels)).float().cpu().numpy())
            advance(len(chosen))
    features = np.concatenate(rows)
    buffer = io.BytesIO()
    np.save(buffer, features)
    write_atomically(file, buffer.getvalue())
    return features


def has_features(model: HashModel, images: Images, *, device: torch.device, precision: str) -> bool:
    """Whether `features_of` would find the features of `images` in the cache; they then were decoded without error."""
    file = _file(model, images, pick_dtype(precision, device))
    return _read(file, n_rows=len(images), width=model.n_features) is not None


def _read(file: Path, *, n_rows: int, width: int) -> NDArray[np.float32] | None:
    """The features in `file`; None if there are none, or the file is torn: they are then computed again."""
    if not file.is_file():
        return None
    try:
        found: NDArray[np.float32] = np.load(file)
    except (ValueError, EOFError, OSError) as error:
        _log.warning("%s cannot be read (%s): its features are computed again", file, error)
        return None
    return found if found.shape == (n_rows, width) else None


def _file(model: HashModel, images: Images, dtype: torch.dtype) -> Path:
    return cache_folder() / "features" / f"{_key(model, images, dtype)}.npy"


def _key(model: HashModel, images: Images, dtype: torch.dtype) -> str:
    preprocessing: Preprocessing = images.preprocessing
    digest = hashlib.sha256(f"{model.backbone_name} {digest_weights(model.backbone)} {dtype}\n".encode())
    digest.update(json.dumps(preprocessing.as_dict(), sort_keys=True).encode())
    digest.update(digest_files(images.split.paths).encode())
    return digest.hexdigest()
