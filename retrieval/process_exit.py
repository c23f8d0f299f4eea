"""How a Python process with PyTorch ends quickly."""

import atexit
import gc
import sys


def skip_gc_at_exit() -> None:
    """Skip the garbage collection at Python's exit, which takes 1 to 2 seconds once PyTorch is imported.

    It is not skipped if Triton is loaded, which comes with PyTorch's builds for CUDA: Triton would list all its objects
    as leaked.
    """
    atexit.register(_freeze)


def _freeze() -> None:
    if "triton" not in sys.modules:
        gc.freeze()
