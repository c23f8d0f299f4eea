"""A checkpoint turned into a function from images to packed codes, by an engine, in batches."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from hashseek.retrieval.checkpoint import Checkpoint
from hashseek.retrieval.codes import Codes, pack
from hashseek.retrieval.decode_encode_lock import Turns
from hashseek.retrieval.devices import n_cores
from hashseek.retrieval.engines import build_engine
from hashseek.retrieval.images import Pixels, preprocess

T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S", bound=np.generic)

_SLOW = 0.02  # seconds between items from which on their source, and not their loading, takes the time


class Encoder:
    """Encodes images with one checkpoint; safe to call from several threads.

    Args:
        checkpoint: from `load_checkpoint`.
        device: "auto", "cpu", "cuda" or "cuda:N".
        precision: "auto" (the quicker one on this device), "fp32" or "bf16". The head is float32 always.
        engine: what computes the features, a name of `hashseek.retrieval.engines.ENGINES`.
        batch_size: images in one pass through the network; None: as many as suit the engine.

    Attributes:
        engine: engine, device and precision as one name, such as "torch cpu bfloat16 folded".
        device, dtype: where and in which type the features are computed.

    Raises:
        BadCheckpoint: the checkpoint's model encodes vectors.
        BadConfig: there is no such device, precision or engine, or they do not go together.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: str = "auto",
        precision: str = "auto",
        engine: str = "torch",
        batch_size: int | None = None,
    ) -> None:
        self.header = checkpoint.header
        self.preprocessing = checkpoint.header.image_preprocessing()
        self.n_features = checkpoint.model.n_features
        backbone = checkpoint.model.backbone.eval()
        self._engine = build_engine(engine, backbone, self.preprocessing, device=device, precision=precision)
        self.batch_size = batch_size or self._engine.batch_size
        self.engine, self.device, self.dtype = self._engine.name, self._engine.device, self._engine.dtype
        self.head = checkpoint.model.head.to(self.device).eval()
        # One pass already uses every core; two at a time would only fight for them.
        self._turns = Turns()

    @property
    def n_bits(self) -> int:
        """K, the length of the codes."""
        return self.header.n_bits

    @property
    def fingerprint(self) -> str:
        """Codes of equal fingerprints may be compared, others never."""
        return self.header.fingerprint

    def decoding(self) -> AbstractContextManager[None]:
        """To be entered by threads that decode ahead: on a processor they wait while the network computes."""
        return self._turns.decoding() if self.device.type == "cpu" else nullcontext()

    def features(self, pixels: Pixels) -> NDArray[np.float32]:
        """Features (B, D) of the backbone for preprocessed uint8 pixels (B, 3, size, size)."""
        with self._turns.encoding():
            return self._features(pixels)

    def _features(self, pixels: Pixels) -> NDArray[np.float32]:
        starts = range(0, len(pixels), self.batch_size)
        rows = [self._engine(pixels[i : i + self.batch_size]) for i in starts]
        return np.concatenate(rows) if rows else np.zeros((0, self.n_features), np.float32)

    def outputs(self, pixels: Pixels) -> NDArray[np.float32]:
        """Real outputs (B, K) of preprocessed uint8 pixels (B, 3, size, size)."""
        # One turn for both: beside threads that decode, the head's small products take many times as long.
        with self._turns.encoding():
            return self.apply_head(self._features(pixels), self.head)

    def apply_head(self, features: NDArray[np.float32], head: nn.Module) -> NDArray[np.float32]:
        """Outputs (B, K) of a head for features (B, D), in float32.

        Row by row: a product of matrices adds in an order that depends on their size, and the last bit of an output
        near 0 would depend on the images beside it.
        """
        head = head.to(self.device)
        with torch.inference_mode():
            # Copies, not views: what lies elsewhere in memory may be added in another order, too.
            rows = [head(torch.tensor(row[None], device=self.device)) for row in features]
            outputs = torch.cat(rows) if rows else head(torch.zeros(0, self.n_features, device=self.device))
        found: NDArray[np.float32] = outputs.cpu().numpy()
        return found

    def encode_pixels(self, pixels: Pixels) -> Codes:
        """Packed codes (B, code_size) of preprocessed uint8 pixels (B, 3, size, size)."""
        return pack(self.outputs(pixels))

    def encode(self, images: Sequence[Image.Image]) -> Codes:
        """Packed codes (B, code_size) of RGB images of any size."""
        size = self.preprocessing.size
        pixels = [preprocess(image, self.preprocessing) for image in images]
        return self.encode_pixels(np.stack(pixels) if pixels else np.zeros((0, 3, size, size), np.uint8))

    def encode_stream(
        self, items: Iterable[T], load: Callable[[T], tuple[R, Pixels | None]]
    ) -> Iterator[tuple[R, NDArray[np.uint8] | None]]:
        """Encode a stream of any length in constant memory, in order, while worker threads load ahead.

        Args:
            items: what to load, one per image; drawn from as memory allows.
            load: item -> (anything, pixels (3, size, size) or None for "nothing to encode"); runs in threads.

        Yields:
            (what `load` gave, code (code_size,) or None).
        """
        return self.stream(items, load, self.encode_pixels)

    def stream(
        self, items: Iterable[T], load: Callable[[T], tuple[R, Pixels | None]], function: Callable[[Pixels], NDArray[S]]
    ) -> Iterator[tuple[R, NDArray[S] | None]]:
        """As `encode_stream`, for any function of a batch of pixels (B, 3, size, size) to rows (B, ...)."""
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
    waiting: list[tuple[R, Pixels | None]], function: Callable[[Pixels], NDArray[S]]
) -> Iterator[tuple[R, NDArray[S] | None]]:
    loaded = [pixels for _, pixels in waiting if pixels is not None]
    rows = iter(function(np.stack(loaded)) if loaded else ())
    for result, pixels in waiting:
        yield result, None if pixels is None else next(rows)


def load_ahead(
    items: Iterable[T],
    load: Callable[[T], R],
    *,
    depth: int,
    n_workers: int | None = None,
    waits: Callable[[T], bool] = lambda _: True,
) -> Iterator[R]:
    """Yield load(item) in order, computed by threads at most `depth` items ahead.

    Decoding spends its time outside Python's lock, so threads are enough and nothing has to be pickled. An item that
    does not wait for anything, as `waits` says, is loaded at once: handing it to a thread would take longer.
    """
    running: deque[Future[R] | R] = deque()
    with ThreadPoolExecutor(n_workers or min(16, n_cores() + 1)) as pool:
        try:
            asked = time.monotonic()
            for item in items:
                running.append(pool.submit(load, item) if waits(item) else load(item))
                # Of items that come slowly none waits until `depth` others have come.
                slow = time.monotonic() - asked > _SLOW
                while len(running) > depth or (slow and running and _is_done(running[0])):
                    yield _result(running.popleft())
                asked = time.monotonic()
            while running:
                yield _result(running.popleft())
        finally:
            for future in running:
                if isinstance(future, Future):
                    future.cancel()


def _is_done(running: Future[R] | R) -> bool:
    return not isinstance(running, Future) or running.done()


def _result(running: Future[R] | R) -> R:
    return running.result() if isinstance(running, Future) else running
