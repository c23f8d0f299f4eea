"""Encoders: turn images, or vectors, into packed codes with the model of one checkpoint.

An engine computes the features of images; everything else runs in NumPy. With OpenVINO, torch is often not imported.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hashseek.retrieval.checkpoint import Checkpoint, Header
from hashseek.retrieval.codes import Codes, pack
from hashseek.retrieval.engines import build_engine
from hashseek.retrieval.images import Pixels, preprocess
from hashseek.retrieval.load_ahead import load_ahead
from hashseek.retrieval.vectors import Vectors, as_float32, check_vectors

T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")


class WithHeader:
    """The base of both encoders. By itself, it takes the place of an encoder where nothing is encoded.

    Args:
        header: the header of the checkpoint.
    """

    engine = ""

    def __init__(self, header: Header) -> None:
        self.header = header

    @property
    def n_bits(self) -> int:
        """Length K of the codes."""
        return self.header.n_bits

    @property
    def fingerprint(self) -> str:
        """Only codes with the same fingerprint can be compared."""
        return self.header.fingerprint


class VectorEncoder(WithHeader):
    """Encodes vectors with the model of one checkpoint. Safe to call from several threads.

    Args:
        checkpoint: what `load_checkpoint` returned.

    Attributes:
        engine: what computes the codes, as `Encoder.engine`.
        width: D, the length of a vector.

    Raises:
        BadCheckpoint: the checkpoint encodes images, or its weights do not fit together.
    """

    engine = "numpy cpu float64"

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.header)
        self.width = checkpoint.header.vector_width()
        self._backbone, self._head = checkpoint.vector_backbone, checkpoint.head

    def features_and_outputs(self, vectors: Vectors) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Features (B, F) and real outputs (B, K) of vectors (B, D).

        Raises:
            BadDataset: see `check_vectors`.
        """
        check_vectors(vectors, width=self.width, nonzero=self.header.head == "normalized")
        features = self._backbone(as_float32(vectors))
        return features, self._head(features)


class Encoder(WithHeader):
    """Encodes images with the model of one checkpoint. Safe to call from several threads.

    Args:
        checkpoint: what `load_checkpoint` returned.
        device: "auto", "cpu", "cuda" or "cuda:N".
        precision: "auto" (the faster one on this device), "fp32" or "bf16". The head always runs in float64.
        engine: the library that runs the backbone, "auto", "torch" or "openvino", see `hashseek.retrieval.engines`.

    Attributes:
        backbone: the engine that runs it.
        batch_size: images per network pass.
        engine: its library, device and precision in one string, such as "torch cpu bfloat16 folded".
        head: features (B, D) -> outputs (B, K). Each row depends on its own features alone, to the last bit.

    Raises:
        BadCheckpoint: the checkpoint encodes vectors, not images.
        BadConfig: the device, precision or engine is not available here, or they cannot be combined.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: str = "auto",
        precision: str = "auto",
        engine: str = "auto",
    ) -> None:
        super().__init__(checkpoint.header)
        self.preprocessing = checkpoint.header.image_preprocessing()
        self.n_features = checkpoint.n_features
        self.backbone = build_engine(
            engine, checkpoint.network(), self.preprocessing, device=device, precision=precision
        )
        self.batch_size = self.backbone.batch_size
        self.engine = self.backbone.name
        self.head = checkpoint.head
        # A pass already uses every core: two at once would only compete.
        self._lock = threading.Lock()

    def features(self, pixels: Pixels) -> NDArray[np.float32]:
        """Features (B, D) of the backbone for preprocessed uint8 pixels (B, 3, size, size)."""
        pixels = np.ascontiguousarray(pixels)  # engines read the memory as it is
        starts = range(0, len(pixels), self.batch_size)
        with self._lock:
            rows = [self.backbone(pixels[i : i + self.batch_size]) for i in starts]
        return np.concatenate(rows) if rows else np.zeros((0, self.n_features), np.float32)

    def encode_pixels(self, pixels: Pixels) -> Codes:
        """Packed codes (B, code_size) of preprocessed uint8 pixels (B, 3, size, size)."""
        return pack(self.features_and_outputs(pixels)[1])

    def features_and_outputs(self, pixels: Pixels) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Features (B, D) and real outputs (B, K) of preprocessed uint8 pixels (B, 3, size, size)."""
        features = self.features(pixels)
        return features, self.head(features)

    def pixels_of(self, images: Sequence[Image.Image]) -> Pixels:
        """Preprocessed uint8 pixels (B, 3, size, size) of RGB images of any size."""
        size = self.preprocessing.size
        pixels = [preprocess(image, self.preprocessing) for image in images]
        return np.stack(pixels) if pixels else np.zeros((0, 3, size, size), np.uint8)

    def stream(
        self,
        items: Iterable[T],
        load: Callable[[T], tuple[R, Pixels | None]],
        function: Callable[[Pixels], Iterable[S]],
    ) -> Iterator[tuple[R, S | None]]:
        """Encode a stream of any length in constant memory, in order, while threads load the next items.

        Args:
            items: what to load, one per image; read lazily.
            load: item -> (any result, pixels (3, size, size) or None if there is nothing to encode); runs in threads.
            function: pixels (B, 3, size, size) -> B results, such as the rows of `encode_pixels`.

        Yields:
            (the result of `load`, that of `function` or None).
        """
        waiting: list[tuple[R, Pixels | None]] = []
        n_pending = 0
        for result, pixels in load_ahead(items, load, depth=2 * self.batch_size):
            waiting.append((result, pixels))
            n_pending += pixels is not None
            if n_pending == self.batch_size:
                yield from _flush(waiting, function)
                waiting, n_pending = [], 0
        yield from _flush(waiting, function)


def _flush(
    waiting: list[tuple[R, Pixels | None]], function: Callable[[Pixels], Iterable[S]]
) -> Iterator[tuple[R, S | None]]:
    loaded = [pixels for _, pixels in waiting if pixels is not None]
    found = iter(function(np.stack(loaded)) if loaded else ())
    for result, pixels in waiting:
        yield result, None if pixels is None else next(found)
