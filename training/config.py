"""The training configuration: a TOML file with `key=value` overrides, checked. Every setting is described here once."""

import copy
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from hashseek.retrieval.devices import PrecisionName
from hashseek.retrieval.errors import BadConfig, suggest
from hashseek.retrieval.models import MAX_WIDTH
from hashseek.retrieval.models.names import is_vector_backbone

if TYPE_CHECKING:  # it loads torch, and a mistake in a configuration is reported at once
    from hashseek.retrieval.images import Preprocessing

Cache = Literal["auto", "memory", "memmap", "none"]
_MOMENTUM = 0.9
# Settings without effect on vectors, and further ones without effect if features are computed only once.
_OF_PIXELS = ("train.flip", "train.min_crop", "train.rand_augment", "train.rand_augment_magnitude", "train.jitter")
_OF_TRAINED_BACKBONES = ("train.views", *_OF_PIXELS, "optimizer.backbone_lr")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_none(cls, values: Any) -> Any:
        """Without settings of the value "none" whose default is none: TOML and overrides have no other word for it."""
        unset = {name for name, field in cls.model_fields.items() if field.default is None}
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if not (value == "none" and name in unset)}


class NamedSection(_Section):
    """A section with a `name`; its other keys are keywords of the function that the name stands for."""

    model_config = ConfigDict(extra="allow")

    name: str

    def options(self) -> dict[str, Any]:
        """Every key except `name`."""
        return dict(self.model_extra or {})


class DataSection(NamedSection):
    """The data set; its other keys are the data set's options."""

    name: str = Field(description='a data set, or `"my_module:function"`; its options are further keys')
    held_out: tuple[str, ...] | float | None = Field(
        default=None, description="labels to hold out of training: names, or a share to draw at random"
    )
    held_out_seed: int = Field(default=0, ge=0, description="seed of the random choice of held-out labels")

    @field_validator("held_out", mode="before")
    @classmethod
    def _is_names_or_a_share(cls, value: Any) -> Any:
        names = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value) and len(value) > 0
        if value is None or names or (isinstance(value, int | float) and 0 < value < 1):
            return value
        raise ValueError("use a list of label names, or a share of the labels between 0 and 1")


class LossSection(NamedSection):
    """The loss; its other keys are the loss's hyperparameters."""

    name: str = Field(
        default="tie_aware", description='a loss, or `"my_module:Class"`; its hyperparameters are further keys'
    )
    on: Literal["outputs", "features", "projection"] = Field(
        default="outputs", description="what the loss reads: `outputs` (K), `features` (D) or `projection`"
    )


class PartnerSection(NamedSection):
    """A classification loss in addition to the loss, on a linear classifier."""

    name: str = Field(
        description="a classification loss (`asl`, `bce`, `focal`, `hill`, `splc`, `zlpr`) on a linear classifier, in "
        "addition to the loss; its hyperparameters are further keys"
    )
    on: Literal["outputs", "features", "projection"] = Field(default="outputs", description="input of the classifier")
    weight: float = Field(default=1, gt=0, description="weight of its terms")


class ProjectionSection(_Section):
    """The projection head of contrastive training; it is not part of the checkpoint."""

    width: int = Field(default=128, ge=1, le=MAX_WIDTH, description="outputs of the projection head")
    hidden: int | None = Field(
        default=None, ge=1, le=MAX_WIDTH, description="hidden units of the projection head; none: as many as features"
    )


class MemorySection(_Section):
    """A queue of keys that contrastive losses compare the batch with."""

    size: int = Field(
        default=4096,
        ge=1,
        le=1_000_000,
        description="number of keys; at least a batch (two batches with two views and momentum 0)",
    )
    momentum: float = Field(
        default=0.999, ge=0, lt=1, description="momentum of the key encoder (MoCo); 0 uses the network itself"
    )
    until_full: bool = Field(default=False, description="do not use the queue until it is full")


_FITTED_HEADS = ("linear", "normalized")  # single layers


class ModelSection(_Section):
    """Backbone, weights, code length and the network's input."""

    backbone: str = Field(
        description='a torchvision network, `timm:NAME`, `mlp:294-512-512` for vectors, or `"my_module:function"`'
    )
    n_bits: int = Field(ge=1, le=1024, description="number of bits K, 1 to 1024")
    weights: str = Field(
        default="none",
        description='`"default"` (downloaded once), the name of a weight set, or a file; `$NAME` is taken from the '
        "environment",
    )
    size: int | None = Field(
        default=None, description="width and height of the input in pixels; none: that of the backbone's weights"
    )
    mean: tuple[float, float, float] | None = Field(
        default=None,
        description="mean for normalising the input: one number, or three as in `[0.485, 0.456, 0.406]`; none: that of "
        "the backbone's weights",
    )
    std: tuple[float, float, float] | None = Field(
        default=None,
        description="standard deviation for normalising the input: one number or three; none: that of the backbone's "
        "weights",
    )
    crop_fraction: float | None = Field(
        default=None,
        description="share of the shorter side that is kept at evaluation; 1 keeps the whole; none: that of the "
        "backbone's weights",
    )
    interpolation: Literal["bilinear", "bicubic"] | None = Field(
        default=None, description="`bilinear` or `bicubic`; none: that of the backbone's weights"
    )
    head: str = Field(default="linear", description="`linear`, `normalized`, `linear_bn`, `mlp` or `mlp:1024`")
    head_init: Literal["random", "pca", "itq", "weighted_itq"] | None = Field(
        default=None,
        description="how the hash layer is initialised: `random`, or fitted to the features of the training images by "
        "`itq`, `pca` or `weighted_itq`, for the heads `linear` and `normalized`; none: `itq` for these heads on a "
        "frozen backbone, otherwise `random`",
    )
    dropout: float = Field(default=0, ge=0, lt=1, description="dropout of the features before the heads")
    freeze_backbone: bool = Field(
        default=False, description="compute the features once and train only the layers after them"
    )
    freeze_batch_norm: bool = Field(
        default=False,
        description="keep batch norm in evaluation mode: for small batches, chunks, and weights with folded batch norm",
    )

    @field_validator("mean", "std", mode="before")
    @classmethod
    def _are_three_numbers(cls, value: Any) -> Any:
        if value is None:
            return None
        numbers = value if isinstance(value, list | tuple) else [value] * 3  # red, green and blue
        if len(numbers) == 3 and all(isinstance(number, int | float) for number in numbers):
            return tuple(numbers)
        raise ValueError("use one number, or three as in [0.485, 0.456, 0.406]")

    @model_validator(mode="after")
    def _head_can_be_fitted(self) -> "ModelSection":
        if self.start_of_head != "random" and self.head not in _FITTED_HEADS:
            raise ValueError(
                f"head_init = {self.head_init!r} fits a single linear layer, but head is {self.head!r}: set head to "
                "'linear' or 'normalized', or head_init to 'random'"
            )
        return self

    @property
    def start_of_head(self) -> Literal["random", "pca", "itq", "weighted_itq"]:
        """`head_init`, or its default."""
        return self.head_init or ("itq" if self.freeze_backbone and self.head in _FITTED_HEADS else "random")

    def preprocessing(self, default: "Preprocessing") -> "Preprocessing":
        """`default`, replaced by the values that are set here."""
        names = ("size", "mean", "std", "crop_fraction", "interpolation")
        return replace(default, **{name: value for name in names if (value := getattr(self, name)) is not None})


class OptimizerSection(_Section):
    """SGD with momentum or AdamW. Rates are per step."""

    name: Literal["sgd", "adamw"] = Field(default="sgd", description="`sgd` or `adamw`")
    lr: float = Field(default=0.01, gt=0, description="learning rate")
    backbone_lr: float | None = Field(
        default=None, gt=0, description="learning rate of the backbone; none: `optimizer.lr`"
    )
    proxy_lr: float | None = Field(
        default=None, gt=0, description="learning rate of the loss's proxies and prototypes; none: `optimizer.lr`"
    )
    momentum: float = Field(default=_MOMENTUM, ge=0, lt=1, description="momentum of SGD")
    weight_decay: float = Field(default=5e-4, ge=0, description="weight decay, as defined by the optimizer")
    clip_norm: float | None = Field(default=None, gt=0, description="clip the norm of the whole gradient to this value")
    schedule: Literal["constant", "step", "cosine", "restarts"] = Field(
        default="cosine", description="`constant`, `step`, `cosine` or `restarts` (cosine with warm restarts)"
    )
    warmup_epochs: float = Field(default=0, ge=0, description="epochs of linear warm-up; may be a fraction")
    restart_epochs: int = Field(default=10, ge=1, description="`restarts`: epochs of the first period")
    restart_factor: int = Field(
        default=2, ge=1, description="`restarts`: length of a period relative to the previous one"
    )
    step_epochs: int = Field(default=10, ge=1, description="`step`: epochs between two steps")
    step_factor: float = Field(
        default=0.5, gt=0, lt=1, description="`step`: the rate is multiplied by this at each step"
    )


class TrainSection(_Section):
    """Length, batches, augmentation, validation and hardware."""

    epochs: int = Field(default=20, ge=1, description="number of epochs")
    batch_size: int = Field(default=64, ge=2, description="images per batch, over all processes; at least 2")
    chunk_size: int | None = Field(
        default=None,
        ge=1,
        description="rows processed at once per process, to save memory; the gradient is still that of the whole batch",
    )
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="seed of everything random")
    val_fraction: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="share of the training split used for validation; unsupervised losses use none",
    )
    val_n: int = Field(default=1000, ge=1, description="N of the validation mAP@N, which selects the best epoch")
    val_database: Literal["training", "held-out"] = Field(
        default="training",
        description="where validation images are searched: among the `training` images, or among each other "
        "(`held-out`), which is fairer for choosing hyperparameters",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="stop after this many epochs without a better validation score; unsupervised losses have none",
    )
    ema: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="decay of a moving average of the weights, such as 0.999; the average is validated and saved",
    )
    device: str = Field(default="auto", description="`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:1`")
    devices: int = Field(default=1, ge=1, description="number of processes (`--devices`)")
    precision: PrecisionName = Field(
        default="auto",
        description="`bf16` where it is faster, otherwise `fp32`; heads and losses always use float32",
    )
    views: Literal[1, 2] = Field(
        default=1,
        description="augmented copies of each image per batch; with a key encoder, the second is for the keys",
    )
    flip: bool = Field(default=True, description="mirror half of the images")
    min_crop: float = Field(
        default=0.3, gt=0, le=1, description="smallest share of the area that a random crop keeps; 1 disables cropping"
    )
    rand_augment: int = Field(default=0, ge=0, le=14, description="number of RandAugment operations")
    rand_augment_magnitude: int = Field(default=9, ge=0, le=30, description="magnitude of RandAugment, up to 30")
    jitter: float = Field(
        default=0,
        ge=0,
        le=1,
        description="brightness, contrast and saturation, each multiplied by 1 - jitter to 1 + jitter",
    )
    noise: float = Field(default=0, ge=0, description="Gaussian noise added to vectors, in standard deviations")
    keep_labels: float = Field(default=1, gt=0, le=1, description="share of the positive labels used for training")
    single_label: bool = Field(default=False, description="train with only one label per image")
    cache: Cache = Field(
        default="auto",
        description="where decoded images are cached: `memory`, `memmap` (on disk, also for later runs), `none`, or "
        "`auto` (the first with enough room)",
    )
    cache_gib: float = Field(default=4, ge=0, description="memory limit of `auto` in GiB, per process")


class TrackingSection(_Section):
    """What a run stores in addition to its log and its best and last checkpoint."""

    tensorboard: bool = Field(
        default=True, description="write an event file to RUN/tensorboard: `tensorboard --logdir runs`"
    )
    keep_every: int | None = Field(
        default=None, ge=1, description="also store the checkpoint of every Nth epoch, as RUN/epoch-N.safetensors"
    )


class SweepSection(_Section):
    """A search over settings, for `hashseek sweep`; `hashseek train` ignores it."""

    trials: int = Field(default=20, ge=1, description="number of trials (`--trials`)")
    seed: int = Field(default=0, ge=0, description="seed of the values to try")
    prune: bool = Field(default=True, description="stop poor trials early")
    space: dict[str, Any] = Field(default={}, description="setting -> range, see `hashseek.training.sweep_space`")


class Config(_Section):
    """Everything that determines a run, and a search over it."""

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
            raise ValueError("data.held_out_seed is set without data.held_out: set both")
        if self.optimizer.warmup_epochs >= self.train.epochs:
            raise ValueError(
                f"optimizer.warmup_epochs is {self.optimizer.warmup_epochs} and must be less than "
                f"train.epochs, {self.train.epochs}"
            )
        if self.train.batch_size % self.train.devices:
            raise ValueError(
                f"train.batch_size is {self.train.batch_size} and must be a multiple of train.devices, "
                f"{self.train.devices}: the batch is divided among them"
            )
        if self.memory is not None:
            # Without a key encoder every view is a key; with one, two views are an anchor and its key.
            n_keys = self.train.batch_size * (1 if self.memory.momentum else self.train.views)
            if self.memory.size < n_keys:
                raise ValueError(
                    f"memory.size is {self.memory.size}, but a batch has {n_keys} rows: set memory.size to at least "
                    f"{n_keys}, or lower train.batch_size"
                )
        if self.train.single_label and self.train.keep_labels < 1:
            raise ValueError(
                f"train.single_label keeps one label per image, but train.keep_labels is {self.train.keep_labels}: use "
                "only one of them"
            )
        if self.model.freeze_backbone:
            why = "with model.freeze_backbone features are computed once, without augmentation: use only one of them"
            self._refuse_changed(_OF_TRAINED_BACKBONES, why)
        if is_vector_backbone(self.model.backbone):
            why = f"the backbone {self.model.backbone} takes vectors, not images: leave it out, or set train.noise"
            self._refuse_changed(_OF_PIXELS, why)
        if self.optimizer.name == "adamw" and self.optimizer.momentum != _MOMENTUM:
            raise ValueError(
                f"optimizer.momentum is {self.optimizer.momentum}, but AdamW has no momentum: leave it out, or set "
                "optimizer.name to sgd"
            )
        return self

    def _refuse_changed(self, settings: Sequence[str], why: str) -> None:
        """Refuse values other than the defaults of settings that have no effect here."""
        for setting in settings:
            section, _, name = setting.partition(".")
            value = getattr(getattr(self, section), name)
            if value != type(getattr(self, section)).model_fields[name].default:
                raise ValueError(f"{setting} is {value}, but {why}")


def load_config(source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, a shipped configuration or a dictionary, and apply overrides such as `model.n_bits=24`.

    An override that names another loss, partner or data set removes the source's settings of the old one.

    Raises:
        BadConfig: no such file, not TOML, a misspelt key, or a value outside its limits.
    """
    name = "the configuration" if isinstance(source, Mapping) else str(source)
    return parse_config(read_config(source, overrides), source=name)


def load_data_section(source: Path) -> DataSection:
    """The section [data] of a TOML file, which may have no other, or of a shipped configuration.

    Raises:
        BadConfig: no such file, not TOML, or the section is missing or invalid.
    """
    content = read_config(source)
    if "data" not in content:
        raise BadConfig(f"{source} has no section [data]: add it, with the name of the data set and its options")
    try:
        return DataSection.model_validate(content["data"])
    except ValidationError as error:
        raise BadConfig(f"{source}, section [data]: {_explain(error)}") from None


def read_config(source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The sections with the overrides applied, not yet checked; see `load_config`.

    Raises:
        BadConfig: no such file, not TOML, or a malformed override.
    """
    if isinstance(overrides, str | Mapping):
        raise BadConfig(f"overrides must be a list such as ['model.n_bits=24'], got {overrides!r:.60}")
    content = source if isinstance(source, Mapping) else _read_toml(source)
    given = [parse_assignment(text, example="model.n_bits=24") for text in overrides]
    for key, value in given:
        section, _, name = key.rpartition(".")
        if not section or not name:
            raise BadConfig(f"write an override as section.key=value, such as model.n_bits=24, not '{key}={value}'")
    return with_values(content, given)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_find(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise BadConfig(f"{path} cannot be read: {error.strerror or error}") from None


def _find(path: Path) -> Path:
    """`path` itself, or the shipped configuration with that name (with or without `.toml`)."""
    if path.is_file():
        return path
    shipped = Path(str(resources.files("hashseek.training.configs")))
    for candidate in (shipped / path.name, shipped / f"{path.name}.toml"):
        if candidate.is_file() and path.parent == Path():
            return candidate
    hint = suggest(path.name, sorted(file.stem for file in shipped.glob("*.toml")))
    raise BadConfig(f"there is no configuration {path}: {hint} (or use a TOML file)")


def parse_config(content: dict[str, Any], *, source: str) -> Config:
    """Check a parsed configuration; `source` names it in messages."""
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise BadConfig(f"{source}: {_explain(error)}") from None


def parse_assignment(text: str, *, example: str) -> tuple[str, Any]:
    """Key and value of "key=value", where the value is TOML or a bare word, such as a path."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise BadConfig(f"write a setting as {example}, not {text!r}")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def with_values(content: Mapping[str, Any], values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A copy of a configuration's content with values by `section.key`; another name clears its section.

    Raises:
        BadConfig: a section on the way is a value.
    """
    changed = copy.deepcopy(dict(content))
    named = {"data.name": None, "loss.name": LossSection().name, "partner.name": None}  # and the default
    for key, value in sorted(values, key=lambda one: one[0] not in named):
        *sections, last = key.split(".")
        target = changed
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise BadConfig(f"the setting {key!r} does not exist: {section!r} is a value, not a section")
        if key in named and target.get("name", named[key]) != value:
            target.clear()
        target[last] = value
    return changed


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"there is no setting {place!r}: {suggest(str(first['loc'][-1]), _keys(first['loc'][:-1]))}"
    if first["type"] == "missing":
        return f"the setting {place!r} is missing"
    message = first["msg"].removeprefix("Value error, ")
    if not place:
        return message
    if first["type"] == "value_error" and isinstance(first["input"], dict):  # settings that do not fit together
        return f"section [{place}]: {message}"
    return f"the setting {place!r} is {first['input']!r}: {message[0].lower()}{message[1:]}"


def _keys(place: tuple[Any, ...]) -> list[str]:
    model: type[BaseModel] = Config
    for part in place:
        model = section_model(model.model_fields[str(part)]) or model
    return list(model.model_fields)


def section_model(field: FieldInfo) -> type[BaseModel] | None:
    """The class of a section; None for a plain value. An optional section is a union with None."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
