"""The functions of `import hashseek`. Each imports what it needs when it is called; paths may be str or Path."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack

if TYPE_CHECKING:
    from PIL.Image import Image

    from hashseek.indexing.catalog import StoredImage
    from hashseek.indexing.catalog.filters import Filter
    from hashseek.indexing.ingest.batch import IngestReport
    from hashseek.indexing.ingest.loading import LoadedImage
    from hashseek.indexing.ingest.sources import Found
    from hashseek.indexing.searcher import Hit, Rank, Searcher
    from hashseek.retrieval.checkpoint import Checkpoint
    from hashseek.retrieval.codes import Codes
    from hashseek.retrieval.devices import EncoderOptions
    from hashseek.retrieval.images import Pixels
    from hashseek.retrieval.label_files import OnError
    from hashseek.retrieval.vectors import Vectors
    from hashseek.training.evaluation.report.schema import EvaluationReport
    from hashseek.training.loop.fit import Result


class SearchKeywords(TypedDict, total=False):
    """Options of a search.

    k: number of results, default 10. max_distance: the largest Hamming distance of a result, in bits.
    min_precision: instead, the largest distance within which this share of the images is expected to be relevant; the
    collection needs a calibration. among: rank only images that match this filter, see `make_filter`.
    effort: for approximate indexes, how thoroughly to search. rank: how hits are ordered, "hamming", "asymmetric" or
    "float"; default "asymmetric" for an image, "hamming" for a stored one. oversample: "asymmetric" and "float" reorder
    the `oversample` x k nearest images by Hamming distance, default 10.
    """

    k: int
    max_distance: int | None
    min_precision: float | None
    among: "Filter | None"
    effort: int | None
    rank: "Rank | None"
    oversample: int


class ImageCollection:
    """A collection of images and the network that encodes them, made by `open_collection`.

    Safe to use from several threads. Close it after use, or use it in a `with` statement.

    Attributes:
        searcher: does the work; its `collection` and `encoder` offer further methods.
        report: how many images `create_collection` added and skipped; otherwise None.
    """

    def __init__(self, searcher: "Searcher", report: "IngestReport | None" = None) -> None:
        self.searcher, self.report = searcher, report

    def __repr__(self) -> str:
        return f"<ImageCollection: {self.searcher.collection.place}>"

    def __len__(self) -> int:
        return len(self.searcher.collection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the collection's files."""
        self.searcher.collection.close()

    def add(
        self, *sources: str | Path, labels: Sequence[str] = (), on_error: Literal["skip", "stop"] = "skip"
    ) -> "IngestReport":
        """Add images. Images that are already stored are not added again.

        Args:
            sources: anything that `hashseek index add` accepts: images, folders, patterns, label files, tars, URLs.
            labels: added to every image, in addition to the labels in label files.
            on_error: "skip" unusable images, or "stop" at the first one.

        Returns:
            How many images were added, updated, already known and skipped; `problems` has the reasons.

        Raises:
            BadImage: an image is unusable, and `on_error` is "stop". Images added before it are kept.
        """
        from hashseek.indexing.catalog.records import check_labels
        from hashseek.indexing.ingest.sources import describe, find_sources

        check_labels(labels)
        return self._add(describe(find_sources(sources), labels=labels), on_error)

    def _add(self, images: "Iterable[Found | LoadedImage]", on_error: "OnError") -> "IngestReport":
        from hashseek.indexing.ingest.batch import IngestReport, ingest

        report, problems = IngestReport(), []
        for report in ingest(self.searcher.collection, self.searcher.image_encoder, images, on_error=on_error):
            problems += report.problems
        report.problems = problems
        self.searcher.collection.save_index()
        return report

    def remove(self, *ids: int) -> None:
        """Remove images by id: all of them, or none if one is unknown.

        Raises:
            UnknownImage: there is no such image.
        """
        self.searcher.collection.remove([int(one) for one in ids])  # ids of results may be NumPy integers
        self.searcher.collection.save_index()

    def get(self, image_id: int) -> "StoredImage":
        """The record of an image: path, labels, key, attributes, size.

        Raises:
            UnknownImage: there is no such image.
        """
        return self.searcher.collection.one(int(image_id))

    def search(self, image: "str | Path | bytes | Image", **options: Unpack[SearchKeywords]) -> tuple["Hit", ...]:
        """The stored images most similar to `image`, best first, ties by ascending id.

        Args:
            image: a path, the bytes of an image file, or a Pillow image.
            options: see `SearchKeywords`.

        Raises:
            BadImage: the image cannot be read.
            BadConfig: an option is outside its limits.
        """
        from hashseek.indexing.searcher import SearchOptions
        from hashseek.retrieval.images import as_decoded, read_bytes

        chosen = SearchOptions(**options)
        if isinstance(image, bytes):
            return self.searcher.search_files([image], chosen).hits
        if isinstance(image, str | Path):
            return self.searcher.search_files([read_bytes(Path(image))], chosen, name=str(image)).hits
        return self.searcher.search(as_decoded(image), chosen).hits

    def add_vectors(
        self,
        vectors: "Vectors | Sequence[Sequence[float]]",
        ids: Sequence[str],
        *,
        labels: Sequence[Sequence[str]] | None = None,
        attributes: Sequence[Mapping[str, Any]] | None = None,
    ) -> "IngestReport":
        """Add vectors computed by another program to a collection of vectors (see `create_vector_collection`).

        Args:
            vectors: numbers (N, D): an array, a tensor or lists.
            ids: a name for each, which becomes its key; a vector stored under the same name is replaced.
            labels, attributes: one entry for each vector, if given.

        Returns:
            How many were added, updated and already known.

        Raises:
            BadDataset: a row cannot be stored; none were.
            BadCheckpoint: the collection holds images.
        """
        from hashseek.indexing.vectors import check, make_entries, store

        encoder, vectors = self.searcher.vector_encoder, _as_array(vectors)
        entries = make_entries(ids, labels, attributes)
        check(vectors, entries, header=encoder.header)
        *_, report = store(self.searcher.collection, encoder, vectors, entries)
        self.searcher.collection.save_index()
        return report

    def search_vector(
        self, vector: "Vectors | Sequence[float]", **options: Unpack[SearchKeywords]
    ) -> tuple["Hit", ...]:
        """The stored vectors most similar to `vector` (D,). Otherwise like `search`.

        Raises:
            BadDataset: the vector has a different width, or is not finite.
            BadCheckpoint: the collection holds images.
        """
        from hashseek.indexing.searcher import SearchOptions

        [answer] = self.searcher.search_vectors(_as_array(vector)[None], SearchOptions(**options))
        return answer.hits

    def similar(self, image_id: int, **options: Unpack[SearchKeywords]) -> tuple["Hit", ...]:
        """The stored images most similar to a stored one, which is among them. Otherwise like `search`.

        Raises:
            UnknownImage: there is no such image.
        """
        from hashseek.indexing.searcher import SearchOptions

        return self.searcher.similar(int(image_id), SearchOptions(**options)).hits


def open_collection(
    folder: str | Path,
    *,
    checkpoint: str | Path | None = None,
    keep_features: bool = False,
    read_only: bool = False,
    **options: "Unpack[EncoderOptions]",
) -> ImageCollection:
    """Open the collection in `folder`, or create it for the codes of `checkpoint`.

    `create_collection` creates one without a checkpoint.

    Args:
        folder: the folder of the collection, or its URI in Milvus, `milvus://HOST:19530/NAME`.
        checkpoint: needed to create a collection. A collection in a folder keeps its own copy.
        keep_features: also store features in a new collection, for `rank="float"`.
        read_only: refuse changes; the folder does not have to be writable.
        options: `device` ("auto", "cpu", "cuda" or "cuda:N"), `precision` ("auto", "fp32" or "bf16") and `engine`
            ("auto", "torch" or "openvino").

    Raises:
        BadCollection: there is no collection, and no checkpoint to create one for.
        ForeignCodes: the collection was made with another checkpoint.
    """
    from hashseek.indexing.collection import CATALOG, Collection, delete_if_unused
    from hashseek.indexing.opening import open_store
    from hashseek.indexing.searcher import Searcher

    path = None if checkpoint is None else Path(checkpoint)
    is_new = not Path(folder, CATALOG).is_file()
    collection = open_store(
        Path(folder), checkpoint=path, read_only=read_only, create=not read_only, keep_features=keep_features
    )
    try:
        return ImageCollection(Searcher.open(collection, checkpoint=path, **options))
    except BaseException:
        if is_new and isinstance(collection, Collection):  # otherwise it would stay bound to the checkpoint
            delete_if_unused(collection)
        collection.close()
        raise


def create_collection(
    folder: str | Path,
    *sources: str | Path,
    labels: Sequence[str] = (),
    on_error: Literal["skip", "stop"] = "skip",
    n_bits: int = 128,
    backbone: str | None = None,
    weights: str | Path = "default",
    preprocessing: Mapping[str, Any] | None = None,
    keep_features: bool = False,
    **options: "Unpack[EncoderOptions]",
) -> ImageCollection:
    """Create a collection of images without a checkpoint, by fitting a hash layer to them without labels.

    The features are those of a pretrained network; at most 20,000 of the images are used for the fit.

    Args:
        folder: a new or an empty one.
        sources, labels, on_error: see `ImageCollection.add`.
        n_bits: length of the codes.
        backbone: a torchvision network, or timm:NAME; default: mobilenet_v3_large.
        weights: a weights file; default: the pretrained weights, which are downloaded once.
        preprocessing: how the file's weights differ from the pretrained ones, such as {"mean": (0.5, 0.5, 0.5)}; the
            fields are those of `Preprocessing`.
        keep_features: also store the features, for `rank="float"`.
        options: see `open_collection`.

    Returns:
        The collection; its `report` counts what was added.

    Raises:
        BadCollection: the folder is not empty.
        BadDataset: no two images differ.
        BadCheckpoint: the weights cannot be downloaded, or do not fit.
        BadImage: an image is unusable, and `on_error` is "stop".
    """
    from hashseek.indexing.catalog.records import check_labels
    from hashseek.indexing.collection import Collection
    from hashseek.indexing.fit_options import FitOptions
    from hashseek.indexing.fitting import fit_to_sources, plan_collection
    from hashseek.indexing.ingest.sources import describe, find_sources
    from hashseek.indexing.opening import open_for_adding
    from hashseek.indexing.searcher import Searcher

    def found() -> "Iterator[Found]":
        return describe(find_sources(sources), labels=labels)

    check_labels(labels)
    plan = plan_collection(Path(folder), FitOptions(n_bits, backbone, str(weights), preprocessing or {}), found())
    first = fit_to_sources(found(), *plan, on_error=on_error, **options)
    place, encoder = Path(folder), first.encoder
    with (
        first.checkpoint() as checkpoint,
        open_for_adding(place, checkpoint=checkpoint, keep_features=keep_features) as collection,
    ):
        report = ImageCollection(Searcher(encoder, collection))._add(first.reuse(found()), on_error)
    return ImageCollection(Searcher(encoder, Collection(place)), report)


def create_vector_collection(
    folder: str | Path,
    vectors: "Vectors | Sequence[Sequence[float]]",
    ids: Sequence[str],
    *,
    labels: Sequence[Sequence[str]] | None = None,
    attributes: Sequence[Mapping[str, Any]] | None = None,
    n_bits: int = 128,
    keep_features: bool = False,
) -> ImageCollection:
    """Create a collection of vectors computed by another program, by fitting a hash layer to them.

    Args:
        folder: a new or an empty one.
        vectors, ids, labels, attributes: see `ImageCollection.add_vectors`.
        n_bits: length of the codes.
        keep_features: also store the vectors as float16, for `rank="float"`.

    Returns:
        The collection; its `report` counts what was added.

    Raises:
        BadCollection: the folder is not empty.
        BadDataset: a row cannot be stored, or no two vectors differ.
    """
    from hashseek.indexing.collection import Collection, check_place
    from hashseek.indexing.opening import open_for_adding
    from hashseek.indexing.searcher import Searcher
    from hashseek.indexing.vectors import check, fitted_checkpoint, make_entries

    vectors = _as_array(vectors)
    check_place(Path(folder))
    check(vectors, make_entries(ids, labels, attributes))
    with (
        fitted_checkpoint(vectors, n_bits) as (checkpoint, _),
        open_for_adding(Path(folder), checkpoint=checkpoint, keep_features=keep_features) as collection,
    ):
        searcher = Searcher.open(collection)
        report = ImageCollection(searcher).add_vectors(vectors, ids, labels=labels, attributes=attributes)
    return ImageCollection(Searcher(searcher.encoder, Collection(Path(folder))), report)


def load_checkpoint(path: str | Path) -> "Checkpoint":
    """Load a checkpoint: its `model`, a torch module, and its `header` with code length, preprocessing and labels.

    Raises:
        BadCheckpoint: it is missing, not a checkpoint, or damaged.
    """
    from hashseek.retrieval import checkpoint

    return checkpoint.load_checkpoint(Path(path))


def encode(
    images: Iterable["str | Path | bytes | Image"],
    checkpoint: "str | Path | Checkpoint",
    **options: "Unpack[EncoderOptions]",
) -> "Codes":
    """Packed codes (B, code_size) of images, uint8: bit j of a code is bit j % 8 of byte j // 8.

    Args:
        images: paths, bytes of image files, or Pillow images.
        checkpoint: its path, or the result of `load_checkpoint`.
        options: see `open_collection`.

    Raises:
        BadImage: an image cannot be read.
        BadCheckpoint: the checkpoint cannot be loaded, or does not encode images.
    """
    import numpy as np

    from hashseek.retrieval.codes import code_size
    from hashseek.retrieval.encoder import Encoder
    from hashseek.retrieval.errors import BadConfig
    from hashseek.retrieval.images import as_decoded, load_file, preprocess, read_bytes

    if isinstance(images, str | bytes | Path):
        raise BadConfig(f"encode expects a list of images: write [{images!r:.60}] for one")
    loaded = load_checkpoint(checkpoint) if isinstance(checkpoint, str | Path) else checkpoint
    encoder = Encoder(loaded, **options)

    def load(image: "str | Path | bytes | Image") -> tuple[None, "Pixels"]:
        if isinstance(image, str | Path):
            return None, load_file(read_bytes(Path(image)), encoder.preprocessing, name=str(image)).pixels
        if isinstance(image, bytes):
            return None, load_file(image, encoder.preprocessing).pixels
        return None, preprocess(as_decoded(image), encoder.preprocessing)

    codes = [code for _, code in encoder.stream(images, load, encoder.encode_pixels) if code is not None]
    return np.stack(codes) if codes else np.zeros((0, code_size(encoder.n_bits)), np.uint8)


def train(
    config: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    out: str | Path,
    resume: bool = False,
    quiet: bool = True,
) -> "Result":
    """Train a model. `result.run.best` is the path of the best checkpoint, `result.best_score` its validation mAP.

    Args:
        config: a TOML file, the name of a shipped configuration, or its sections as a dictionary.
        overrides: settings such as "model.n_bits=24" that replace those of `config`.
        out: the run folder.
        resume: continue the run in this folder.
        quiet: False prints a line per epoch to standard error.

    Raises:
        HashseekError: a bad configuration, bad data, or a run folder that is not empty.
    """
    from hashseek.training.config import load_config
    from hashseek.training.loop.fit import fit

    source = config if isinstance(config, Mapping) else Path(config)
    return fit(load_config(source, overrides), out=Path(out), resume=resume, quiet=quiet)


def evaluate(
    checkpoint: str | Path,
    *,
    data: str | Path | None = None,
    ns: Iterable[int | Literal["all"]] = (10, 100, 1000, 5000),
    out: str | Path | None = None,
    device: str = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
) -> "EvaluationReport":
    """Measure how well a checkpoint retrieves. `report.main.mean_average_precision.expected` is the headline.

    Args:
        checkpoint: its path.
        data: a folder with labels.csv, the name of a data set, or a TOML file; default: the data it was trained on.
        ns: the values of N for mAP@N and the other metrics; "all" is the size of the database.
        out: the folder to write the report to, with its page and tables.
        device, precision: see `open_collection`.

    Raises:
        HashseekError: a bad checkpoint, bad data, or a value outside its limits.
    """
    from hashseek.training.cli.evaluate import data_options, name_in_report, parse_ns
    from hashseek.training.data.datasets import build_splits
    from hashseek.training.evaluation import evaluate
    from hashseek.training.evaluation.assembly import EvaluationOptions

    path, chosen = Path(checkpoint), None if data is None else str(data)
    name, options = data_options(path, chosen)
    evaluation = evaluate.evaluate(
        path,
        build_splits(name, **options),
        EvaluationOptions(
            name_in_report(chosen, name, options),
            ns=parse_ns([str(n) for n in ns]),
            device=device,
            precision=precision,
            data_set=name,
            as_trained=data is None,
        ),
        n_points=1000 if out is not None else 0,
    )
    if out is not None:
        evaluation.write(Path(out))  # creates the folder
    return evaluation.report


def _as_array(vectors: "Vectors | Sequence[Any]") -> "Vectors":
    import numpy as np

    from hashseek.retrieval.errors import BadDataset

    try:
        return np.asarray(vectors)
    except ValueError:
        raise BadDataset("the vectors have different lengths: all rows must have the same length") from None
