"""Whether stored codes are those that the images have: some are encoded again, and the bits compared."""

import hashlib
from dataclasses import dataclass

import numpy as np

from hashseek.indexing.catalog.records import StoredImage
from hashseek.indexing.collection import Collection
from hashseek.indexing.ingest.uris import is_there, open_uri
from hashseek.retrieval.codes import unpack
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadConfig, BadImage, ForeignCodes
from hashseek.retrieval.images import Pixels, decode_for

# Bit shares that engines and precisions do not reach (docs/benchmarks.md: 1.4 % and 7 of 48 between float32 and bf16):
# of a sample of at least MIN_IMAGES, since a few may be the unlucky ones, and of the code of one image.
MAX_SHARE, MAX_SHARE_OF_IMAGE, MIN_IMAGES = 0.05, 0.3, 10
_BATCH = 256
_N_NAMED = 5  # images that a message names


@dataclass(frozen=True)
class Compared:
    """Stored codes of one engine beside those of now: images, bits that differ in all, and in the worst image."""

    engine: str
    n_images: int
    n_bits: int
    n_differ: int
    most: int

    @property
    def share(self) -> float:
        """Of the bits, those that differ."""
        return self.n_differ / (self.n_images * self.n_bits)

    def __str__(self) -> str:
        return (
            f"{self.n_images} codes by {self.engine or 'an engine that is not recorded'}: {100 * self.share:.3f} % of "
            f"bits differ, in one image at most {self.most} of {self.n_bits}"
        )


@dataclass(frozen=True)
class Recheck:
    """What encoding again has shown.

    Args:
        engine: what encoded this time.
        compared: one for each engine that made stored codes, by name.
        problems: sentences on what is wrong.
        n_gone: images whose file is not there; `Collection.verify` names them.
    """

    engine: str
    compared: tuple[Compared, ...]
    problems: tuple[str, ...]
    n_gone: int

    @property
    def n_images(self) -> int:
        """How many were encoded again."""
        return sum(part.n_images for part in self.compared)


def recheck(collection: Collection, encoder: Encoder, n: int, seed: int = 0) -> Recheck:
    """Encode `n` random images of `collection` (or all, if it has fewer) again and compare their codes.

    Args:
        collection: may be open for reading only.
        encoder: of its checkpoint, by any engine.
        n: at least 1.
        seed: of the choice.

    Raises:
        BadConfig: n < 1.
        ForeignCodes: the encoder is of another checkpoint.
    """
    if n < 1:
        raise BadConfig(f"the number of images to encode again must be at least 1, not {n}")
    if encoder.fingerprint != collection.fingerprint:
        raise ForeignCodes(
            f"codes of checkpoint {collection.fingerprint[:12]} cannot be checked with {encoder.fingerprint[:12]}: "
            "use the collection's own checkpoint"
        )
    ids = collection.catalog.changes(after_id=0, after_generation=-1).ids
    chosen = np.sort(np.random.default_rng(seed).choice(ids, min(n, len(ids)), replace=False)).tolist()
    problems: list[str] = []
    n_gone = 0
    bits_by_engine: dict[str, dict[int, int]] = {}

    def load(image: StoredImage) -> tuple[tuple[StoredImage, str | None], Pixels | None]:
        uri = str(collection.file_of(image)) if collection.owns(image) else image.path
        if not is_there(uri):
            return (image, None), None
        try:
            data = open_uri(uri)
            if hashlib.sha256(data).hexdigest() != image.sha256:
                return (image, "its file has another content than when it was added: add it again"), None
            return (image, ""), decode_for(data, encoder.preprocessing, name=image.path)[1]
        except BadImage as error:
            return (image, str(error)), None

    for start in range(0, len(chosen), _BATCH):
        page = [image for image in collection.catalog.get(chosen[start : start + _BATCH]) if image is not None]
        stored = collection.catalog.codes_of([image.id for image in page])
        for (image, problem), code in encoder.encode_stream(page, load):
            if code is not None and image.id in stored:
                old, engine = stored[image.id]
                differ = int((unpack(code[None], encoder.n_bits) != unpack(old[None], encoder.n_bits)).sum())
                bits_by_engine.setdefault(engine, {})[image.id] = differ
            elif problem is None:
                n_gone += 1
            elif problem:
                problems.append(f"the code of image {image.id} cannot be checked: {problem}")
    compared = []
    for engine, differing in sorted(bits_by_engine.items()):
        counts = np.array(list(differing.values()))
        part = Compared(engine, len(counts), encoder.n_bits, int(counts.sum()), int(counts.max()))
        compared.append(part)
        foreign = [i for i, count in differing.items() if count > MAX_SHARE_OF_IMAGE * encoder.n_bits]
        problems += _problems(part, foreign, encoder.engine)
    return Recheck(encoder.engine, tuple(compared), tuple(problems), n_gone)


def _problems(part: Compared, foreign: list[int], now: str) -> list[str]:
    """Sentences on what no difference of engines explains."""
    remedy = "remove these images and add them again"
    if part.share > MAX_SHARE and part.n_images >= MIN_IMAGES:
        return [f"{part} from {now}, more than the {100 * MAX_SHARE:g} % that engines explain: {remedy}"]
    if foreign:
        named = ", ".join(map(str, foreign[:_N_NAMED])) + (", ..." if len(foreign) > _N_NAMED else "")
        return [f"the codes of {len(foreign)} images are not those of their content (ids {named}): {remedy}"]
    return []
