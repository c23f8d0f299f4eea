"""What the name of a backbone says, without importing torch. `hashseek.retrieval.models.backbones` lists the kinds."""

import importlib.util
import re
from pathlib import Path

from hashseek.retrieval.errors import BadConfig, suggest
from hashseek.retrieval.models import MAX_WIDTH
from hashseek.retrieval.models.torchvision_weights import FILES

PIXELS = "pixels"  # the backbone that is no network
TIMM = "timm:"
MLP, MLP_BN = "mlp:", "mlp_bn:"


def is_vector_backbone(name: str) -> bool:
    """Whether the backbone accepts vectors instead of images."""
    return name.startswith((MLP, MLP_BN))


def is_from_outside(name: str) -> bool:
    """Whether `name` is "module:function", a function from outside the package."""
    return ":" in name and not is_vector_backbone(name) and not name.startswith(TIMM)


def widths_of(name: str) -> list[int]:
    """Length of the vectors that the backbone mlp:294-512-512 accepts, and widths of its layers.

    Raises:
        BadConfig: the widths are not whole numbers from 1 to 100,000.
    """
    parts = name.partition(":")[2].split("-")
    if not all(part.isdecimal() and 1 <= int(part) <= MAX_WIDTH for part in parts):
        raise BadConfig(
            f"write the backbone {name!r} as mlp:INPUT-HIDDEN-..., such as mlp:294-512-512, with widths from 1 to "
            f"{MAX_WIDTH:,}"
        )
    return [int(part) for part in parts]


def check_image_backbone(name: str) -> None:
    """Refuse a backbone that cannot exist, or does not accept images.

    Raises:
        BadConfig: there is no network of that name, it is for vectors, or its package is missing.
    """
    if is_vector_backbone(name):
        raise BadConfig(f"the backbone {name} is for vectors, not images: choose one for images")
    if name.startswith(TIMM):
        _check_timm_name(name)
    if ":" not in name and name != PIXELS and name not in FILES:
        raise unknown_backbone(name)


def unknown_backbone(name: str) -> BadConfig:
    """The error for a backbone that does not exist, with the closest name."""
    return BadConfig(
        f"there is no backbone {name!r}: {suggest(name, FILES)} (allowed: torchvision's classifiers, pixels, "
        'timm:NAME, mlp:WIDTHS and "module:function")'
    )


def _check_timm_name(name: str) -> None:
    """Refuse a network whose name occurs nowhere in timm's source, which takes seconds to import.

    Names that do occur are checked when the network is built.
    """
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        raise BadConfig(f"the backbone {name} needs the package timm: run pip install 'hashseek[timm]'")
    source = "\n".join(file.read_text(encoding="utf-8") for file in Path(spec.origin).parent.glob("models/*.py"))
    networks = re.findall(r"^@register_model\s+def (\w+)", source, re.MULTILINE)
    architecture = name.removeprefix(TIMM).partition(".")[0]
    if networks and not re.search(rf"\b{re.escape(architecture)}\b", source):
        raise BadConfig(f"timm has no network {architecture!r}: {suggest(architecture, sorted(networks))}")
