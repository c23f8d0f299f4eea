"""The overview: its figures by hand, and against the literal definitions."""

from contextlib import closing
from itertools import combinations, product

import numpy as np
import pytest

from hashseek.api.collections import overview
from hashseek.api.collections.overview import label_distances, make_overview, principal_plane
from support.collections import code_collection, new_images
from support.service import serving


def test_principal_plane_of_four_corners():
    signs = np.array([[1, 1, 1], [1, -1, 1], [-1, 1, 1], [-1, -1, 1], [1, 1, 1], [-1, -1, 1]], float)
    places, explained = principal_plane(signs)
    assert explained == pytest.approx(1)
    root = np.sqrt(2)  # two of six are on each end of the diagonal, which so comes first
    np.testing.assert_allclose(places[:, 0], [root, 0, 0, -root, root, -root], atol=1e-12)
    np.testing.assert_allclose(np.abs(places[:, 1]), [0, root, root, 0, 0, 0], atol=1e-12)
    assert principal_plane(np.ones((3, 1)))[1] == 0


def test_label_distances_are_the_means_over_all_pairs():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2, (30, 12)).astype(float)
    has = (rng.random((30, 4)) < [0.5, 0.2, 1, 0]).astype(float)
    has[:, 3] = np.arange(30) == 4
    within, to_others = label_distances(bits, has)
    for label in range(4):
        inside, outside = np.flatnonzero(has[:, label]), np.flatnonzero(has[:, label] == 0)
        apart = [
            [np.abs(bits[i] - bits[j]).sum() for i, j in pairs]
            for pairs in (combinations(inside, 2), product(inside, outside))
        ]
        expected = [np.mean(distances) if distances else np.nan for distances in apart]
        np.testing.assert_allclose([within[label], to_others[label]], expected)


def test_a_sample_of_a_collection(tmp_path, monkeypatch):
    monkeypatch.setattr(overview, "N_SAMPLED", 6)
    monkeypatch.setattr(overview, "N_ON_MAP", 4)
    collection = code_collection(tmp_path, n_bits=10)
    empty = make_overview(collection)
    assert (empty.n_images, empty.bits, empty.map, empty.labels, sum(empty.distances)) == (0, None, [], [], 0)
    collection.add(new_images(np.array([[3, 2]] * 8, np.uint8), labels=("all",)))
    one = make_overview(collection)
    assert (one.n_images, one.n_sampled) == (8, 6)
    assert (one.bits.n_distinct, one.bits.most_common, one.bits.n_constant) == (1, 6, 10)
    assert one.bits.balance == [1, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    assert len({point.id for point in one.map}) == 4
    assert one.distances[1:] == [0] * 10
    assert one.distances[0] > 0
    [label] = one.labels
    assert (label.label, label.n_images, label.within, label.to_others) == ("all", 8, 0, None)
    counts = overview.pair_distances(np.array([[3, 2], [28, 2]], np.uint8), 10, np.random.default_rng(0))
    assert counts.sum() == counts[5] > 0
    collection.close()


def test_the_figures_of_an_image_or_label_are_its_own(tmp_path, monkeypatch):
    for name, number in (("N_SAMPLED", 5), ("N_ON_MAP", 4), ("N_LABELS", 2)):
        monkeypatch.setattr(overview, name, number)
    with closing(code_collection(tmp_path, n_bits=10)) as collection:
        for label, code in zip("aaaabbbbb", [[0, 0]] * 4 + [[255, 3]] * 5, strict=True):
            collection.add(new_images(np.array([code], np.uint8), start=len(collection), labels=("in all", label)))
        found = make_overview(collection)
    assert [(one.label, one.n_images) for one in found.labels] == [("in all", 9), ("b", 5)]
    assert found.labels[0].to_others is None
    assert len({(image.id > 4, image.x) for image in found.map}) == len({image.x for image in found.map}) == 2


def test_the_overview_of_a_service(own_collection):
    with serving(own_collection, read_only=True) as client:
        answer = client.get("/v1/overview").json()
    assert (answer["n_images"], answer["n_bits"], len(answer["map"]), len(answer["distances"])) == (12, 48, 12, 49)
    assert {label["label"]: label["n_images"] for label in answer["labels"]} == {"even": 6, "odd": 6, "three": 4}
    assert 0 < answer["explained"] <= 1
