"""The nearest codes in Milvus, with ties by id. Milvus itself returns arbitrary ones at the distance of the last."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from hashseek.indexing.milvus.connection import Connection
from hashseek.indexing.milvus.expressions import both
from hashseek.indexing.milvus.rows import CODE, N_IDS, N_LISTS, code_bytes
from hashseek.retrieval.errors import BadConfig

MOST = 16_384  # results that Milvus returns at once


class Neighbour(NamedTuple):
    """A hit: they are ordered by distance (bits), then by id."""

    distance: int
    id: int
    code: bytes


@dataclass(frozen=True)
class Nearest:
    """Searches for one code.

    Args:
        connection: the connection to the server.
        code: the packed code.
        among: an expression that hits must match.
        consistency: the consistency of reads, as Milvus names it.
        params: search parameters of the index.
    """

    connection: Connection
    code: bytes
    among: str
    consistency: str
    params: dict[str, Any]

    def search(self, k: int, *, radius: int, ties: bool = False) -> list[Neighbour]:
        """The k nearest within a radius (bits) in order; with `ties`, also all others at the distance of the last.

        Beyond the most that Milvus returns at once, and for ties, the images are fetched one distance after
        another.

        Raises:
            BadConfig: an index with lists can return no more than `MOST`, and the result needs more.
        """
        n = min(2 * k + 64, MOST)
        if "nprobe" in self.params:
            found = self._from_lists(k, n, radius=radius)
        else:
            found = self._fetch(n, self.among, radius=radius + 1)
            if len(found) == n and found[-1].distance == found[min(k, n) - 1].distance:
                distance = found[-1].distance
                found = [one for one in found if one.distance < distance]
                while len(found) < k and distance <= radius:
                    found += self._at(distance, None if ties else k - len(found), 0, N_IDS)
                    distance += 1
        if ties and len(found) > k:
            return [one for one in found if one.distance <= found[k - 1].distance]
        return found[:k]

    def _from_lists(self, k: int, n: int, *, radius: int) -> list[Neighbour]:
        """The `n` nearest in an index with lists, and more until all at the distance of the k-th are among them.

        It asks for no radius: Milvus 2.3 then ignores `nprobe`, and stops at the first list without a hit.
        """
        while True:
            found = self._fetch(n, self.among)
            is_complete = len(found) < n or found[-1].distance > min(found[min(k, n) - 1].distance, radius)
            if is_complete or n == MOST:
                break
            n = min(4 * n, MOST)
        reads_all = self.params["nprobe"] == N_LISTS  # then the result is exact, or refused
        if not is_complete and (reads_all or k > MOST):
            raise BadConfig(
                f"an index with lists finds at most {MOST:,} images, but this search needs more, or as many are at "
                "the last distance: use a lower k, max_distance or oversample, a narrower filter, or index=flat"
            )
        return [one for one in found if one.distance <= radius]

    def _at(self, distance: int, n: int | None, low: int, high: int) -> list[Neighbour]:
        """The images at a distance with ids from `low` to below `high`; at least the `n` lowest ids of them."""
        among = both(self.among, f"{low} <= id < {high}") if (low, high) != (0, N_IDS) else self.among
        found = self._fetch(MOST, among, radius=distance + 1, range_filter=distance)
        if len(found) < MOST:
            return found
        middle = (low + high) // 2
        lower = self._at(distance, n, low, middle)
        if n is not None and len(lower) >= n:
            return lower
        return lower + self._at(distance, None if n is None else n - len(lower), middle, high)

    def _fetch(self, limit: int, among: str, **limits: int) -> list[Neighbour]:
        """What Milvus returns, in order: distances are below a `radius`, and at least a `range_filter`."""
        [hits] = self.connection.read(
            "search",
            data=[self.code],
            anns_field=CODE,
            filter=among,
            limit=limit,
            output_fields=[CODE],
            consistency_level=self.consistency,
            search_params={"metric_type": "HAMMING", "params": self.params | limits},
        )
        return sorted(Neighbour(int(hit["distance"]), int(hit["id"]), code_bytes(hit["entity"])) for hit in hits)
