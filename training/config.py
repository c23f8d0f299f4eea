"""The training configuration: one TOML file, `key=value` overrides, and a check that names every mistake."""

import difflib
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.images import Preprocessing
from hashseek.retrieval.models.mlp import MAX_WIDTH


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NamedSection(BaseModel):
    """A section with a `name`; its other keys are keywords of the function that the name stands for."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    def options(self) -> dict[str, Any]:
        """Every key but `name`."""
        return dict(self.model_extra or {})


class DataSection(NamedSection):
    """The data set, and labels that training is not to see: names, or a share of all that is drawn with the seed."""

    held_out: tuple[str, ...] | float | None = None
    held_out_seed: int = Field(default=0, ge=0)

    @field_validator("held_out", mode="before")
    @classmethod
    def _is_names_or_a_share(cls, value: Any) -> Any:
        names = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value) and len(value) > 0
        if value is None or names or (isinstance(value, int | float) and 0 < value < 1):
            return value
        raise ValueError("it is a list of label names, or a share of the labels between 0 and 1")

    @model_serializer(mode="wrap")
    def _only_if_held_out(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without held-out labels the section is written as it was before there were any."""
        content: dict[str, Any] = write(self)
        return content if self.held_out is not None else without_held_out(content)


def without_held_out(section: dict[str, Any]) -> dict[str, Any]:
    """The `data` section of a configuration without the labels that training is not to see."""
    return {key: value for key, value in section.items() if key not in ("held_out", "held_out_seed")}


class LossSection(NamedSection):
    """The loss, HyP2 unless named otherwise, and what it reads."""

    name: str = "hyp2"
    on: Literal["outputs", "features", "projection"] = "outputs"


class PartnerSection(NamedSection):
    """A classification loss beside the loss, on a linear layer over what `on` names."""

    on: Literal["outputs", "features", "projection"] = "outputs"
    weight: float = Field(default=1, gt=0)


class ProjectionSection(_Section):
    """The projection head of contrastive training: features -> hidden (None: as many) -> width."""

    width: int = Field(default=128, ge=1, le=MAX_WIDTH)
    hidden: int | None = Field(default=None, ge=1, le=MAX_WIDTH)


class MemorySection(_Section):
    """A queue of keys to contrast with; momentum of the encoder that makes them, 0 for the network itself."""

    size: int = Field(default=4096, ge=1, le=1_000_000)
    momentum: float = Field(default=0.999, ge=0, lt=1)
    until_full: bool = False


class ModelSection(_Section):
    """Backbone, weights, code length, and the network's input; unset input values are the backbone's own."""

    backbone: str
    n_bits: int = Field(ge=1, le=1024)
    weights: str = "none"
    size: int | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    crop_fraction: float | None = None
    interpolation: Literal["bilinear", "bicubic"] | None = None
    head: str = "linear"
    dropout: float = Field(default=0, ge=0, lt=1)
    freeze_backbone: bool = False
    freeze_batch_norm: bool = False

    def preprocessing(self, default: Preprocessing) -> Preprocessing:
        """`default` with the values that are set here."""
        return Preprocessing(
            size=default.size if self.size is None else self.size,
            mean=default.mean if self.mean is None else self.mean,
            std=default.std if self.std is None else self.std,
            crop_fraction=default.crop_fraction if self.crop_fraction is None else self.crop_fraction,
            interpolation=default.interpolation if self.interpolation is None else self.interpolation,
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
    schedule: Literal["constant", "step", "cosine", "restarts"] = "cosine"
    warmup_epochs: float = Field(default=0, ge=0)
    restart_epochs: int = Field(default=10, ge=1)
    restart_factor: int = Field(default=2, ge=1)
    step_epochs: int = Field(default=10, ge=1)
    step_factor: float = Field(default=0.5, gt=0, lt=1)


class TrainSection(_Section):
    """Length, batches, augmentation, validation, hardware.

    batch_size: of all devices together. chunk_size: rows a device has in memory at once; the batch's loss stays exact.
    val_database: what the validation part's images are searched in: the images trained on, or each other.
    patience: epochs without a better validation score before a run stops. ema: of the weights that are validated and
    saved. views: augmented copies of each image in a batch. noise: of feature vectors, in standard deviations.
    keep_labels: share of the positive labels of the training part that are kept. single_label: keep one an image.
    """

    epochs: int = Field(default=20, ge=1)
    batch_size: int = Field(default=64, ge=1)
    chunk_size: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    val_fraction: float = Field(default=0.1, gt=0, lt=1)
    val_n: int = Field(default=1000, ge=1)
    val_database: Literal["training", "held-out"] = "training"
    patience: int | None = Field(default=None, ge=1)
    ema: float | None = Field(default=None, gt=0, lt=1)
    device: str = "auto"
    devices: int = Field(default=1, ge=1)
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: bool = False
    views: Literal[1, 2] = 1
    flip: bool = True
    min_crop: float = Field(default=0.3, gt=0, le=1)
    rand_augment: int = Field(default=0, ge=0, le=14)
    rand_augment_magnitude: int = Field(default=9, ge=0, le=30)
    jitter: float = Field(default=0, ge=0, le=1)
    noise: float = Field(default=0, ge=0)
    keep_labels: float = Field(default=1, gt=0, le=1)
    single_label: bool = False
    cache: Literal["auto", "memory", "memmap", "none"] = "auto"
    cache_gib: float = Field(default=4, ge=0)


class TrackingSection(_Section):
    """Where a run is followed beside its folder's log."""

    tensorboard: bool = True


class SweepSection(_Section):
    """A search over settings, for `hashseek sweep`; training alone does not look at it.

    space: setting -> range, see `hashseek.training.runs.sweep_space`. prune: end trials early that fall behind.
    """

    trials: int = Field(default=20, ge=1)
    seed: int = Field(default=0, ge=0)
    prune: bool = True
    space: dict[str, Any] = {}


class Config(_Section):
    """Everything that decides a run, and a search over it."""

    data: DataSection
    model: ModelSection
    loss: LossSection = LossSection()
    partner: PartnerSection | None = None
    projection: ProjectionSection | None = None
    memory: MemorySection | None = None
    optimizer: OptimizerSection = OptimizerSection()
    train: TrainSection = TrainSection()
    tracking: TrackingSection = TrackingSection()
    sweep: SweepSection = Field(default=SweepSection(), exclude=True)

    @model_validator(mode="after")
    def _settings_fit(self) -> "Config":
        if self.data.held_out is None and self.data.held_out_seed:
            raise ValueError("data.held_out_seed draws labels to hold out, but data.held_out is not set: set it too")
        if self.optimizer.warmup_epochs >= self.train.epochs:
            raise ValueError(
                f"optimizer.warmup_epochs is {self.optimizer.warmup_epochs} and must be less than "
                f"train.epochs, {self.train.epochs}"
            )
        if self.train.batch_size % self.train.devices:
            raise ValueError(
                f"train.batch_size is {self.train.batch_size} and must be a multiple of train.devices, "
                f"{self.train.devices}: it is the batch of all devices together"
            )
        if self.train.single_label and self.train.keep_labels < 1:
            raise ValueError(
                f"train.single_label keeps one label an image, and train.keep_labels is {self.train.keep_labels}: set "
                "one of them back"
            )
        if self.train.views > 1 and self.model.freeze_backbone:
            raise ValueError(
                "train.views is 2, but with model.freeze_backbone features are computed once, from one view: set one "
                "of them back"
            )
        return self


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, or a configuration that Hashseek ships, and apply overrides such as `model.n_bits=24`.

    An override that gives the loss or the data set another name drops what the file says for the old one.

    Raises:
        BadConfig: no such file, not TOML, a misspelt key, or a value outside its limits.
    """
    return parse_config(read_config(path, overrides), source=str(path))


def read_config(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What `load_config` checks: the sections of the file with the overrides applied.

    Raises:
        BadConfig: no such file, not TOML, or an override that is not written as one.
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
    return content


def find_config(path: Path) -> Path:
    """`path` itself, or the shipped configuration of that name (with or without `.toml`)."""
    if path.is_file():
        return path
    shipped = Path(str(resources.files("hashseek.training.configs")))
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
    if not equals or not key.strip().rpartition(".")[0] or not key.strip().rpartition(".")[2]:
        raise BadConfig(f"an override is written section.key=value, such as model.n_bits=24, not {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word, such as a path: quotes are for the shell to eat
    set_value(content, key.strip(), value)


def set_value(content: dict[str, Any], key: str, value: Any) -> None:
    """Set `section.key` of a configuration's content, in place; another name of loss or data starts its section afresh.

    Raises:
        BadConfig: a section on the way is a value.
    """
    *sections, last = key.split(".")
    target = content
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise BadConfig(f"the setting {key!r} goes through {section!r}, which is a value and not a section")
    if key in ("data.name", "loss.name") and target.get("name") != value:
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
        annotation = model.model_fields[str(part)].annotation
        for inner in (annotation, *get_args(annotation)):  # an optional section is a union with None
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                model = inner
    return list(model.model_fields)
