"""Checks stored codes: encodes some images again and compares the bits (`index verify --codes`)."""

from dataclasses import dataclass

import numpy as np

from hashseek.indexing.catalog import Finding, FindingKind, StoredImage
from hashseek.indexing.collection import Collection
from hashseek.indexing.ingest.uris import is_there
from hashseek.indexing.maintenance.reencode import read_image
from hashseek.retrieval.codes import unpack
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadConfig, BadImage, ForeignCodes
from hashseek.retrieval.images import Pixels

# Larger shares of bits than engines and precisions change (docs/benchmarks.md: between float32 and bf16 1.4 % in all,
# and 7 of 48 in one code): in a sample of at least MIN_IMAGES, and in the code of one image.
MAX_SHARE, MAX_SHARE_OF_IMAGE, MIN_IMAGES = 0.05, 0.3, 10
_BATCH = 256
_N_NAMED = 5  # images that a message names


@dataclass(frozen=True)
class Compared:
    """Stored codes of one engine compared with new ones.

    Args:
        engine: that computed the stored codes.
        n_images: compared.
        n_bits: of a code.
        n_differ: bits that differ, in all images.
        most: bits that differ in the image where most do.
    """

    engine: str
    n_images: int
    n_bits: int
    n_differ: int
    most: int

    @property
    def share(self) -> float:
        """Share of the bits that differ."""
        return self.n_differ / (self.n_images * self.n_bits)

    def __str__(self) -> str:
        return (
            f"{self.n_images} codes by {self.engine or 'an engine that is not recorded'}: {100 * self.share:.3f} % of "
            f"bits differ, in one image at most {self.most} of {self.n_bits}"
        )


@dataclass(frozen=True)
class Recheck:
    """The result of `recheck`.

    Args:
        engine: that computed the new codes.
        compared: one for each engine that computed stored codes, by name.
        findings: images whose codes cannot be checked, and codes that no difference between engines explains.
        n_missing: images whose file does not exist; `Collection.verify` names them.
    """

    engine: str
    compared: tuple[Compared, ...]
    findings: tuple[Finding, ...]
    n_missing: int

    @property
    def n_images(self) -> int:
        """How many images were encoded again."""
        return sum(part.n_images for part in self.compared)


def recheck(collection: Collection, encoder: Encoder, n: int, seed: int = 0) -> Recheck:
    """Encode `n` random images of `collection` again (or all, if it has fewer) and compare their codes.

    Args:
        collection: may be open read-only.
        encoder: of its checkpoint, with any engine.
        n: at least 1.
        seed: of the random choice.

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
    ids = collection.catalog.all_codes().ids
    chosen = np.sort(np.random.default_rng(seed).choice(ids, min(n, len(ids)), replace=False)).tolist()
    findings: list[Finding] = []
    n_missing = 0
    bits_by_engine: dict[str, dict[int, int]] = {}

    def load(image: StoredImage) -> tuple[tuple[StoredImage, str | None], Pixels | None]:
        if not is_there(collection.uri_of(image)):
            return (image, None), None
        try:
            return (image, ""), read_image(collection, encoder, image)
        except BadImage as error:
            return (image, str(error)), None

    for start in range(0, len(chosen), _BATCH):
        page = [image for image in collection.catalog.get(chosen[start : start + _BATCH]) if image is not None]
        stored = collection.catalog.spaces.codes_of([image.id for image in page])
        for (image, problem), code in encoder.encode_stream(page, load):
            if code is not None and image.id in stored:
                old, engine = stored[image.id]
                differ = int((unpack(code[None], encoder.n_bits) != unpack(old[None], encoder.n_bits)).sum())
                bits_by_engine.setdefault(engine, {})[image.id] = differ
            elif problem is None:
                n_missing += 1
            elif problem:
                message = f"the code of image {image.id} cannot be checked: {problem}"
                findings.append(Finding(FindingKind.WRONG_CODE, message, image.id))
    compared = []
    for engine, differing in sorted(bits_by_engine.items()):
        counts = np.array(list(differing.values()))
        part = Compared(engine, len(counts), encoder.n_bits, int(counts.sum()), int(counts.max()))
        compared.append(part)
        wrong_ids = [i for i, count in differing.items() if count > MAX_SHARE_OF_IMAGE * encoder.n_bits]
        findings += _unexplained(part, wrong_ids, encoder.engine)
    return Recheck(encoder.engine, tuple(compared), tuple(findings), n_missing)


def _unexplained(part: Compared, wrong_ids: list[int], engine: str) -> list[Finding]:
    """Codes that no difference between engines explains."""
    remedy = "remove these images and add them again"
    if part.share > MAX_SHARE and part.n_images >= MIN_IMAGES:
        message = f"{part} from {engine}, more than the {100 * MAX_SHARE:g} % that engines explain: {remedy}"
        return [Finding(FindingKind.WRONG_CODE, message)]
    if wrong_ids:
        named = ", ".join(map(str, wrong_ids[:_N_NAMED])) + (", ..." if len(wrong_ids) > _N_NAMED else "")
        message = f"the codes of {len(wrong_ids)} images do not belong to their content (ids {named}): {remedy}"
        return [Finding(FindingKind.WRONG_CODE, message)]
    return []
