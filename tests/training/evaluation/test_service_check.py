"""The served truth: a real service gives the ranking and the figures of the library, and what differs is listed."""

import re
import shutil
import socket
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
import torch

from hashseek.api.cli import main
from hashseek.indexing.collection import open_or_create
from hashseek.indexing.ingest.batch import ImageSource, ingest
from hashseek.indexing.searcher import Searcher
from hashseek.retrieval.checkpoint import save_checkpoint
from hashseek.retrieval.errors import BadConfig, BadDataset, ForeignCodes
from hashseek.retrieval.images import Preprocessing
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.datasets.shapes import render_shapes
from hashseek.training.evaluation.evaluate import evaluate
from hashseek.training.evaluation.report import load_report
from hashseek.training.evaluation.report.compare import as_markdown, load_entries
from hashseek.training.evaluation.service_check import check_service
from support.commands import wait_until

LIBRARY = {"data_name": "shapes", "ns": (5, 20, None), "device": "cpu", "precision": "fp32"}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, Path, Path]:
    """(data set, checkpoint of 6 bits so that ties are the rule, collection of its database split, in no order)."""
    root = tmp_path_factory.mktemp("served")
    render_shapes(root / "data", n_query=8, n_train=2, n_database=40, size=48, seed=5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = HashModel(backbone="squeezenet1_1", n_bits=6)
    preprocessing = Preprocessing(size=48, mean=(0.5,) * 3, std=(0.25,) * 3, crop_fraction=1.0)
    training = {"data": {"name": "folder", "root": str(root / "data")}}
    save_checkpoint(root / "model.safetensors", model, preprocessing, label_names=("a",), training=training)
    paths = build_splits("folder", root=str(root / "data")).database.paths
    index(root / "collection", root / "model.safetensors", paths[::-1])
    return root / "data", root / "model.safetensors", root / "collection"


def index(folder: Path, checkpoint: Path, paths) -> Path:
    collection = open_or_create(folder, checkpoint=checkpoint)
    encoder = Searcher.open(collection, device="cpu", precision="fp32").encoder
    list(ingest(collection, encoder, [ImageSource(path) for path in paths]))
    collection.save_index()
    collection.close()
    return folder


@pytest.fixture
def serve(start):
    """Start `hashseek serve` on a free port: collection -> its address, once it is ready."""

    def serve_collection(folder: Path, before: str = "") -> str:
        options = ("--port", 0, "--device", "cpu", "--precision", "fp32", "--read-only")
        process = start("serve", folder, *options, before=before)
        wait_until(lambda: "search page on" in process.err or process.ended)
        url = re.search(r"search page on (http://\S+?),", process.err)[1]
        wait_until(lambda: is_ready(url))
        return url

    return serve_collection


def is_ready(url: str) -> bool:
    return httpx.get(f"{url}/healthz/ready").status_code == 200


def copy_of(collection: Path, target: Path) -> Path:
    return shutil.copytree(collection, target, ignore=shutil.ignore_patterns("*-wal", "*-shm"))


def test_service_and_library_give_the_same_ranking_and_figures(world, serve, capsys):
    data, checkpoint, collection = world
    url = serve(collection)
    splits = build_splits("folder", root=str(data))
    found = check_service(url + "/", checkpoint, splits, **LIBRARY)
    assert found.differences == []
    assert (found.n_queries, found.n_images) == (8, 40)
    assert list(found.figures) == [5, 20, 40]
    report = evaluate(checkpoint, splits, n_points=0, **LIBRARY).report
    for score in report.scores:
        served, library = found.figures[score.n]
        assert served == library
        bounds = score.mean_average_precision  # the order of ids is another, so that equal distances are too
        assert bounds.worst - 1e-12 <= served <= bounds.best + 1e-12
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(checkpoint), "--url", url, "-n", "5", "--device", "cpu", "--precision", "fp32"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "40 stored images of checkpoint" in printed
    assert "8 of 8 queries have the same ranking (ids and distances)." in printed
    served, library = found.figures[5]
    assert f"| 5 | {served:.6f} | {library:.6f} | +0.000000 |" in printed
    assert not (checkpoint.parent / "evaluation-model").exists()


def test_as_served_in_the_report_is_what_a_service_of_the_same_order_gives(world, serve, tmp_path):
    data, checkpoint, _ = world
    splits = build_splits("folder", root=str(data))
    url = serve(index(tmp_path / "in order", checkpoint, splits.database.paths))
    found = check_service(url, checkpoint, splits, **LIBRARY)
    report = evaluate(checkpoint, splits, n_points=0, **LIBRARY).report
    assert found.differences == []
    assert [a for a, _ in found.figures.values()] == pytest.approx([score.as_served for score in report.scores])


def test_the_whole_ranking_gives_the_library_s_report_but_for_what_needs_codes(world, serve, tmp_path):
    data, checkpoint, _ = world
    splits = build_splits("folder", root=str(data))
    url = serve(index(tmp_path / "in order", checkpoint, splits.database.paths))
    made = check_service(url, checkpoint, splits, whole=True, **LIBRARY | {"ns": (5, 20)}).evaluation
    library = evaluate(checkpoint, splits, n_points=0, **LIBRARY | {"ns": (5, 20)})
    ours, theirs = library.report, made.report
    assert theirs.ties == "expected"
    for name in ("scores", "curves", "labels", "distances", "calibration", "confusions", "examples", "worst", "main_n"):
        assert getattr(theirs, name) == getattr(ours, name), name
    assert theirs.data == ours.data
    assert made.per_query == library.per_query
    assert theirs.bits is None
    assert (theirs.served.ranks, theirs.served.equal, theirs.served.differences) == (40, 8, [])
    assert theirs.served.version == version("hashseek")
    assert theirs.served.engine == ours.model["computed_in"] != ""
    made.write(tmp_path / "served")
    library.write(tmp_path / "library")
    page, markdown = ((tmp_path / "served" / name).read_text() for name in ("report.html", "report.md"))
    for text in (page, markdown):
        assert url in text
        assert version("hashseek") in text
        assert "they need codes and outputs, which a service does not give" in text
        assert "distinct codes" not in text
    assert load_report(tmp_path / "served" / "report.json").served == theirs.served
    assert "mean difference" in as_markdown(load_entries([tmp_path / "library", tmp_path / "served"]))


def test_a_cut_ranking_gives_what_follows_from_the_order(world, serve, tmp_path, capsys):
    data, checkpoint, collection = world
    url = serve(collection, before="import os\nos.environ['HASHSEEK_MAX_K'] = '20'")
    out = tmp_path / "report"
    arguments = ["evaluate", str(checkpoint), "--url", url, "-n", "5", "-n", "20", "--out", str(out)]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--device", "cpu", "--precision", "fp32"])
    assert ended.value.code == 0
    assert str(out / "report.html") in capsys.readouterr().err
    report = load_report(out / "report.json")
    found = check_service(url, checkpoint, build_splits("folder", root=str(data)), **LIBRARY | {"ns": (5, 20)})
    for score in report.scores:
        ap = score.mean_average_precision
        assert ap.expected == ap.worst == ap.best == score.as_served == found.figures[score.n][0]
        assert score.precision.low < score.precision.expected < score.precision.high
    assert report.ties == "as served"
    assert report.curves.ns[-1] == report.served.ranks == 20
    assert report.curves.precision[-1] == pytest.approx(report.scores[-1].precision.expected)
    assert (report.distances, report.calibration, report.bits) == (None, None, None)
    page = (out / "report.html").read_text()
    assert "the service gave the 20 nearest of 40 images, and these need all (HASHSEEK_MAX_K)" in page
    assert "worst to best" not in page
    assert sorted(path.name for path in (out / "figures").glob("*.svg")) == [
        "precision_curve.svg",
        "precision_recall.svg",
    ]
    splits = build_splits("folder", root=str(data))
    evaluate(checkpoint, splits, n_points=0, **LIBRARY | {"ns": (5, 20)}).write(tmp_path / "library")
    with pytest.raises(
        BadConfig, match="equal distances are taken as expected .* in one and in the order of the service"
    ):
        load_entries([tmp_path / "library", out])


def test_a_service_whose_collection_changes_meanwhile_is_refused(world, serve):
    data, checkpoint, collection = world
    url = serve(collection, before=FORGETS_ONE)
    with pytest.raises(BadDataset, match=r"answered .* with 39 of 40 images, or with one .*: evaluate while nobody"):
        check_service(url, checkpoint, build_splits("folder", root=str(data)), **LIBRARY)


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


def test_a_service_that_ranks_otherwise_is_found_out(world, serve, capsys):
    _, checkpoint, collection = world
    arguments = ["evaluate", str(checkpoint), "--url", serve(collection, before=OTHER_TIES), "-n", "all", "-n", "5"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--device", "cpu", "--precision", "fp32"])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    listed = re.findall(r"^- (.*): (\d+) of 40 ranks differ, first rank (\d+): (.*)$", printed, re.MULTILINE)
    assert len(listed) == 8
    assert "0 of 8 queries have the same ranking" in printed
    for _, n_ranks, first, both in listed:
        assert 1 < int(n_ranks) <= 40
        assert 1 <= int(first) < 40
        one, other = re.fullmatch(r"the service gives (.*) at \d+ bits, the library (.*) at \d+ bits", both).groups()
        assert one != other


def test_other_codes_in_the_service_are_found_out(world, serve, tmp_path):
    data, checkpoint, collection = world
    own = copy_of(collection, tmp_path / "collection")
    one_code_for_all = (
        "from hashseek.retrieval.encoder import Encoder\n"
        "encode = Encoder.encode\n"
        "Encoder.encode = lambda self, images: encode(self, images) ^ 1\n"
    )
    found = check_service(serve(own, one_code_for_all), checkpoint, build_splits("folder", root=str(data)), **LIBRARY)
    assert len(found.differences) == 8
    assert all("bits, the library " in sentence for sentence in found.differences)


def test_a_service_with_another_fingerprint_is_refused(world, serve, indexed):
    data, checkpoint, _ = world
    with pytest.raises(ForeignCodes, match=r"has codes of checkpoint \w{12}, this one is \w{12}: evaluate the"):
        check_service(serve(indexed), checkpoint, build_splits("folder", root=str(data)), **LIBRARY)


def test_a_collection_of_other_images_is_refused(world, serve, tmp_path):
    data, checkpoint, _ = world
    splits = build_splits("folder", root=str(data))
    folder = index(tmp_path / "collection", checkpoint, [*splits.database.paths[4:], splits.query.paths[0]])
    with pytest.raises(BadDataset) as raised:
        check_service(serve(folder), checkpoint, splits, **LIBRARY)
    names = ", ".join(path.name for path in splits.database.paths[:3])
    assert f"4 images ({names}, ...) missing and 1 images ({splits.query.paths[0].resolve()}) not in" in str(
        raised.value
    )


def test_copies_count_once_on_both_sides(world, serve, tmp_path):
    data, checkpoint, _ = world
    own = shutil.copytree(data, tmp_path / "data")
    paths = build_splits("folder", root=str(own)).database.paths
    for copy in paths[10:13]:
        copy.write_bytes(paths[0].read_bytes())
    splits = build_splits("folder", root=str(own))
    url = serve(index(tmp_path / "collection", checkpoint, splits.database.paths))
    found = check_service(url, checkpoint, splits, **LIBRARY)
    assert (found.n_images, found.differences) == (37, [])
    assert any("3 database images are copies" in note for note in found.evaluation.report.notes)


def test_what_is_no_service_is_one_sentence(world, capsys):
    data, checkpoint, _ = world
    splits = build_splits("folder", root=str(data))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for url, reason in (
        (f"http://127.0.0.1:{port}", "no service answers at .*Connection refused.*start it with `hashseek serve`"),
        ("http://[", "no service answers at"),
        ("file:///etc", "--url is the address of a service, such as http://127.0.0.1:8000, not file:///etc"),
    ):
        with pytest.raises(BadConfig, match=reason):
            check_service(url, checkpoint, splits, **LIBRARY)
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(checkpoint), "--url", "http://127.0.0.1:1", "--baseline", "random-directions"])
    assert ended.value.code == 2
    assert "give one checkpoint, and leave --baseline, --lengths and --calibrate out" in capsys.readouterr().err


def test_a_service_that_refuses_a_query_is_quoted(world, serve):
    data, checkpoint, collection = world
    url = serve(collection, before="import os\nos.environ['HASHSEEK_MAX_K'] = '7'")
    with pytest.raises(BadConfig, match=r"refused the query .*: k is the number of results and must be 1 to 7, not 40"):
        check_service(url, checkpoint, build_splits("folder", root=str(data)), **LIBRARY)


def test_a_page_that_is_not_ours_is_refused(world, serve):
    data, checkpoint, collection = world
    url = serve(collection)
    splits = build_splits("folder", root=str(data))
    with pytest.raises(BadConfig, match="refused .*/docs/v1/stats: "):
        check_service(f"{url}/docs", checkpoint, splits, **LIBRARY)
    for page in ("/?", "/healthz/live?"):  # HTML, and other JSON
        with pytest.raises(BadConfig, match="is no Hashseek service of this version: correct --url"):
            check_service(f"{url}{page}", checkpoint, splits, **LIBRARY)
