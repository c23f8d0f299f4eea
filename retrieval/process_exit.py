"""How a Python process with PyTorch ends quickly."""

import atexit
import gc
import sys


def skip_gc_at_exit() -> None:
    """Skip the garbage collection at Python's exit, which takes 1 to 2 seconds once PyTorch is imported."""
    atexit.register(_freeze)


def _freeze() -> None:
    # Triton comes with PyTorch's builds for CUDA. If its objects are not collected, it prints a list of them as leaked.
    if "triton" not in sys.modules:
        gc.freeze()
