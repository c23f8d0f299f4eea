"""A real service gives the ranking and the metrics of the library, and what differs is listed."""

import re
import shutil
import socket
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from hashseek.api.client import Client, ServiceError
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
from support.commands import wait_until
from support.in_process import run_command
from support.models import untrained_checkpoint
from support.service import url_in

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


@pytest.fixture
def serve(start):
    """Start `hashseek serve` on a free port: collection -> its address, once it is ready."""

    def serve_collection(folder: Path, *more: object, before: str = "") -> str:
        options = ("--port", 0, "--device", "cpu", "--precision", "fp32", "--read-only", *more)
        process = start("serve", folder, *options, before=before)
        wait_until(lambda: url_in(process.err) or process.ended)
        url = url_in(process.err)
        wait_until(lambda: httpx.get(f"{url}/healthz/ready").is_success)
        return url

    return serve_collection


def splits_of(data: Path) -> Splits:
    return build_splits("folder", root=str(data))


@pytest.mark.parametrize(
    "kind", ["folder", pytest.param("milvus", marks=(pytest.mark.milvus, pytest.mark.xdist_group("milvus")))]
)
def test_service_and_library_give_the_same_ranking_and_metrics(kind, world, serve, capsys, request):
    data, checkpoint, collection = world
    if kind == "milvus":
        collection = index(request.getfixturevalue("milvus_name"), checkpoint, splits_of(data).database.paths[::-1])
    url = serve(collection, "--checkpoint", checkpoint)
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


def test_a_service_with_keys_gets_one(world, serve, hashseek, tmp_path, monkeypatch):
    _, _, collection = world
    secret = hashseek("keys", "create", "me", "--keys", tmp_path / "keys.toml")[1].strip()
    url = serve(collection, "--keys", tmp_path / "keys.toml")
    with Client(url) as client, pytest.raises(ServiceError):
        client.stats()
    monkeypatch.setenv("HASHSEEK_API_KEY", secret)
    with Client(url) as client:
        assert client.stats().n_images == 40


def test_ids_in_the_order_of_the_split_give_the_figures_that_an_evaluation_calls_as_served(world, serve, tmp_path):
    data, checkpoint, _ = world
    splits = splits_of(data)
    url = serve(index(tmp_path / "in order", checkpoint, splits.database.paths))
    found = check_service(url, checkpoint, splits, SHORT)
    library = evaluate(checkpoint, splits, SHORT, n_points=0).report
    assert found.mean_ap == {score.n: (score.as_served, score.as_served) for score in library.scores}


def test_more_ranks_than_a_service_returns_are_refused(world, serve):
    data, checkpoint, collection = world
    url = serve(collection, before="import os\nos.environ['HASHSEEK_MAX_K'] = '20'")
    assert check_service(url, checkpoint, splits_of(data), SHORT).ranks == 20
    with pytest.raises(ServiceError):
        check_service(url, checkpoint, splits_of(data), OPTIONS)


# The answer lacks an image that the list has, as if it had been removed in between.
FORGETS_ONE = """
from hashseek.indexing.collection import Collection
search = Collection.search
Collection.search = lambda self, codes, **options: [(d[1:], ids[1:]) for d, ids in search(self, codes, **options)]
"""

# Ties by descending id, which no search of ours gives.
OTHER_TIES = """
from hashseek.indexing.collection import Collection
import numpy as np
search = Collection.search
def backwards(self, codes, *, k, **options):
    made = []
    for distances, ids in search(self, codes, k=len(self), **options):
        order = np.lexsort((-ids, distances))[:k]
        made.append((distances[order], ids[order]))
    return made
Collection.search = backwards
"""


def test_a_service_whose_collection_changes_meanwhile_is_refused(world, serve):
    data, checkpoint, collection = world
    url = serve(collection, before=FORGETS_ONE)
    with pytest.raises(BadDataset, match="39 of 40"):
        check_service(url, checkpoint, splits_of(data), OPTIONS)


def test_a_service_that_ranks_otherwise_is_found_out(world, serve, capsys):
    _, checkpoint, collection = world
    arguments = ("evaluate", checkpoint, "--url", serve(collection, before=OTHER_TIES), "-n", "all", "-n", "5")
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


def test_another_fingerprint_is_refused(world, serve, indexed):
    data, checkpoint, _ = world
    with pytest.raises(ForeignCodes):
        check_service(serve(indexed), checkpoint, splits_of(data), OPTIONS)


def test_a_collection_of_other_images_is_refused(world, serve, tmp_path):
    data, checkpoint, _ = world
    splits = splits_of(data)
    folder = index(tmp_path / "collection", checkpoint, [*splits.database.paths[4:], splits.query.paths[0]])
    with pytest.raises(BadDataset) as raised:
        check_service(serve(folder), checkpoint, splits, OPTIONS)
    for text in ("4 images missing", splits.database.paths[0].name, "1 not in", splits.query.paths[0].name):
        assert text in str(raised.value)


def test_copies_count_once_on_both_sides(world, serve, tmp_path):
    data, checkpoint, _ = world
    own = shutil.copytree(data, tmp_path / "data")
    paths = splits_of(own).database.paths
    for copy in paths[10:13]:
        copy.write_bytes(paths[0].read_bytes())
    url = serve(index(tmp_path / "collection", checkpoint, paths))
    found = check_service(url, checkpoint, splits_of(own), OPTIONS)
    assert (found.ranks, found.differences) == (37, [])
    assert any("3 database images are copies" in note for note in found.notes)


def test_a_url_without_a_service_is_refused(world, serve):
    data, checkpoint, collection = world
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}", "http://[", "file:///etc"):
        with pytest.raises(ServiceError):
            check_service(url, checkpoint, splits_of(data), OPTIONS)
    url = serve(collection)
    with pytest.raises(ServiceError):
        check_service(f"{url}/docs", checkpoint, splits_of(data), OPTIONS)
    for page in ("/?", "/healthz/live?"):  # HTML, and other JSON
        with pytest.raises(ServiceError):
            check_service(f"{url}{page}", checkpoint, splits_of(data), OPTIONS)
