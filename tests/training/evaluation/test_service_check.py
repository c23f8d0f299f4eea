"""A real service gives the ranking and the metrics of the library, and what differs is listed."""

import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from hashseek.api.client import ServiceError
from hashseek.indexing.collection import Collection
from hashseek.indexing.ingest.batch import ImageSource, ingest
from hashseek.indexing.opening import open_store
from hashseek.indexing.searcher import Searcher
from hashseek.retrieval.errors import BadDataset, ForeignCodes
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.datasets.shapes import render_shapes
from hashseek.training.data.splits import Splits
from hashseek.training.evaluation.assembly import EvaluationOptions
from hashseek.training.evaluation.evaluate import evaluate
from hashseek.training.evaluation.service_check import check_service
from support.in_process import run_command
from support.models import untrained_checkpoint
from support.service import listening

serve = partial(listening, precision="fp32", read_only=True)
OPTIONS = EvaluationOptions("shapes", ns=(5, 20, None), device="cpu", precision="fp32")
SHORT = EvaluationOptions("shapes", ns=(5, 20), device="cpu", precision="fp32")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, Path, Path]:
    """(data set, checkpoint of 6 bits so that ties are the rule, collection of its database split, in no order)."""
    root = tmp_path_factory.mktemp("served")
    render_shapes(root / "data", n_query=8, n_train=2, n_database=40, size=48, seed=5)
    untrained_checkpoint(root / "model.safetensors", n_bits=6, root=root / "data")
    paths = build_splits("folder", root=str(root / "data")).database.paths
    index(root / "collection", root / "model.safetensors", paths[::-1])
    return root / "data", root / "model.safetensors", root / "collection"


def index(folder: Path | str, checkpoint: Path, paths) -> Path | str:
    collection = open_store(Path(folder), checkpoint=checkpoint, create=True)
    encoder = Searcher.open(collection, device="cpu", precision="fp32").encoder
    list(ingest(collection, encoder, [ImageSource(path) for path in paths]))
    collection.save_index()
    collection.close()
    return folder


@pytest.fixture(scope="module")
def served(world) -> Iterator[str]:
    """The URL of a service of the collection."""
    with serve(world[2]) as url:
        yield url


@pytest.fixture
def in_milvus(world, milvus_name) -> Iterator[str]:
    """The same with the collection in Milvus."""
    data, checkpoint, _ = world
    index(milvus_name, checkpoint, splits_of(data).database.paths[::-1])
    with serve(Path(milvus_name), checkpoint=checkpoint) as url:
        yield url


def splits_of(data: Path) -> Splits:
    return build_splits("folder", root=str(data))


@pytest.mark.parametrize(
    "service", ["served", pytest.param("in_milvus", marks=(pytest.mark.milvus, pytest.mark.xdist_group("milvus")))]
)
def test_service_and_library_give_the_same_ranking_and_metrics(service, world, capsys, request):
    data, checkpoint, _ = world
    url = request.getfixturevalue(service)
    found = check_service(url + "/", checkpoint, splits_of(data), OPTIONS)
    assert (found.differences, found.equal, found.ranks, found.version) == ([], 8, 40, version("hashseek"))
    library = evaluate(checkpoint, splits_of(data), OPTIONS, n_points=0).report
    for (served, of_library), score in zip(found.mean_ap.values(), library.scores, strict=True):
        assert served == of_library
        bounds = score.mean_average_precision  # ties are in another order: by ids of the collection
        assert bounds.worst - 1e-12 <= served <= bounds.best + 1e-12
    arguments = ("evaluate", checkpoint, "--url", url, "-n", "5", "--device", "cpu", "--precision", "fp32")
    code, printed, _ = run_command(capsys, *arguments)
    assert code == 0
    assert "8 of 8 queries" in printed
    assert f"| 5 | {found.mean_ap[5][0]:.6f} | {found.mean_ap[5][0]:.6f} | +0.000000 |" in printed
    assert not (checkpoint.parent / "evaluation-model").exists()
    for of_reports in (["--lengths"], ["--protocol", "hyp2"], ["--out", data], ["--calibrate", data], [checkpoint]):
        assert run_command(capsys, *arguments, *of_reports)[:2] == (2, "")


def test_a_service_with_keys_gets_one(world, capsys, tmp_path, monkeypatch):
    (data, checkpoint, collection), keys = world, tmp_path / "keys.toml"
    secret = run_command(capsys, "keys", "create", "me", "--keys", keys)[1].strip()
    with serve(collection, keys=keys) as url:
        with pytest.raises(ServiceError):
            check_service(url, checkpoint, splits_of(data), SHORT)
        monkeypatch.setenv("HASHSEEK_API_KEY", secret)
        assert check_service(url, checkpoint, splits_of(data), SHORT).equal == 8


def test_ids_in_the_order_of_the_split_give_the_figures_that_an_evaluation_calls_as_served(world, tmp_path):
    data, checkpoint, _ = world
    splits = splits_of(data)
    with serve(index(tmp_path / "in order", checkpoint, splits.database.paths)) as url:
        found = check_service(url, checkpoint, splits, SHORT)
    library = evaluate(checkpoint, splits, SHORT, n_points=0).report
    assert found.mean_ap == {score.n: (score.as_served, score.as_served) for score in library.scores}


def test_more_ranks_than_a_service_returns_are_refused(world):
    data, checkpoint, collection = world
    with serve(collection, max_k=20) as url:
        assert check_service(url, checkpoint, splits_of(data), SHORT).ranks == 20
        with pytest.raises(ServiceError):
            check_service(url, checkpoint, splits_of(data), OPTIONS)


def test_a_service_whose_collection_changes_meanwhile_is_refused(world, served, monkeypatch):
    """The answer lacks an image that the list has, as if it had been removed in between."""
    data, checkpoint, _ = world
    search = Collection.search

    def without_the_first(*given, **options):
        return [(distances[1:], ids[1:]) for distances, ids in search(*given, **options)]

    monkeypatch.setattr(Collection, "search", without_the_first)
    with pytest.raises(BadDataset, match="39 of 40"):
        check_service(served, checkpoint, splits_of(data), OPTIONS)


def test_a_service_that_ranks_otherwise_is_found_out(world, served, capsys, monkeypatch):
    """Ties by descending id, which no search of ours gives."""
    search = Collection.search

    def backwards(self, codes, *, k, **options):
        made = []
        for distances, ids in search(self, codes, k=len(self), **options):
            order = np.lexsort((-ids, distances))[:k]
            made.append((distances[order], ids[order]))
        return made

    monkeypatch.setattr(Collection, "search", backwards)
    arguments = ("evaluate", world[1], "--url", served, "-n", "all", "-n", "5")
    code, printed, _ = run_command(capsys, *arguments, "--device", "cpu", "--precision", "fp32")
    assert code == 1
    listed = re.findall(
        r"^- .*: (\d+) of 40 ranks differ, first at rank (\d+): .* (.*) at distance \d+, .* (.*) at", printed, re.M
    )
    assert len(listed) == 8
    for n_ranks, first, one, other in listed:
        assert 1 < int(n_ranks) <= 40
        assert 1 <= int(first) < 40
        assert one != other


def test_another_fingerprint_is_refused(world, served, checkpoint):
    with pytest.raises(ForeignCodes):
        check_service(served, checkpoint, splits_of(world[0]), OPTIONS)


def test_a_collection_of_other_images_is_refused(world, served):
    data, checkpoint, _ = world
    splits = splits_of(data)
    stored, other = splits.database.paths, splits.query.paths[0]
    database = replace(splits.database.take(range(36)), paths=(other, *stored[1:36]))
    with pytest.raises(BadDataset) as raised:
        check_service(served, checkpoint, replace(splits, database=database), OPTIONS)
    for text in ("1 images missing", other.name, "5 not in", stored[-1].name):
        assert text in str(raised.value)
    with pytest.raises(BadDataset):  # it has all images of the split, and more
        check_service(served, checkpoint, replace(splits, database=splits.database.take(range(36))), OPTIONS)


def test_copies_count_once(world, served, tmp_path):
    data, checkpoint, _ = world
    splits = splits_of(data)
    copies = [Path(shutil.copy(splits.database.paths[0], tmp_path / f"{number}.jpg")) for number in range(3)]
    database = replace(splits.database.take([*range(40), 0, 0, 0]), paths=(*splits.database.paths, *copies))
    found = check_service(served, checkpoint, replace(splits, database=database), OPTIONS)
    assert (found.ranks, found.differences) == (40, [])
    assert any("3 database images are copies" in note for note in found.notes)


def test_a_url_without_a_service_is_refused(world, served):
    data, checkpoint, _ = world
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}", "http://[", "file:///etc"):
        with pytest.raises(ServiceError):
            check_service(url, checkpoint, splits_of(data), OPTIONS)
    for page in ("/docs", "/?", "/healthz/live?"):  # no page, HTML, and other JSON
        with pytest.raises(ServiceError):
            check_service(f"{served}{page}", checkpoint, splits_of(data), OPTIONS)
