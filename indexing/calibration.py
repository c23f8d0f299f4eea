"""What a Hamming distance is worth in a collection: learnt from labelled images, and kept with its codes.

A calibration says how likely a hit at each distance is relevant, that is, shares a label with the query. It holds for
queries like those it was made with, in a collection whose share of relevant images stays about what it was.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hashseek.indexing.catalog import Catalog
from hashseek.indexing.catalog.database import now
from hashseek.indexing.catalog.filters import Filter
from hashseek.indexing.collection import Collection
from hashseek.retrieval.errors import BadCodes, BadConfig, ForeignCodes
from hashseek.retrieval.metrics import Calibration, calibrate, histograms, without_self

N_QUERIES = 2000
# Labels are held as a matrix of bytes, images by labels.
_MOST_BYTES = 2**31


@dataclass(frozen=True)
class Stored:
    """A calibration as it is kept with a code space: what it was made from, and when."""

    calibration: Calibration
    source: str
    labels: tuple[str, ...]
    n_images: int
    made_at: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"calibration": self.calibration.as_dict(), "labels": list(self.labels)}


def calibrate_collection(
    collection: Collection, *, labels: Sequence[str] = (), n_queries: int = N_QUERIES, seed: int = 0
) -> Stored:
    """Learn from the collection's own labelled images, each left out of its own ranking, and keep what was learnt.

    Images without any of the labels are not looked at: whether they are relevant is not known.

    Args:
        collection: with images of which some carry labels.
        labels: that decide relevance; none: all that occur.
        n_queries: so many of the labelled images, drawn with `seed`, are queries; all of them are ranked.

    Raises:
        BadConfig: an unknown label, too few labelled images, or n_queries < 1.
    """
    if n_queries < 1:
        raise BadConfig(f"a calibration needs at least 1 query, not {n_queries}")
    catalog = collection.catalog
    known = catalog.label_counts()
    if unknown := [label for label in labels if label not in known]:
        raise BadConfig(f"no image of the collection has the label {', '.join(unknown)}: correct --labels")
    names = tuple(dict.fromkeys(labels)) or tuple(known)
    stored = catalog.changes(after_id=0, after_generation=-1)
    if len(stored.ids) * len(names) > _MOST_BYTES:
        raise BadConfig(
            f"{len(names)} labels of {len(stored.ids)} images are too many to hold at once: name those that decide "
            "relevance with --labels"
        )
    order = np.argsort(stored.ids)
    ids, codes = stored.ids[order], stored.codes[order]
    matrix = np.zeros((len(ids), len(names)), np.uint8)
    for column, name in enumerate(names):
        matrix[np.isin(ids, catalog.ids_where(Filter(any_labels=(name,))), assume_unique=True), column] = 1
    labelled = np.flatnonzero(matrix.any(axis=1))
    if len(labelled) < 2:
        raise BadConfig(
            f"{len(labelled)} images of the collection carry {'one of these labels' if labels else 'a label'}, and a "
            "calibration compares at least 2: add images with labels, or use `hashseek evaluate --calibrate`"
        )
    codes, matrix = codes[labelled], matrix[labelled]
    drawn = np.sort(np.random.default_rng((seed, 0xCA1)).permutation(len(labelled))[:n_queries])
    found = histograms(codes[drawn], codes, matrix[drawn], matrix, n_bits=collection.n_bits)
    made = calibrate(without_self(found, matrix[drawn]))
    return store_calibration(catalog, made, source="its own labelled images", labels=names, n_images=len(labelled))


def store_calibration(
    catalog: Catalog, calibration: Calibration, *, source: str, labels: Sequence[str], n_images: int
) -> Stored:
    """Keep a calibration with the codes that the catalog was opened on; it replaces an earlier one."""
    if calibration.n_bits != catalog.n_bits:
        raise BadCodes(f"a calibration of {calibration.n_bits}-bit codes does not fit codes of {catalog.n_bits} bits")
    stored = Stored(calibration, source, tuple(labels), n_images, now())
    catalog.spaces.set_calibration(stored.as_dict())
    return stored


def stored_calibration(catalog: Catalog) -> Stored | None:
    """What was kept with the codes that the catalog was opened on; None if nothing.

    Raises:
        BadCodes: it is of a newer version, or no calibration.
    """
    kept = catalog.spaces.calibration()
    if kept is None:
        return None
    try:
        content = dict(kept)
        calibration = Calibration.from_dict(dict(content.pop("calibration")))
        return Stored(calibration, **{**content, "labels": tuple(content["labels"])})
    except (TypeError, KeyError, ValueError) as error:
        raise BadCodes(f"what is kept as calibration is none ({error}): calibrate again") from None


def radius_for(stored: Stored | None, precision: float) -> int:
    """The largest radius at which at least `precision` is expected.

    Raises:
        BadConfig: there is no calibration, no radius gives so much, or `precision` is not between 0 and 1.
    """
    if stored is None:
        raise BadConfig(
            "this collection has no calibration, so that no radius is known to give a precision: run `hashseek index "
            "calibrate` on it, or set a distance (max_distance, --max-distance) instead"
        )
    radius = stored.calibration.radius(precision)
    if radius is None:
        within = stored.calibration.within_radius
        best = int(np.argmax(within))
        raise BadConfig(
            f"no radius is expected to give a precision of {precision}: the best is {within[best]:.3f}, within {best} "
            "bits; ask for less, or set a distance (max_distance, --max-distance) instead"
        )
    return radius


def check_same_codes(catalog: Catalog, fingerprint: str) -> None:
    """Raise `ForeignCodes` unless the catalog's codes are of the checkpoint with this fingerprint."""
    if catalog.fingerprint != fingerprint:
        raise ForeignCodes(
            f"the collection {catalog.path.parent} has codes of checkpoint {catalog.fingerprint[:12]}, this one is "
            f"{fingerprint[:12]}: calibrate it with its own checkpoint"
        )
