"""Calibrations: computed as by brute force over pairs of images, stored with the collection, used by searches."""

import json
from contextlib import closing
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest
from sklearn.isotonic import IsotonicRegression

from hashseek.indexing.calibration import calibrate_collection, radius_for, store_calibration, stored_calibration
from hashseek.indexing.collection import Collection
from hashseek.indexing.searcher import Searcher, SearchOptions
from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.retrieval.metrics import Calibration
from support import hamming_oracle as hamming
from support.collections import code_collection, new_images, random_codes
from support.in_process import run_command
from support.pictures import draw
from support.service import serving

N_BITS = 12
LABELS = ("a", "b", "c")


@pytest.fixture
def world(tmp_path):
    """(collection, codes, labels 0/1 (n, 3)): near codes share labels; ten images carry none."""
    rng = np.random.default_rng(0)
    codes = random_codes(rng, 70, N_BITS, 30)
    bits = np.unpackbits(codes, axis=1, bitorder="little")
    labels = (rng.random((70, 3)) < 0.1 + 0.6 * bits[:, [0, 4, 9]]).astype(np.uint8)
    labels[60:] = 0
    collection = code_collection(tmp_path / "collection", n_bits=N_BITS)
    for place, code in enumerate(codes):
        names = tuple(name for name, held in zip(LABELS, labels[place], strict=True) if held)
        collection.add(new_images(code[None], start=place, labels=names))
    yield collection, codes, labels
    collection.close()


def by_hand(codes, labels) -> tuple[np.ndarray, np.ndarray]:
    """(pairs, relevant pairs) at each distance among different labelled images."""
    chosen = labels.any(axis=1)
    d = hamming.distances(codes[chosen], codes[chosen])
    relevant = labels[chosen].astype(int) @ labels[chosen].T > 0
    other = ~np.eye(len(d), dtype=bool)
    return (
        np.array([(d[other] == r).sum() for r in range(N_BITS + 1)]),
        np.array([((d == r) & relevant & other).sum() for r in range(N_BITS + 1)]),
    )


def test_it_equals_brute_force_over_pairs_of_different_images(world):
    collection, codes, labels = world
    found = calibrate_collection(collection)
    pairs, relevant = by_hand(codes, labels)
    assert found.calibration.pairs == tuple(pairs)
    seen = np.flatnonzero(pairs)
    isotonic = IsotonicRegression(increasing=False)
    expected = isotonic.fit_transform(seen, relevant[seen] / pairs[seen], sample_weight=pairs[seen])
    np.testing.assert_allclose(np.array(found.calibration.at_distance)[seen], expected)
    assert found.calibration.within_radius[-1] == pytest.approx(relevant.sum() / pairs.sum())
    assert found.n_images == labels.any(axis=1).sum() == found.calibration.n_queries
    assert found.labels == LABELS


def test_it_is_stored_with_the_collection_and_only_named_labels_count(world):
    collection, codes, labels = world
    assert stored_calibration(collection) is None
    with closing(Collection(collection.folder, read_only=True)) as reader:
        first = calibrate_collection(collection)
        assert stored_calibration(reader) == first
        second = calibrate_collection(collection, labels=["b", "a"])
        assert stored_calibration(reader) == second != first
    pairs, relevant = by_hand(codes, labels[:, :2])
    assert second.calibration.pairs == tuple(pairs)
    assert second.calibration.within_radius[-1] == pytest.approx(relevant.sum() / pairs.sum())
    assert second.labels == ("b", "a")


def test_the_seed_chooses_the_queries(world):
    collection, _, _ = world
    some = [calibrate_collection(collection, n_queries=9, seed=seed).calibration for seed in (0, 0, 1)]
    assert some[0] == some[1] != some[2]
    assert some[0].n_queries == 9


def test_a_precision_becomes_the_largest_radius_that_gives_it(world):
    collection, codes, labels = world
    made = calibrate_collection(collection)
    pairs, relevant = by_hand(codes, labels)
    share = relevant.sum() / pairs.sum()
    assert radius_for(made, 0.0) == N_BITS
    assert radius_for(made, round(share, 6) - 1e-5) == N_BITS
    wanted = made.calibration.within_radius[2]
    reached = [radius for radius, precision in enumerate(made.calibration.within_radius) if precision >= wanted]
    assert radius_for(made, wanted) == max(reached) < N_BITS
    for stored, precision in ((made, 1.0), (made, 1.5), (None, 0.9)):
        with pytest.raises(BadConfig):
            radius_for(stored, precision)


def test_invalid_calibrations_are_refused(world, tmp_path):
    collection, codes, _ = world
    with pytest.raises(BadConfig, match="d, e"):
        calibrate_collection(collection, labels=["a", "d", "e"])
    with closing(code_collection(tmp_path / "bare", n_bits=N_BITS)) as bare:
        bare.add(new_images(codes))
        with pytest.raises(BadConfig):
            calibrate_collection(bare)


def test_a_label_that_all_images_have_is_refused(world):  # every hit would be relevant, at any distance
    collection, _, _ = world
    with pytest.raises(BadConfig):
        calibrate_collection(collection, labels=["a"])
    for image in collection.catalog.page(after=0, limit=99):
        collection.update(image.id, labels=[*image.labels, "holiday"])
    with pytest.raises(BadConfig):
        calibrate_collection(collection)
    assert calibrate_collection(collection, labels=LABELS).labels == LABELS


@pytest.mark.parametrize(
    "content", [{"calibration": {"version": 99}}, {"calibration": {"version": 1}}, {}, [1]], ids=str
)
def test_a_damaged_calibration_is_refused(world, content):
    collection, _, _ = world
    collection.catalog.spaces.set_calibration(content)
    with pytest.raises(BadCodes):
        stored_calibration(collection)


def test_a_calibration_of_an_earlier_checkout_is_read(world):
    collection, _, _ = world
    made = calibrate_collection(collection)
    values = {**asdict(made), "calibration": {**asdict(made.calibration), "monotone": True}}
    collection.catalog.spaces.set_calibration(values)
    assert stored_calibration(collection) == made


@pytest.fixture
def calibrated(own_collection) -> tuple[Collection, Searcher]:
    """A collection of real pictures that keeps a calibration by hand: 0.9 to 10 bits, 0.6 to 20, 0.2 beyond."""
    collection = Collection(own_collection)
    steps = [0.9 if d <= 10 else 0.6 if d <= 20 else 0.2 for d in range(49)]
    within = np.cumsum(steps) / np.arange(1, 50)
    made = Calibration(48, 12, tuple(steps), tuple(within.tolist()), (1,) * 49)
    store_calibration(collection.catalog, made, source="by hand", labels=("even",), n_images=12)
    yield collection, Searcher.open(collection, device="cpu", precision="fp32")
    collection.close()


def test_a_search_by_precision_is_the_search_within_its_radius(calibrated):
    _, searcher = calibrated
    radius = 20
    while (0.9 * 11 + 0.6 * 10 + 0.2 * (radius - 19)) / (radius + 2) >= 0.7:
        radius += 1
    hits = [
        [
            answer.hits
            for answer in (
                searcher.similar(3, options),
                searcher.search(draw(5), options),
                searcher.search(draw(40), options),
            )
        ]
        for options in (SearchOptions(k=12, min_precision=0.7), SearchOptions(k=12, max_distance=radius))
    ]
    assert hits[0] == hits[1]
    everything = searcher.similar(3, SearchOptions(k=12)).hits
    assert len(everything) == 12 > len(hits[0][0]) >= 1
    for hit in everything:
        assert hit.relevance == (0.9 if hit.distance <= 10 else 0.6 if hit.distance <= 20 else 0.2)


def test_a_precision_that_no_distance_reaches_is_refused(calibrated, indexed):
    _, searcher = calibrated
    with closing(Collection(indexed, read_only=True)) as bare:
        without = Searcher(searcher.encoder, bare)
        for one, precision in ((searcher, 0.95), (without, 0.5)):
            with pytest.raises(BadConfig):
                one.similar(3, SearchOptions(k=1, min_precision=precision))
        assert without.similar(3, SearchOptions(k=1)).hits[0].relevance is None


def test_the_commands_calibrate_and_search_by_precision(own_collection, pictures, capsys):
    run = partial(run_command, capsys)
    picture = pictures / "picture 00.jpg"
    search = ("search", own_collection, picture, "--device", "cpu", "--precision", "fp32")
    code, _, err = run(*search, "--min-precision", "0.5")
    assert code == 2
    assert "hashseek index calibrate" in err
    assert "relevance" not in run(*search)[1]
    code, out, _ = run("index", "calibrate", own_collection, "--labels", "even", "--labels", "odd")
    assert code == 0
    assert out.startswith("12 queries over 12 labelled images, labels even, odd\nprecision  radius\n")
    with closing(Collection(own_collection, read_only=True)) as opened:
        kept = stored_calibration(opened).calibration
    assert run("index", "calibrate", own_collection, "--queries", 5, "--seed", 1)[1].startswith("5 queries over 12 ")
    with closing(Collection(own_collection)) as opened:
        of_command = stored_calibration(opened).calibration
        seeds = [calibrate_collection(opened, n_queries=5, seed=seed).calibration for seed in (1, 0)]
    assert of_command == seeds[0] != seeds[1]
    assert run("index", "calibrate", own_collection, "--labels", "even", "--labels", "odd")[0] == 0
    shown = json.loads(run("index", "stats", own_collection, "--json")[1])["calibration"]
    assert (shown["from"], shown["images"], len(shown["made"])) == (
        "its own labelled images",
        12,
        len("2026-11-27T00:00:00Z"),
    )
    code, out, _ = run(*search, "--json", "-k", "12", "--min-precision", "0.3")
    hits = json.loads(out)["hits"]
    assert code == 0
    assert 1 <= len(hits) <= 12
    assert all(hit["relevance"] == kept.at_distance[hit["distance"]] for hit in hits)
    assert all(hit["distance"] <= kept.radius(0.3) for hit in hits)
    lines = run(*search)[1].splitlines()
    assert lines[0].split() == ["rank", "score", "bits", "relevance", "id", "path", "labels"]
    assert lines[1].split()[3] == f"{kept.at_distance[hits[0]['distance']]:.3f}"


def test_the_service_searches_by_precision_and_returns_relevances(calibrated, pictures):
    collection, searcher = calibrated
    expected = searcher.similar(3, SearchOptions(k=12, min_precision=0.7)).hits
    with serving(collection.folder, precision="fp32") as client:
        answer = client.get("/v1/images/3/similar", params={"k": 12, "min_precision": 0.7}).json()
        assert [(hit["id"], hit["relevance"]) for hit in answer["hits"]] == [
            (h.image.id, h.relevance) for h in expected
        ]
        upload = {"image": (pictures / "picture 00.jpg").read_bytes()}
        answer = client.post("/v1/search", files=upload, data={"k": 12, "min_precision": 0.7}).json()
        assert answer["hits"][0]["distance"] <= 10
        assert answer["hits"][0]["relevance"] == 0.9
        for parameters in ({"min_precision": 0.99}, {"min_precision": 2}, {"min_precision": 0.5, "max_distance": 3}):
            assert client.get("/v1/images/3/similar", params=parameters).status_code == 422
        assert client.get("/v1/stats").json()["engine"] == searcher.encoder.engine
