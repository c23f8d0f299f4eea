"""Features from the cache are those that the same network computes from the same images."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from hashseek.retrieval.engines import build_engine
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.retrieval.models.lazy_backbone import LazyBackbone
from hashseek.training.data.cached_features import features_of
from hashseek.training.data.splits import Split
from hashseek.training.data.training_images import Images
from support.models import PREPROCESSING


def test_features_are_computed_anew_for_other_weights_or_preprocessing_and_if_the_cache_fails(
    pictures: Path, own_cache, monkeypatch
):
    paths = tuple(pictures.glob("*.jpg"))
    split = Split(paths, np.ones((len(paths), 1), np.uint8), ("line",) * len(paths))

    def check(model, n_files, name="squeezenet1_1", preprocessing=PREPROCESSING):
        network, images = LazyBackbone.of(model.backbone, name), Images(split, preprocessing)
        engine = build_engine("torch", network, preprocessing, device="cpu", precision="fp32")
        found = features_of(network, images, engine=engine, n_features=model.n_features)
        expected = engine(np.stack([images.pixels(row) for row in range(len(split))]))
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * expected.max())
        assert len([*own_cache.glob("features/*.npy")]) == n_files

    one, other = (HashModel(backbone="squeezenet1_1", n_bits=4).eval() for _ in range(2))
    for n_files, preprocessing in ((1, PREPROCESSING), (2, replace(PREPROCESSING, crop_fraction=1.0))):
        for _ in range(2):
            check(one, n_files, preprocessing=preprocessing)
    check(other, 3)
    check(other, 3, name="mine:network")  # whose code may change
    for file in own_cache.glob("features/*.npy"):
        file.write_bytes(file.read_bytes()[:-9])
    check(other, 3)
    monkeypatch.setenv("HASHSEEK_CACHE", "/proc/nowhere")
    check(other, 3)
