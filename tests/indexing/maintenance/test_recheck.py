"""`index verify --codes`: stored codes are compared with new ones."""

import hashlib
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from hashseek.indexing.catalog import FindingKind, NewImage
from hashseek.indexing.collection import Collection
from hashseek.indexing.ingest.batch import ingest
from hashseek.indexing.ingest.manifests import ImageSource
from hashseek.indexing.maintenance.recheck import MAX_SHARE, recheck
from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadConfig, ForeignCodes
from support.pictures import N_PICTURES, draw


@pytest.fixture(scope="module")
def encoder(checkpoint) -> Encoder:
    return Encoder(load_checkpoint(checkpoint), device="cpu")


def flip(collection: Collection, image_id: int, n_bits: int) -> None:
    """Store another code of an image, as a damaged or foreign one."""
    [(code, _)] = collection.catalog.spaces.codes_of([image_id]).values()
    bits = np.unpackbits(code, bitorder="little")
    bits[:n_bits] ^= 1
    [space] = collection.catalog.spaces.all()
    with closing(sqlite3.connect(collection.catalog.path)) as db, db:
        db.execute(
            "UPDATE codes SET code = ? WHERE image_id = ? AND space_id = ?",
            (np.packbits(bits, bitorder="little").tobytes(), image_id, space.id),
        )


def test_the_same_engine_gives_the_same_codes(indexed, encoder):
    with closing(Collection(indexed, read_only=True)) as collection:
        found = recheck(collection, encoder, 1000)
        assert found.engine == encoder.engine
        [part] = found.compared
        assert (part.engine, part.n_images, part.n_differ, part.most) == (encoder.engine, N_PICTURES, 0, 0)
        assert (found.findings, found.n_missing, found.n_images) == ((), 0, N_PICTURES)
        few = [recheck(collection, encoder, 5, seed) for seed in (1, 1)]
        assert few[0] == few[1]
        assert few[0].n_images == 5


def test_wrong_codes_are_found(own_collection, encoder):
    with closing(Collection(own_collection)) as collection:
        flip(collection, 3, 16)  # of 12 x 48 bits: below the limit of the sample, not that of an image
        found = recheck(collection, encoder, 1000)
        [part] = found.compared
        assert (part.n_differ, part.most) == (16, 16)
        assert part.share == pytest.approx(16 / (N_PICTURES * 48))
        assert part.share < MAX_SHARE
        [finding] = found.findings
        assert finding.kind is FindingKind.WRONG_CODE
        assert "(ids 3)" in str(finding)
        for image_id in range(1, N_PICTURES + 1):
            flip(collection, image_id, 10)  # too much in all, though none by itself (image 3 has 16 again less 10)
        [finding] = recheck(collection, encoder, 1000).findings
        assert "more than the 5 %" in str(finding)


def test_differences_are_reported_per_engine(own_collection, encoder, tmp_path):
    draw(77).save(tmp_path / "77.png")
    draw(78).save(tmp_path / "78.png")
    with closing(Collection(own_collection)) as collection:
        for seed, engine in ((77, "another engine"), (78, "")):
            file = tmp_path / f"{seed}.png"
            code = encoder.encode([draw(seed)])[0].copy()
            code[0] ^= 15
            sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
            collection.add([NewImage(str(file), sha256, 96, 72, 1, "image/png", (), code, engine=engine)])
        found = recheck(collection, encoder, 1000)
        assert [(part.engine, part.n_images, part.n_differ) for part in found.compared] == [
            ("", 1, 4),
            ("another engine", 1, 4),
            (encoder.engine, N_PICTURES, 0),
        ]
        assert "an engine that is not recorded" in str(found.compared[0])
        assert found.findings == ()  # 8.3 %, but of one image


def test_missing_and_changed_files(own_collection, encoder, tmp_path):
    paths = [tmp_path / f"{seed}.png" for seed in (90, 91, 92)]
    for seed, path in zip((90, 91, 92), paths, strict=True):
        draw(seed).save(path)
    with closing(Collection(own_collection)) as collection:
        list(ingest(collection, encoder, [ImageSource(path) for path in paths]))
        paths[0].unlink()
        draw(95).save(paths[1])
        found = recheck(collection, encoder, 1000)
        assert (found.n_missing, found.n_images) == (1, N_PICTURES + 1)
        assert [finding.image_id for finding in found.findings] == [N_PICTURES + 2]


def test_bad_arguments_are_refused(indexed, encoder, other_checkpoint):
    with closing(Collection(indexed, read_only=True)) as collection:
        with pytest.raises(BadConfig):
            recheck(collection, encoder, 0)
        with pytest.raises(ForeignCodes):
            recheck(collection, Encoder(load_checkpoint(other_checkpoint), device="cpu"), 5)


def test_the_command_says_what_it_found_and_exits_with_1_for_a_problem(hashseek, own_collection, encoder):
    code, out, err = hashseek("index", "verify", own_collection, "--codes", 1000, "--device", "cpu")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"encoded again by {encoder.engine}:",
        f"  {N_PICTURES} codes by {encoder.engine}: 0.000 % of bits differ, in one image at most 0 of 48",
        f"{N_PICTURES} images, 0 problems",
    ]
    with closing(Collection(own_collection)) as collection:
        flip(collection, 2, 30)
    code, out, _ = hashseek("index", "verify", own_collection, "--codes", 1000, "--device", "cpu")
    assert code == 1
    assert "engines explain" in out
