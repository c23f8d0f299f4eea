"""Binary codes: the one place that defines sign(0), bit order and code width.

Bit j of a code is 1 iff output j > 0 (so 0 becomes 0); it is stored in byte j // 8 at bit j % 8, and the unused high
bits of the last byte are 0. `n_bits` counts bits (1 to 1024), `code_size` counts bytes.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hashseek.retrieval.errors import BadCodes

MAX_BITS = 1024

Codes = NDArray[np.uint8]


def check_n_bits(n_bits: int) -> int:
    """Return `n_bits` if it is a code length that Hashseek supports.

    Raises:
        BadCodes: unless 1 <= n_bits <= 1024.
    """
    if not 1 <= n_bits <= MAX_BITS:
        raise BadCodes(f"a code must have 1 to {MAX_BITS} bits, got {n_bits}")
    return n_bits


def code_size(n_bits: int) -> int:
    """Number of bytes in a code of `n_bits` bits."""
    return (check_n_bits(n_bits) + 7) // 8


def pack(outputs: ArrayLike) -> Codes:
    """Binarize real outputs (B, K) into packed codes (B, ceil(K / 8)).

    Raises:
        BadCodes: the array is not two-dimensional, K is out of range, or a value is NaN.
    """
    values = np.asarray(outputs)
    if values.ndim != 2:
        raise BadCodes(f"outputs must have shape (B, K), got {values.shape}")
    check_n_bits(values.shape[1])
    if np.issubdtype(values.dtype, np.floating) and np.isnan(values).any():
        raise BadCodes("the model's outputs contain NaN: check the weights and the input")
    return np.packbits(values > 0, axis=1, bitorder="little")


def unpack(codes: Codes, n_bits: int) -> NDArray[np.uint8]:
    """Bits (B, n_bits), 0 or 1, of packed codes (B, code_size)."""
    check_codes(codes, n_bits)
    return np.unpackbits(codes, axis=1, count=n_bits, bitorder="little")


def pad(codes: Codes, size: int) -> Codes:
    """Codes (B, size) with zero bytes appended; Hamming distances do not change."""
    if codes.shape[1] == size:
        return np.ascontiguousarray(codes)
    padded = np.zeros((len(codes), size), dtype=np.uint8)
    padded[:, : codes.shape[1]] = codes
    return padded


def check_codes(codes: Codes, n_bits: int) -> Codes:
    """Return `codes` if they are packed codes of `n_bits` bits with clean padding.

    Raises:
        BadCodes: wrong type, shape or width, or a bit set beyond `n_bits`.
    """
    size = code_size(n_bits)
    if codes.dtype != np.uint8 or codes.ndim != 2:
        raise BadCodes(f"codes must be uint8 of shape (B, {size}), got {codes.dtype} of shape {codes.shape}")
    if codes.shape[1] != size:
        raise BadCodes(f"{n_bits}-bit codes must have {size} bytes, got {codes.shape[1]}")
    spare = size * 8 - n_bits
    if spare and len(codes) and codes[:, -1].max() >> (8 - spare):
        raise BadCodes(f"a bit beyond the {n_bits} bits of the code is set: the codes were packed in another way")
    return codes
