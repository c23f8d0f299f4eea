"""Calibrations: the probability that a hit at each Hamming distance is relevant (shares a label with the query).

`hashseek index calibrate` and `hashseek evaluate --calibrate` compute one from labelled images and store it with the
codes; searches by precision use it. It is valid for queries like those it was computed with, as long as the share of
relevant images in the collection stays about the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from hashseek.indexing.catalog import Catalog
from hashseek.indexing.catalog.database import now
from hashseek.indexing.catalog.filters import Filter
from hashseek.indexing.collection import Collection
from hashseek.indexing.opening import Store
from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.retrieval.metrics import Calibration, calibrate, histograms, without_self

N_QUERIES = 2000
_MAX_LABEL_BYTES = 2**31  # of the matrix of images x labels


@dataclass(frozen=True)
class StoredCalibration:
    """A calibration as it is stored with a code space, and how and when it was computed."""

    calibration: Calibration
    source: str
    labels: tuple[str, ...]
    n_images: int
    made_at: str


def calibrate_collection(
    collection: Collection, *, labels: Sequence[str] = (), n_queries: int = N_QUERIES, seed: int = 0
) -> StoredCalibration:
    """Compute a calibration from the collection's labelled images and store it.

    Each query image is left out of its own ranking. Images with none of the labels are left out altogether, because
    their relevance is unknown.

    Args:
        collection: some of its images must have labels.
        labels: the labels that decide relevance; empty: all labels.
        n_queries: how many labelled images are queries, at least 1, drawn with `seed`; all labelled images are ranked.
        seed: the seed of the random choice.

    Raises:
        BadConfig: an unknown label, too few labelled images, a label that all of them have, or too many labels.
    """
    catalog = collection.catalog
    known = catalog.label_counts()
    if unknown := [label for label in labels if label not in known]:
        raise BadConfig(f"no image of the collection has the label {', '.join(unknown)}: correct --labels")
    names = tuple(dict.fromkeys(labels)) or tuple(known)
    stored = catalog.all_codes()
    if len(stored.ids) * len(names) > _MAX_LABEL_BYTES:
        raise BadConfig(
            f"{len(names)} labels of {len(stored.ids)} images do not fit in memory: name the labels that decide "
            "relevance with --labels"
        )
    ids = stored.ids
    matrix = np.zeros((len(ids), len(names)), np.uint8)
    for column, name in enumerate(names):
        matrix[np.isin(ids, catalog.ids_where(Filter(any_labels=(name,))), assume_unique=True), column] = 1
    labelled = np.flatnonzero(matrix.any(axis=1))
    if len(labelled) < 2:
        raise BadConfig(
            f"{len(labelled)} images of the collection have {'one of these labels' if labels else 'a label'}, and a "
            "calibration needs at least 2: add images with labels, or use `hashseek evaluate --calibrate`"
        )
    codes, matrix = stored.codes[labelled], matrix[labelled]
    if len(common := np.flatnonzero(matrix.all(axis=0))):
        raise BadConfig(
            f"all {len(labelled)} images with one of these labels have the label {names[common[0]]!r:.80}, so every "
            "hit would be relevant: name labels that tell the images apart (--labels)"
        )
    queries = np.sort(np.random.default_rng((seed, 0xCA1)).permutation(len(labelled))[:n_queries])
    found = histograms(codes[queries], codes, matrix[queries], matrix, n_bits=collection.n_bits)
    calibration = calibrate(without_self(found, matrix[queries]))
    return store_calibration(
        catalog, calibration, source="its own labelled images", labels=names, n_images=len(labelled)
    )


def store_calibration(
    catalog: Catalog, calibration: Calibration, *, source: str, labels: Sequence[str], n_images: int
) -> StoredCalibration:
    """Store a calibration of the codes that the catalog was opened on, in place of an earlier one."""
    stored = StoredCalibration(calibration, source, tuple(labels), n_images, now())
    catalog.spaces.set_calibration(asdict(stored))
    return stored


def stored_calibration(store: Store) -> StoredCalibration | None:
    """The calibration of the codes in a store; None if there is none.

    Raises:
        BadCodes: it is damaged, or was written by a newer Hashseek.
    """
    content = store.calibration()
    if content is None:
        return None
    try:
        values = dict(content)
        calibration = Calibration.from_dict(dict(values.pop("calibration")))
        return StoredCalibration(calibration, **{**values, "labels": tuple(values["labels"])})
    except (TypeError, KeyError, ValueError) as error:
        raise BadCodes(f"the stored calibration is damaged ({error}): run `hashseek index calibrate` again") from None


def radius_for(stored: StoredCalibration | None, precision: float) -> int:
    """The largest radius (bits) within which at least the share `precision` is expected to be relevant.

    Raises:
        BadConfig: there is no calibration, no radius reaches the precision, or it is not between 0 and 1.
    """
    if stored is None:
        raise BadConfig(
            "this collection has no calibration, which a search by precision needs: limit the distance instead "
            "(--max-distance, max_distance), or run `hashseek index calibrate` if the collection is in a folder"
        )
    radius = stored.calibration.radius(precision)
    if radius is None:
        within = stored.calibration.within_radius
        best = int(np.argmax(within))
        raise BadConfig(
            f"no distance reaches an expected precision of {precision}: the best is {within[best]:.3f}, within "
            f"{best} bits; ask for less, or limit the distance instead (--max-distance, max_distance)"
        )
    return radius
