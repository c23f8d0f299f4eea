"""Features of a frozen backbone, computed once and cached on disk for later runs."""

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
from hashseek.retrieval.files import cache_folder, write_atomically
from hashseek.retrieval.images import normalizer
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.data.augmentation import Augmentation
from hashseek.training.data.file_digests import digest_files
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
    """Features (n, D) of `images`, from the cache if they are in it.

    The cache key depends on backbone weights, preprocessing, precision, and each file's path, size and modification
    time. `advance` is called with the number of images that each step finished.
    """
    dtype = pick_dtype(precision, device)
    file = _file(model, images, dtype)
    cached = _read(file)
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
    """Whether the features of `images` are in the cache, which implies that all images could be decoded."""
    return _file(model, images, pick_dtype(precision, device)).is_file()


def _read(file: Path) -> NDArray[np.float32] | None:
    """The features in `file`; None if the file does not exist or is damaged."""
    if not file.is_file():
        return None
    try:
        features: NDArray[np.float32] = np.load(file)
    except (ValueError, EOFError, OSError) as error:
        _log.warning("%s cannot be read (%s): its features are computed again", file, error)
        return None
    return features


def _file(model: HashModel, images: Images, dtype: torch.dtype) -> Path:
    digest = hashlib.sha256(f"{model.backbone_name} {digest_weights(model.backbone)} {dtype}\n".encode())
    digest.update(json.dumps(images.preprocessing.as_dict(), sort_keys=True).encode())
    digest.update(digest_files(images.split.paths).encode())
    return cache_folder() / "features" / f"{digest.hexdigest()}.npy"
