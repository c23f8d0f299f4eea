"""What searches use: a built segment, a small fresh one for later changes, and which of their rows still exist."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hashseek.indexing.catalog.filters import Filter
from hashseek.indexing.index.code_layouts import Subset
from hashseek.indexing.index.exact_scan import Distances, ranked
from hashseek.indexing.index.hamming_index import SLOW_TO_BUILD, HammingIndex, Ids, build_index
from hashseek.retrieval.codes import Codes, code_size

# The fresh segment is rebuilt with every change, so it is merged into the built one before that takes long: when it has
# more than this many images, and more than this share of the built one, because merging copies the latter.
FRESH_LIMIT, _FRESH_SHARE = 4096, 1 / 1024
# A kind that takes long to build is rebuilt only when this share of its images has changed.
_CHANGED = 0.1


@dataclass(frozen=True)
class Segment:
    """An index, and which of its rows are still in the collection."""

    index: HammingIndex
    alive: Subset

    @property
    def n_dead(self) -> int:
        """Number of rows that were removed."""
        return len(self.index) - self.alive.n

    def left(self) -> tuple[Codes, Ids]:
        """Codes and ids of the rows that are still in the collection."""
        rows = self.alive.mask if self.n_dead else slice(None)
        return self.index.codes[rows], self.index.ids[rows]

    def without(self, removed: Ids) -> "Segment":
        """The segment after these ids were removed."""
        gone = self.index.rows_of(removed)
        if not len(gone):
            return self
        alive = self.alive.mask.copy()
        alive[gone] = False
        return Segment(self.index, Subset(alive))

    def among(self, ids: Ids) -> Subset:
        """The rows of these ids that still exist."""
        named = self.index.subset_of(ids)
        return Subset(named.mask & self.alive.mask) if self.n_dead else named

    def all_but(self, ids: Ids) -> Subset:
        """The rows of other ids that still exist."""
        return Subset(self.alive.mask & ~self.index.subset_of(ids).mask)


@dataclass(frozen=True)
class View:
    """The collection as of one generation of the catalog, up to the image `last_id`."""

    generation: int
    last_id: int
    built: Segment
    fresh: Segment
    filtered: dict[Filter, list[Subset]] = field(default_factory=dict, init=False)  # what matches filters in both

    def __len__(self) -> int:
        return self.built.alive.n + self.fresh.alive.n

    @property
    def ids(self) -> Ids:
        """The ids of all images (N,), ascending; often those of the built index, which may be mapped from its file."""
        parts = [
            segment.index.ids[segment.alive.mask] if segment.n_dead else segment.index.ids for segment in self._parts
        ]
        return parts[0] if not len(parts[1]) else np.sort(np.concatenate(parts))

    def codes_of(self, ids: Ids) -> Codes:
        """Packed codes (n, code_size) of images that exist."""
        codes = np.empty((len(ids), code_size(self.built.index.n_bits)), np.uint8)
        is_fresh = np.isin(ids, self.fresh.index.ids)
        for segment, chosen in zip(self._parts, (~is_fresh, is_fresh), strict=True):
            codes[chosen] = segment.index.codes_of(ids[chosen])
        return codes

    @property
    def _parts(self) -> tuple[Segment, Segment]:
        return self.built, self.fresh

    @property
    def kind(self) -> str:
        """The kind of the built index."""
        return self.built.index.kind

    @property
    def is_due(self) -> bool:
        """Whether the fresh segment should be merged into the built one."""
        n_changed = len(self.fresh.index)
        limit = max(FRESH_LIMIT, int(_FRESH_SHARE * len(self.built.index)))
        if self.kind in SLOW_TO_BUILD:
            n_changed, limit = n_changed + self.built.n_dead, max(limit, int(_CHANGED * len(self.built.index)))
        return n_changed > limit


def empty_segment(n_bits: int, kind: str = "exact") -> Segment:
    """A segment without rows."""
    codes = np.zeros((0, code_size(n_bits)), np.uint8)
    return whole(build_index(codes, np.zeros(0, np.int64), n_bits=n_bits, kind=kind))


def empty_view(n_bits: int, kind: str = "exact") -> View:
    """A view without images, as before the first generation."""
    return View(-1, 0, empty_segment(n_bits, kind), empty_segment(n_bits))


def whole(index: HammingIndex) -> Segment:
    """A segment with all rows of an index."""
    return Segment(index, Subset(np.ones(len(index), np.bool_)))


def merge(view: View, kind: str) -> View:
    """The view with all existing rows in the built segment, which has an index of this kind."""
    if view.kind == kind and not view.built.n_dead and not len(view.fresh.index):
        return view
    n_bits = view.built.index.n_bits
    built = joined([view.built.left(), view.fresh.left()], n_bits=n_bits, kind=kind)
    return replace(view, built=built, fresh=empty_segment(n_bits))


def joined(parts: Sequence[tuple[Codes, Ids]], *, n_bits: int, kind: str = "exact") -> Segment:
    """All codes of the parts with their ids, as one segment with an index of this kind."""
    codes, ids = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if (ids[1:] < ids[:-1]).any():  # images whose code changed
        order = np.argsort(ids)
        codes, ids = codes[order], ids[order]
    return whole(build_index(codes, ids, n_bits=n_bits, kind=kind))


def merged_hits(
    built: tuple[Distances, Ids], fresh: tuple[Distances, Ids], k: int, *, ties: bool = False
) -> tuple[Distances, Ids]:
    """The k nearest among the results of both segments for one query; with `ties`, and all as near as the k-th."""
    if not len(fresh[0]):
        return built
    distances, ids = np.concatenate([built[0], fresh[0]]), np.concatenate([built[1], fresh[1]])
    return ranked(distances, ids, k, ties=ties)
