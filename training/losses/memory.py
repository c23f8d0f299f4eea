"""A queue of keys and a momentum encoder: more rows to contrast with than a batch holds.

    update_key_encoder(key_encoder, encoder, momentum=0.999)
    with torch.no_grad():
        keys = key_encoder(second_view)
    terms = loss(encoder(first_view), labels, memory=queue.memory(keys, labels))
    queue.enqueue(keys, labels)

The contrast set is then the keys of the current batch followed by the queue as it was before they entered it: every
anchor's own key is among its positives.
"""

import torch
from torch import Tensor, nn

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.training.collectives import gather_rows
from hashseek.training.losses.batches import Memory, check_batch
from hashseek.training.losses.hyperparameters import Number, check
from hashseek.training.losses.numerics import normalize


class KeyQueue(nn.Module):
    """First-in first-out queue of keys with their labels (He et al., CVPR 2020; MulSupCon's code).

    Its rows are buffers, so they are saved and moved with the model. Any batch up to the queue's size fits, even if it
    does not divide that size. O(size (D + C)) memory.

    Args:
        n_classes: C, number of labels.
        n_bits: D, width of the keys.
        size: Q, rows kept; 4096 (HBL), 2048 (MulSupCon), 256 (its Yeast configuration).
        until_full: leave the queue out until it is full, as MulSupCon's code does; by default its filled part counts.
        normalized: divide keys by their L2 norm; False keeps them as they are, for the losses on inner products and
            distances (DSH, DPSH, DHN, HashNet, IDHN).
    """

    keys: Tensor
    key_labels: Tensor
    head: Tensor
    filled: Tensor

    def __init__(
        self, *, n_classes: int, n_bits: int, size: int = 4096, until_full: bool = False, normalized: bool = True
    ) -> None:
        super().__init__()
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.size = size
        self.until_full = until_full
        self.normalized = normalized
        self.register_buffer("keys", torch.zeros(size, n_bits))
        self.register_buffer("key_labels", torch.zeros(size, n_classes, dtype=torch.uint8))
        self.register_buffer("head", torch.zeros((), dtype=torch.long))  # where the next key goes
        self.register_buffer("filled", torch.zeros((), dtype=torch.long))

    def __len__(self) -> int:
        """Number of keys in the queue."""
        return int(self.filled)

    @torch.no_grad()
    def memory(self, keys: Tensor | None = None, labels: Tensor | None = None) -> Memory:
        """The keys (B, D) of the current batch with labels (B, C) if given, then the rows of the queue.

        Copies, so that a later `enqueue` does not change what a loss still needs for its gradient.

        Raises:
            BadCodes: keys without labels, wrong shapes, labels that are not 0/1, or keys that are NaN or infinite.
        """
        waiting = self.until_full and len(self) < self.size
        n_rows = 0 if waiting else len(self)
        ref, ref_y = self.keys[:n_rows], self.key_labels[:n_rows]
        if keys is None and labels is None:
            return Memory(ref.clone(), ref_y.clone())
        own, own_y = self._checked(keys, labels)
        return Memory(torch.cat([own, ref.to(own)]), torch.cat([own_y, ref_y]))

    @torch.no_grad()
    def enqueue(self, keys: Tensor, labels: Tensor) -> None:
        """Put keys (B, D) with labels (B, C) in place of the oldest rows.

        Under torch.distributed every rank enqueues the keys of all ranks, in the order of ranks; batches may differ
        in length.

        Raises:
            BadCodes: see `memory`, or more keys than the queue has rows.
        """
        keys, labels = self._checked(keys, labels)
        keys, labels = gather_rows(keys), gather_rows(labels)
        n_keys = len(keys)
        if n_keys > self.size:
            raise BadCodes(
                f"the queue keeps {self.size} rows, but {n_keys} keys were added at once: use a queue of at least "
                f"{n_keys}, or a smaller batch"
            )
        place = (self.head + torch.arange(n_keys, device=self.head.device)) % self.size
        self.keys[place] = keys.to(self.keys)
        self.key_labels[place] = labels.to(self.key_labels.device)
        self.head.copy_((self.head + n_keys) % self.size)
        self.filled.copy_((self.filled + n_keys).clamp_max(self.size))

    def _checked(self, keys: Tensor | None, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys as the queue keeps them, and uint8 labels."""
        if keys is None or labels is None:
            raise BadCodes("keys and labels belong together, but only one was given: pass both or neither")
        keys, labels = check_batch(keys.detach(), labels, n_classes=self.n_classes, n_bits=self.n_bits)
        return normalize(keys) if self.normalized else keys, labels.to(torch.uint8)


@torch.no_grad()
def update_key_encoder(key: nn.Module, query: nn.Module, momentum: float = 0.999) -> None:
    """Move the key encoder's parameters to momentum * own + (1 - momentum) * query's; copy its buffers.

    Call it before the forward pass of the key encoder, which starts as a copy of the query encoder (He et al.,
    CVPR 2020, Eq. 2). Averaged weights (`train.ema`) move in the same way. Usual: 0.99, 0.999, 0.9999.

    Raises:
        BadConfig: momentum outside [0, 1], or encoders with different parameters.
    """
    check("momentum", momentum, Number("share that the key encoder keeps", least=0, most=1))
    own, theirs = list(key.parameters()), list(query.parameters())
    own_buffers, their_buffers = list(key.buffers()), list(query.buffers())
    if [p.shape for p in own + own_buffers] != [p.shape for p in theirs + their_buffers]:
        raise BadConfig(
            f"the key encoder has {len(own)} parameters and {len(own_buffers)} buffers that do not match the "
            f"{len(theirs)} and {len(their_buffers)} of the query encoder: create it with copy.deepcopy"
        )
    for mine, other in zip(own, theirs, strict=True):
        mine.mul_(momentum).add_(other.to(mine), alpha=1 - momentum)
    for copy, original in zip(own_buffers, their_buffers, strict=True):
        copy.copy_(original)
