"""Augmentation: the same for the same seed, the pixels that torchvision would give, and nothing else changed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as transforms

from hashseek.retrieval.images import normalizer
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.config import TrainSection
from hashseek.training.data.augmentation import OPERATIONS, augment, flip_and_crop, generators, rand_augment
from hashseek.training.data.batches import augmented_on_device, build_source
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.datasets.shapes import render_shapes
from hashseek.training.data.splits import Split
from hashseek.training.data.training_images import Images
from hashseek.training.progress import Progress
from support.models import PREPROCESSING, run_config
from support.pictures import draw


def picture(seed=0, size=64):
    return torch.from_numpy(np.array(draw(seed, (size, size)))).permute(2, 0, 1)


def test_flip_and_crop_give_what_they_gave_in_recorded_runs():
    """An independent form: the draws in their order, and torchvision's resized crop on plain (3, size, size) pixels."""
    pixels = torch.from_numpy(np.random.default_rng(9).integers(0, 256, (3, 97, 97), dtype=np.uint8))
    by_colour_last = pixels.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    flipped = 0
    for row in range(40):
        rng = np.random.default_rng((3, 1, row))
        expected = pixels
        if rng.random() < 0.5:
            expected, flipped = pixels.flip(-1), flipped + 1
        area, ratio = rng.uniform(0.3, 1), np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        width, height = (min(97, max(1, round(97 * np.sqrt(a)))) for a in (area * ratio, area / ratio))
        top, left = int(rng.integers(97 - height + 1)), int(rng.integers(97 - width + 1))
        expected = transforms.resized_crop(expected, top, left, height, width, [97, 97], antialias=True)
        for stored in (pixels, by_colour_last):
            found = augment(stored, np.random.default_rng((3, 1, row)), TrainSection(flip=True, min_crop=0.3))
            assert torch.equal(found, expected)
    assert 10 < flipped < 30


@pytest.mark.parametrize("settings", [{"min_crop": 0.3}, {"min_crop": 0.05, "flip": False}, {"min_crop": 1}])
def test_a_batch_is_flipped_and_cropped_like_its_images(settings):
    train = TrainSection(**settings)
    pixels = torch.from_numpy(np.random.default_rng(9).integers(0, 256, (40, 3, 64, 64), dtype=np.uint8))

    def rngs():
        return [generator for row in range(20) for generator in generators((3, 1), row, views=2)]

    expected = torch.stack([augment(image, rng, train) for image, rng in zip(pixels, rngs(), strict=True)])
    found = flip_and_crop(pixels, rngs(), train)
    assert (found - expected.float()).abs().max() < 1.01  # rounding
    assert not torch.equal(expected, pixels)


def test_batches_are_augmented_on_a_device_as_in_threads(tmp_path):
    render_shapes(tmp_path, n_query=1, n_train=20, n_database=1, size=48, seed=1)
    images = Images(build_splits("folder", root=str(tmp_path)).train, PREPROCESSING)
    settings, rows = TrainSection(views=2, min_crop=0.3), np.random.default_rng(0).permutation(20)
    in_threads = images.batches(rows, batch_size=8, augmentation=settings, seed=(5, 2))
    plain = images.batches(rows, batch_size=8)
    on_device = augmented_on_device(plain, settings, seed=(5, 2), device=torch.device("cpu"))
    for (expected, chosen), (found, also_chosen) in zip(in_threads, on_device, strict=True):
        assert np.array_equal(chosen, also_chosen)
        assert (found - expected.float()).abs().max() < 1.01  # rounding


def source_of(split, images=None, **sections):
    config = run_config(Path(), **sections)
    model = HashModel(backbone=config.model.backbone, n_bits=4).eval()
    fabric = Fabric(accelerator="cpu", devices=1)
    return build_source(config, model, split, images, fabric=fabric, progress=Progress(quiet=True)), model


def test_images_of_a_batch_are_changed_by_seed_and_epoch_and_those_that_are_validated_never(tmp_path):
    render_shapes(tmp_path, n_query=1, n_train=6, n_database=1, size=48, seed=1)
    split = build_splits("folder", root=str(tmp_path)).train
    images, rows = Images(split, PREPROCESSING), np.array([4, 1, 2])
    source, model = source_of(split, images, train={"views": 2, "seed": 3})
    normalize = normalizer(PREPROCESSING, torch.device("cpu"))
    [(inputs, chosen)] = source.batches(rows, 3, 7)
    [(pixels, _)] = images.batches(rows, batch_size=3, augmentation=TrainSection(views=2), seed=(3, 7))
    assert np.array_equal(chosen, rows)
    assert torch.equal(inputs, normalize(pixels))
    [(plain, _)] = images.batches(rows, batch_size=3)
    [features] = source.features(model, rows)
    torch.testing.assert_close(features, model.features(normalize(plain)))


def test_noise_of_vectors_is_drawn_from_seed_epoch_row_and_view_in_deviations_of_each_number():
    vectors = (np.random.default_rng(0).normal(size=(9, 5)) * [1, 2, 3, 4, 5]).astype(np.float32)
    split = Split((Path("x.npz"),) * 9, np.ones((9, 2), np.uint8), ("row",) * 9, vectors)
    train = {"views": 2, "noise": 0.5, "seed": 3}
    source, model = source_of(split, model={"backbone": "mlp:5-8", "n_bits": 4}, train=train)
    [(inputs, chosen)] = source.batches(np.array([6, 2]), 2, 7)
    assert chosen.tolist() == [6, 2]
    for found, (row, view) in zip(inputs.numpy(), [(6, 0), (2, 0), (6, 1), (2, 1)], strict=True):
        drawn = np.random.default_rng((3, 7, row, view)).standard_normal(5, np.float32)
        np.testing.assert_allclose(found, vectors[row] + 0.5 * vectors.std(axis=0, ddof=1) * drawn, rtol=1e-5)
    [features] = source.features(model, np.array([6, 2]))
    torch.testing.assert_close(features, model.features(torch.from_numpy(vectors[[6, 2]])))


class OneOperation(v2.RandAugment):
    """torchvision's RandAugment of a single operation."""

    def __init__(self, name, magnitude):
        super().__init__(num_ops=1, magnitude=magnitude)
        self._AUGMENTATION_SPACE = {name: v2.RandAugment._AUGMENTATION_SPACE[name]}


@pytest.mark.parametrize("magnitude", [0, 9, 30])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_does_what_torchvisions_does(name, magnitude):
    assert set(OPERATIONS) == set(v2.RandAugment._AUGMENTATION_SPACE)
    image = draw(7, (60, 60))
    torch.manual_seed(0)
    theirs = {np.array(OneOperation(name, magnitude)(image)).tobytes() for _ in range(12)}  # both signs
    ours = {np.array(OPERATIONS[name](image, sign * magnitude / 30)).tobytes() for sign in (1, -1)}
    assert ours == theirs
    assert len(ours) <= 2


def test_rand_augment_draws_every_operation_with_either_sign_and_only_from_its_generator():
    image = draw(3, (48, 48))
    possible = {
        np.array(function(image, sign * 0.3)).tobytes(): name
        for name, function in OPERATIONS.items()
        for sign in (1, -1)
    }
    state = torch.random.get_rng_state()
    rng = np.random.default_rng(0)
    found = {np.array(rand_augment(image, rng, n=1, magnitude=9)).tobytes() for _ in range(400)}
    assert found == possible.keys()
    assert torch.equal(torch.random.get_rng_state(), state)
    first, second = (rand_augment(image, np.random.default_rng(4), n=2, magnitude=9) for _ in range(2))
    assert np.array_equal(first, second)


def test_rand_augment_comes_after_the_crop_and_jitter_last():
    pixels = picture(2)
    for row in range(8):
        rng = np.random.default_rng(row)
        cropped = augment(pixels, rng, TrainSection())
        expected = rand_augment(Image.fromarray(cropped.permute(1, 2, 0).numpy()), rng, n=2, magnitude=20)
        settings = {"rand_augment": 2, "rand_augment_magnitude": 20}
        found = augment(pixels, np.random.default_rng(row), TrainSection(**settings))
        assert np.array_equal(found.permute(1, 2, 0), expected)
        changes = [transforms.adjust_brightness, transforms.adjust_contrast, transforms.adjust_saturation]
        for change in rng.permutation(3):
            expected = changes[change](expected, rng.uniform(0.6, 1.4))
        jittered = augment(pixels, np.random.default_rng(row), TrainSection(jitter=0.4, **settings))
        assert np.array_equal(jittered.permute(1, 2, 0), expected)


def test_jitter_stays_within_its_factors():
    grey = torch.full((3, 16, 16), 100, dtype=torch.uint8)  # contrast and saturation leave grey as it is
    levels = [
        int(augment(grey, np.random.default_rng(i), TrainSection(flip=False, min_crop=1, jitter=0.4))[0, 0, 0])
        for i in range(200)
    ]
    assert 60 <= min(levels) < 65
    assert 135 < max(levels) <= 140
    assert 95 < np.mean(levels) < 105
    assert len(set(levels)) > 50
