"""Checks stored codes: encodes some images again and compares the bits (`index verify --codes`)."""

import numpy as np

from hashseek.indexing.collection import Collection
from hashseek.indexing.maintenance.reencode import encode_stored
from hashseek.indexing.uris import is_there
from hashseek.retrieval.codes import unpack
from hashseek.retrieval.encoder import Encoder

# A larger share of a code's bits than engines and precisions change (docs/benchmarks.md: between float32 and bf16
# 1.4 % in all, and 7 of 48 in one code).
MAX_SHARE = 0.3
_BATCH = 256


def recheck(
    collection: Collection, encoder: Encoder, n: int, *, allow_private: bool = False
) -> tuple[list[int], list[str]]:
    """Encode `n` random images of `collection` again (or all, if it has fewer) and compare their codes.

    Images whose file does not exist are left out; `Collection.verify` names them.

    Args:
        collection: may be open read-only.
        encoder: an encoder with its checkpoint and any engine.
        n: number of images, at least 1.
        allow_private: also fetch images from URLs in private networks.

    Returns:
        (how many bits differ in each image; problems: images that cannot be encoded, and codes that do not belong to
        the content of their image).
    """
    ids = collection.index.current().ids
    chosen = np.sort(np.random.default_rng().choice(ids, min(n, len(ids)), replace=False)).tolist()
    problems: list[str] = []
    counts: list[int] = []
    for start in range(0, len(chosen), _BATCH):
        page = [image for image in collection.catalog.get(chosen[start : start + _BATCH]) if image is not None]
        stored = collection.catalog.spaces.codes_of([image.id for image in page])
        present = [image for image in page if image.id in stored and is_there(collection.uri_of(image))]
        encoded = encode_stored(collection, encoder, present, encoder.encode_pixels, allow_private=allow_private)
        for image, code, problem in encoded:
            if code is None:
                problems.append(f"the code of image {image.id} cannot be checked: {problem}")
                continue
            differ = unpack(code[None], encoder.n_bits) != unpack(stored[image.id].code[None], encoder.n_bits)
            counts.append(int(differ.sum()))
            if counts[-1] > MAX_SHARE * encoder.n_bits:
                problems.append(
                    f"the code of image {image.id} does not match its content ({counts[-1]} of {encoder.n_bits} "
                    "bits differ): remove the image and add it again"
                )
    return counts, problems
