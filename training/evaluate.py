"""Evaluation: encode query and database splits, rank them with the searcher, and report figures that hold.

The only module of `training` that reaches into `indexing`: figures must come from the code that serves.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from indexing.hamming_index import Distances, Ids
from indexing.searcher import InMemory, Searcher
from retrieval.checkpoint import Checkpoint, load_checkpoint
from retrieval.codes import pack
from retrieval.encoder import Encoder
from retrieval.errors import BadConfig, BadImage
from retrieval.heads import build_head
from retrieval.images import Pixels, decode_for, read_bytes
from retrieval.metrics import (
    Figure,
    Histograms,
    Normalizer,
    average_precision_of_ranking,
    effective_n,
    histograms,
    precision_curve,
    relevance,
    remarks,
)
from retrieval.mlp import Mlp, n_inputs_of
from retrieval.model import HashModel
from retrieval.report import Part, Report, Scores, chance, score_all, values_of
from retrieval.report.examples import confusions, drawn, examples, worst
from retrieval.report.folder import Points, query_columns, write_report
from retrieval.report.projection import project
from retrieval.tar_members import find_member
from training.config import parse_config
from training.datasets.splits import Split, Splits
from training.fit import initial_model
from training.images import without_broken
from training.progress import Progress

Baseline = Literal["none", "random-directions", "untrained"]
BASELINES: dict[Baseline, str] = {
    "none": "",
    "random-directions": "The same backbone with random hash directions",
    "untrained": "The same model before training",
}

# Rankings are as long as the largest N times the queries ranked at once: so many places are held at a time.
PLACES_AT_ONCE = 2**22
# So many of the nearest images of each query tell which labels are taken for each other.
N_NEAREST = 50


@dataclass(frozen=True)
class Evaluation:
    """A report, and what its page and tables show beyond it."""

    report: Report
    per_query: dict[str, list[Any]]
    points: Points = field(repr=False)
    query_paths: tuple[Path, ...] = field(repr=False)
    database_paths: tuple[Path, ...] = field(repr=False)

    def write(self, folder: Path) -> list[Path]:
        """Write the folder of the report; gives the files, the page first."""
        return write_report(
            folder,
            self.report,
            per_query=self.per_query,
            points=self.points,
            query_paths=self.query_paths,
            database_paths=self.database_paths,
        )


@dataclass(frozen=True)
class _Served:
    """The searcher's own order: AP@N (Q,) for each N, and the nearest of each query, ids and distances (Q, n)."""

    average_precision: list[NDArray[np.float64]]
    ids: NDArray[np.int64]
    distances: NDArray[np.int64]


def evaluate(
    checkpoint_path: Path,
    splits: Splits,
    *,
    data_name: str,
    ns: Sequence[int | None] = (100, 1000, 5000),
    normalizer: Normalizer = "retrieved",
    baseline: Baseline = "none",
    n_points: int = 1000,
    seed: int = 0,
    device: str = "auto",
    precision: str = "auto",
    command: str = "",
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate a checkpoint on the query and database splits.

    Args:
        checkpoint_path: a Hashseek checkpoint.
        splits: the data set. data_name: what to call it in the report.
        ns: the N of mAP@N and the other figures; None, or more than the database holds, means all of it.
        normalizer: see `retrieval.metrics.average_precision`.
        baseline: also evaluate, in the same run, "random-directions": the same backbone with a random hash layer
            (drawn with `seed`), or "untrained": the model as it was before its first training step.
        n_points: database images in the t-SNE; 0 leaves it out.
        seed: of the random hash layer, the bootstrap, the t-SNE and the queries that are shown.
        device, precision: see `Encoder`.
        command: recorded in the report.
        progress: where to show the way.

    Raises:
        HashseekError: a bad checkpoint, broken images under on_error = "stop", images where the checkpoint encodes
            vectors (or the other way round), or N < 1.
    """
    for n in ns:
        effective_n(n, 1)
    if n_points < 0:
        raise BadConfig(f"the number of points in the t-SNE must be at least 0 (none), not {n_points}")
    progress = progress or Progress(quiet=True)
    checkpoint = load_checkpoint(checkpoint_path)
    header = checkpoint.header
    query, database, notes = usable(splits, data_name, progress)
    notes += remarks(query.labels, database.labels, ns=ns, label_names=splits.label_names)
    same_splits = header.training.get("splits_sha256", splits.fingerprint) == splits.fingerprint
    if not same_splits:
        notes.append(
            "the checkpoint was trained on other splits than these: query images may have been seen in training"
        )

    model = _Model(checkpoint, device=device, precision=precision)
    heads = [model.head]
    if baseline == "random-directions":
        heads.append(random_head(header.head, model.n_features, header.n_bits, seed=seed))
    parts = [model.encode(split, heads, progress, title) for split, title in _titled(query, database)]
    query_parts, database_parts = parts
    if baseline == "untrained":
        other = _Model(Checkpoint(_untrained(checkpoint), header), device=device, precision=precision)
        for made, (split, title) in zip(parts, _titled(query, database), strict=True):
            made += other.encode(split, [other.head], progress, title)

    limits = list(dict.fromkeys(effective_n(n, len(database)) for n in ns))
    measure = partial(_measure, model, ns=limits, normalizer=normalizer, seed=seed, device=device)
    q, db = query_parts[0], database_parts[0]
    found, served, scores = measure(q, db)
    values = values_of(found, q, db, splits.label_names, scores)
    if baseline != "none":
        before, _, of_baseline = measure(query_parts[1], database_parts[1])
        curve = precision_curve(before, values["curves"].ns).expected.mean(axis=0)
        values |= {
            "baseline": of_baseline.scores,
            "baseline_name": BASELINES[baseline],
            "baseline_precision": curve.tolist(),
        }

    ap = scores.per_query[f"AP@{values['main_n']}"].expected
    show = partial(
        examples,
        query=q,
        database=db,
        names=splits.label_names,
        ids=served.ids,
        distances=served.distances,
        average_precision=ap,
    )
    report = Report(
        title=f"{header.backbone}, {header.n_bits} bits, on {data_name}",
        normalizer=normalizer,
        n_bits=header.n_bits,
        fingerprint=header.fingerprint,
        data={
            "data_set": data_name,
            "queries": len(query),
            "database": len(database),
            "labels": len(splits.label_names),
            "splits_sha256": splits.fingerprint,
            "query_sha256": _digest(query),
            "database_sha256": _digest(database),
            "same_splits_as_in_training": same_splits and "splits_sha256" in header.training,
            "overlaps": overlaps(splits),
            "queries_without_a_relevant_item": found.without_relevant,
            "chance_(share_of_relevant_pairs)": chance(found),
        },
        model=model.describe(),
        notes=notes,
        seed=seed,
        command=command,
        confusions=confusions(q, db, splits.label_names, served.ids),
        examples=show(drawn(len(query), seed=seed)),
        worst=show(worst(ap, found.n_relevant)),
        **values,
    )
    points: Points = {}
    if n_points:
        with progress.task("placing images by t-SNE", 1) as advance:
            points = project(db, splits.label_names, n_bits=header.n_bits, n_points=n_points, seed=seed)
            advance(1)
    images = query.vectors is None
    return Evaluation(
        report,
        per_query=_per_query(q, splits.label_names, found.n_relevant, served, scores, limits),
        points=points,
        query_paths=query.paths if images else (),
        database_paths=database.paths if images else (),
    )


def random_head(name: str, n_features: int, n_bits: int, *, seed: int) -> nn.Module:
    """A freshly drawn head of the same kind: what training has to beat."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build_head(name, n_features=n_features, n_bits=n_bits).eval()


def overlaps(splits: Splits) -> dict[str, int]:
    """How many images two splits have in common: the same file, or a query that is a byte-for-byte copy.

    A copy has the size of what it copies, so only files of equal size are read.
    """
    files = {name: set(getattr(splits, name).paths) for name in ("query", "train", "database")}
    counts = {
        f"{one}_and_{other}": len(files[one] & files[other])
        for one, other in (("query", "train"), ("query", "database"), ("train", "database"))
    }
    if splits.query.vectors is None:
        of_size: dict[int, list[Path]] = {}
        for path in splits.query.paths:
            of_size.setdefault(_size(path), []).append(path)
        known: dict[int, set[bytes]] = {}
        for other in ("train", "database"):
            copies = 0
            for path in files[other] - files["query"]:
                size = _size(path)
                if size not in of_size:
                    continue
                if size not in known:
                    known[size] = {_content(query) for query in of_size[size]} - {b""}
                copies += _content(path) in known[size]
            counts[f"copies_of_queries_in_{other}"] = copies
    return counts


def rankings(
    checkpoint: Checkpoint,
    query: Split,
    database: Split,
    *,
    k: int,
    device: str = "auto",
    precision: str = "auto",
    progress: Progress | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(distances, rows) of the k nearest, (Q, k), in the order that search gives: equal distances by ascending row."""
    progress = progress or Progress(quiet=True)
    model = _Model(checkpoint, device=device, precision=precision)
    q, db = (model.encode(split, [model.head], progress, title)[0] for split, title in _titled(query, database))
    found = _ranker(model, db)(q.codes, k=k)
    return np.stack([row for row, _ in found]).astype(np.int64), np.stack([row for _, row in found]).astype(np.int64)


class _Model:
    """A checkpoint that encodes splits of images or of vectors."""

    def __init__(self, checkpoint: Checkpoint, *, device: str, precision: str) -> None:
        self.header = checkpoint.header
        self.encoder = None
        self.n_features = checkpoint.model.n_features
        if self.header.preprocessing is not None:
            self.encoder = Encoder(checkpoint, device=device, precision=precision)
        self.model = checkpoint.model.eval()

    @property
    def head(self) -> nn.Module:
        """The hash layer."""
        return self.model.head

    def encode(self, split: Split, heads: Sequence[nn.Module], progress: Progress, title: str) -> list[Part]:
        """Outputs and codes of a split, in its order, for each of several heads on one backbone."""
        if self.encoder is None:
            rows = self._of_vectors(split, heads)
        else:
            rows = self._of_images(self.encoder, split, heads, progress, title)
        parts = np.split(rows, len(heads), axis=1)
        return [Part(pack(part), part, split.labels, split.paths) for part in parts]

    def describe(self) -> dict[str, Any]:
        """For the certificate."""
        computed_in = "float32 on cpu"
        if self.encoder is not None:
            computed_in = f"{self.encoder.dtype} on {self.encoder.device}".removeprefix("torch.")
        preprocessing = self.header.preprocessing
        return {
            "backbone": self.header.backbone,
            "head": self.header.head,
            "preprocessing": "none (vectors)" if preprocessing is None else preprocessing.as_dict(),
            "computed_in": computed_in,
            "validation": self.header.scores,
        }

    def _of_images(
        self, encoder: Encoder, split: Split, heads: Sequence[nn.Module], progress: Progress, title: str
    ) -> NDArray[np.float32]:
        if split.vectors is not None:
            raise BadConfig("this checkpoint encodes images, but the data set has vectors: choose one with images")

        def encode(pixels: Pixels) -> NDArray[np.float32]:
            features = encoder.features(pixels)
            return np.concatenate([encoder.apply_head(features, head) for head in heads], axis=1)

        def load(path: Path) -> tuple[Path, Pixels]:
            return path, decode_for(read_bytes(path), encoder.preprocessing, name=str(path))[1]

        rows = []
        with progress.task(title, len(split)) as advance:
            for _, row in encoder.stream(split.paths, load, encode):
                if row is not None:
                    rows.append(row)
                    advance(1)
        return np.stack(rows)

    def _of_vectors(self, split: Split, heads: Sequence[nn.Module]) -> NDArray[np.float32]:
        width = n_inputs_of(self.header.backbone)
        if split.vectors is None or split.vectors.shape[1] != width:
            has = "images" if split.vectors is None else f"vectors of {split.vectors.shape[1]}"
            raise BadConfig(f"this checkpoint encodes vectors of {width} numbers, but the data set has {has}")
        with torch.inference_mode():
            features = self.model.features(torch.from_numpy(split.vectors)).float()
            outputs: NDArray[np.float32] = torch.cat([head(features) for head in heads], dim=1).numpy()
        return outputs


def usable(splits: Splits, data_name: str, progress: Progress) -> tuple[Split, Split, list[str]]:
    """Query and database without broken images, and the notes on what was left out."""
    if splits.query.vectors is not None:
        return splits.query, splits.database, [str(problem) for problem in splits.problems]
    query, query_problems = without_broken(splits.query, on_error=splits.on_error, source=f"{data_name} (query)")
    database, problems = without_broken(splits.database, on_error=splits.on_error, source=f"{data_name} (database)")
    every = [*splits.problems, *query_problems, *problems]
    progress.problems(every, [])
    return query, database, [str(problem) for problem in every]


def _titled(query: Split, database: Split) -> list[tuple[Split, str]]:
    return [(query, "encoding the queries"), (database, "encoding the database")]


def _untrained(checkpoint: Checkpoint) -> HashModel:
    training = {key: value for key, value in checkpoint.header.training.items() if key != "splits_sha256"}
    if not training:
        raise BadConfig("the checkpoint does not say how it was trained, so its untrained model cannot be rebuilt")
    with torch.random.fork_rng():
        model = initial_model(parse_config(training, source="the checkpoint's configuration")).eval()
    trained = checkpoint.model.backbone
    if isinstance(model.backbone, Mlp) and isinstance(trained, Mlp):
        model.backbone.standardize(trained.mean, trained.std)  # the input's statistics are not what training learns
    return model


def _measure(
    model: _Model,
    query: Part,
    database: Part,
    *,
    ns: Sequence[int],
    normalizer: Normalizer,
    seed: int,
    device: str,
) -> tuple[Histograms, _Served, Scores]:
    """Counts, the searcher's own order, and the scores of one model."""
    found = histograms(
        query.codes,
        database.codes,
        query.labels,
        database.labels,
        n_bits=model.header.n_bits,
        graded=True,
        device=device,
    )
    served = _serve(model, query, database, found.n_relevant, ns=ns, normalizer=normalizer)
    scores = score_all(found, query.labels, ns=ns, normalizer=normalizer, served=served.average_precision, seed=seed)
    return found, served, scores


def _ranker(model: _Model, database: Part) -> Callable[..., list[tuple[Distances, Ids]]]:
    """The searcher's ranking; a model of vectors has no encoder, and its codes are searched alone."""
    codes = InMemory(database.codes, n_bits=model.header.n_bits)
    return codes.search if model.encoder is None else Searcher(model.encoder, codes).rank


def _serve(
    model: _Model,
    query: Part,
    database: Part,
    n_relevant: NDArray[np.int64],
    *,
    ns: Sequence[int],
    normalizer: Normalizer,
) -> _Served:
    """Rank as the service does, by the searcher."""
    rank = _ranker(model, database)
    average_precision: list[list[NDArray[np.float64]]] = [[] for _ in ns]
    nearest = []
    k = min(max(*ns, N_NEAREST), len(database))
    at_once = max(1, PLACES_AT_ONCE // k)
    for start in range(0, len(query), at_once):
        chosen = slice(start, start + at_once)
        found = rank(query.codes[chosen], k=k)
        ids = np.stack([row for _, row in found])
        distances = np.stack([row for row, _ in found])
        relevant = relevance(ids, query.labels[chosen], database.labels)
        for made, n in zip(average_precision, ns, strict=True):
            made.append(
                average_precision_of_ranking(relevant[:, :n], n_relevant=n_relevant[chosen], normalizer=normalizer)
            )
        nearest.append((ids[:, :N_NEAREST], distances[:, :N_NEAREST]))
    return _Served(
        [np.concatenate(made) for made in average_precision],
        np.concatenate([ids for ids, _ in nearest]),
        np.concatenate([distances for _, distances in nearest]).astype(np.int64),
    )


def _per_query(
    query: Part,
    names: Sequence[str],
    n_relevant: NDArray[np.int64],
    served: _Served,
    scores: Scores,
    ns: Sequence[int],
) -> dict[str, list[Any]]:
    kept: dict[str, Figure] = {
        name: figure for name, figure in scores.per_query.items() if name.startswith(("AP", "precision", "nDCG"))
    }
    return query_columns(
        [path.name for path in query.paths],
        [[names[i] for i in np.flatnonzero(row).tolist()] for row in query.labels],
        n_relevant,
        served.distances[:, 0],
        kept,
        {f"AP@{n}": values for n, values in zip(ns, served.average_precision, strict=True)},
    )


def _digest(split: Split) -> str:
    """SHA-256 over names and labels in their order, wherever the files lie."""
    digest = hashlib.sha256()
    for path, labels in zip(split.paths, split.labels, strict=True):
        digest.update(path.name.encode(errors="surrogateescape") + b"\t" + labels.tobytes() + b"\n")
    return digest.hexdigest()


def _size(path: Path) -> int:
    member = find_member(path)
    try:
        return path.stat().st_size if member is None else member.size
    except OSError:
        return -1


def _content(path: Path) -> bytes:
    """SHA-256 of a file, or nothing for one that cannot be read, which was left out already."""
    try:
        return hashlib.sha256(read_bytes(path)).digest()
    except BadImage:
        return b""
