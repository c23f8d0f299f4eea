"""The training configuration: one TOML file, `key=value` overrides, and a check that names every mistake."""

import difflib
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from retrieval.errors import BadConfig
from retrieval.images import Preprocessing


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NamedSection(BaseModel):
    """A section with a `name`; its other keys are keywords of the function that the name stands for."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    def options(self) -> dict[str, Any]:
        """Every key but `name`."""
        return dict(self.model_extra or {})


class LossSection(NamedSection):
    """The loss; HyP2 unless named otherwise."""

    name: str = "hyp2"


class ModelSection(_Section):
    """Backbone, weights, code length, and the network's input; unset input values are the backbone's own."""

    backbone: str
    n_bits: int = Field(ge=1, le=1024)
    weights: str = "none"
    size: int | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    crop_fraction: float | None = None
    freeze_backbone: bool = False
    freeze_batch_norm: bool = False

    def preprocessing(self, default: Preprocessing) -> Preprocessing:
        """`default` with the values that are set here."""
        return Preprocessing(
            size=default.size if self.size is None else self.size,
            mean=default.mean if self.mean is None else self.mean,
            std=default.std if self.std is None else self.std,
            crop_fraction=default.crop_fraction if self.crop_fraction is None else self.crop_fraction,
        )


class OptimizerSection(_Section):
    """SGD with momentum or AdamW. Rates are per step, decays per the optimizer's own definition."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = Field(default=0.01, gt=0)
    backbone_lr: float | None = Field(default=None, gt=0)
    proxy_lr: float | None = Field(default=None, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=5e-4, ge=0)
    clip_norm: float | None = Field(default=None, gt=0)
    schedule: Literal["constant", "step", "cosine"] = "cosine"
    warmup_epochs: float = Field(default=0, ge=0)
    step_epochs: int = Field(default=10, ge=1)
    step_factor: float = Field(default=0.5, gt=0, lt=1)


class TrainSection(_Section):
    """Length, batches, validation, hardware."""

    epochs: int = Field(default=20, ge=1)
    batch_size: int = Field(default=64, ge=1)
    seed: int = Field(default=0, ge=0)
    val_fraction: float = Field(default=0.1, gt=0, lt=1)
    val_n: int = Field(default=1000, ge=1)
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    flip: bool = True
    min_crop: float = Field(default=0.3, gt=0, le=1)
    cache_gib: float = Field(default=4, ge=0)


class Config(_Section):
    """Everything that decides a run."""

    data: NamedSection
    model: ModelSection
    loss: LossSection = LossSection()
    optimizer: OptimizerSection = OptimizerSection()
    train: TrainSection = TrainSection()

    @model_validator(mode="after")
    def _warmup_fits(self) -> "Config":
        if self.optimizer.warmup_epochs >= self.train.epochs:
            raise ValueError(
                f"optimizer.warmup_epochs is {self.optimizer.warmup_epochs} and must be less than "
                f"train.epochs, {self.train.epochs}"
            )
        return self


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, or a configuration that Hashseek ships, and apply overrides such as `model.n_bits=24`.

    An override that gives the loss or the data set another name drops what the file says for the old one.

    Raises:
        BadConfig: no such file, not TOML, a misspelt key, or a value outside its limits.
    """
    try:
        content = tomllib.loads(find_config(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise BadConfig(f"{path} cannot be read: {error.strerror or error}") from None
    # Names first: what a section says beside its name is meant for that name, so another one starts it afresh.
    for override in sorted(overrides, key=lambda text: not text.startswith(("data.name=", "loss.name="))):
        _apply(content, override)
    return parse_config(content, source=str(path))


def find_config(path: Path) -> Path:
    """`path` itself, or the shipped configuration of that name (with or without `.toml`)."""
    if path.is_file():
        return path
    shipped = Path(str(resources.files("training.configs")))
    for candidate in (shipped / path.name, shipped / f"{path.name}.toml"):
        if candidate.is_file() and path.parent in (Path(), Path("training/configs")):
            return candidate
    names = ", ".join(sorted(file.stem for file in shipped.glob("*.toml")))
    raise BadConfig(f"there is no configuration {path}: give a TOML file or one of {names}")


def parse_config(content: dict[str, Any], *, source: str) -> Config:
    """Check a parsed configuration; `source` names it in messages."""
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise BadConfig(f"{source}: {_explain(error)}") from None


def _apply(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, last = key.strip().split(".")
    if not equals or not sections or not last:
        raise BadConfig(f"an override is written section.key=value, such as model.n_bits=24, not {override!r}")
    target = content
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise BadConfig(f"the override {override!r} goes through {section!r}, which is a value and not a section")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word, such as a path: quotes are for the shell to eat
    if key.strip() in ("data.name", "loss.name") and target.get("name") != value:
        target.clear()
    target[last] = value


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(first["loc"][-1]), _keys(first["loc"][:-1]), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(_keys(first['loc'][:-1]))}"
        return f"there is no setting {place!r}: {hint}"
    if first["type"] == "missing":
        return f"the setting {place!r} is missing"
    message = first["msg"].removeprefix("Value error, ")
    if not place:
        return message
    return f"the setting {place!r} is {first['input']!r}: {message[0].lower()}{message[1:]}"


def _keys(place: tuple[Any, ...]) -> list[str]:
    model: type[BaseModel] = Config
    for part in place:
        inner = model.model_fields[str(part)].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
    return list(model.model_fields)
