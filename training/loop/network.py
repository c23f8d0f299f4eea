"""What is trained: the hash model, layers that only training needs, the losses, and the memory of keys."""

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.collectives import gather
from hashseek.training.config import Config, ProjectionSection
from hashseek.training.loop.dropout import seed_by_row
from hashseek.training.losses import LOSSES, build_loss, loss_class
from hashseek.training.losses.batches import Memory
from hashseek.training.losses.memory import KeyQueue, update_key_encoder

Heads = dict[str, Tensor]
"""What the losses read, by name: outputs (B, K), features (B, D), projection (B, P), logits (B, C)."""


class Network(nn.Module):
    """Prepared images, vectors, or cached features -> `Heads`.

    Args:
        model: the hash model.
        reads: which of outputs, features and projection the losses read.
        logits_on: the input of the linear classifier; None for no classifier.
        n_classes: C, the classifier's width.
        projection: the settings of the projection head, an MLP with one hidden layer on the features.
        from_features: inputs are features of the backbone, and only the layers after it are trained.
        dropout: share of the features that is dropped before every head.
    """

    def __init__(
        self,
        model: HashModel,
        *,
        reads: set[str],
        logits_on: str | None,
        n_classes: int,
        projection: ProjectionSection | None,
        from_features: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.model = model
        self.reads = reads | ({logits_on} if logits_on else set())
        self.logits_on = logits_on
        self.from_features = from_features
        self.dropout = nn.Dropout(dropout)
        self.widths = {"outputs": model.n_bits, "features": model.n_features}
        self.projection: nn.Module | None = None
        if projection is not None:
            hidden = projection.hidden or model.n_features
            self.projection = nn.Sequential(
                nn.Linear(model.n_features, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, projection.width)
            )
            self.widths["projection"] = projection.width
        self.classifier = nn.Linear(self.widths[logits_on], n_classes) if logits_on else None
        self.seeds = seed_by_row(self)

    def forward(self, inputs: Tensor, seeds: Tensor | None = None) -> Heads:
        """The heads that are read. Autocast applies to the backbone; everything after it runs in float32.

        `seeds` (B,) determine what dropout drops in each row, see `hashseek.training.loop.dropout`.
        """
        self.seeds.now = seeds
        features = inputs if self.from_features else self.model.features(inputs)
        with torch.autocast(features.device.type, enabled=False):
            features = self.dropout(features.float())
            heads = {"features": features}
            if "outputs" in self.reads:
                heads["outputs"] = self.model.outputs(features)
            if self.projection is not None:
                heads["projection"] = self.projection(features)
            if self.classifier is not None and self.logits_on is not None:
                heads["logits"] = self.classifier(heads[self.logits_on])
        return {name: rows for name, rows in heads.items() if name in self.reads or name == "logits"}

    def trained(self) -> nn.ModuleList:
        """The parts that learn; without the backbone if inputs are its features."""
        parts = [self.model.head, self.projection, self.classifier]
        if not self.from_features:
            parts.append(self.model.backbone)
        return nn.ModuleList(part for part in parts if part is not None)


class Objective(nn.Module):
    """The loss and the classification loss, if there is one: `Heads` of the whole batch -> terms by name."""

    def __init__(self, loss: nn.Module, *, on: str, partner: nn.Module | None, weight: float) -> None:
        super().__init__()
        self.loss = loss
        self.on = on
        self.partner = partner
        self.weight = weight

    def forward(self, heads: Heads, labels: Tensor, *, memory: Memory | None, epoch: int) -> dict[str, Tensor]:
        """Weighted terms, 0-dim; training minimises their sum."""
        logits = heads.get("logits")
        given = {"memory": memory, "logits": logits, "epoch": epoch, "features": heads.get("features")}
        terms: dict[str, Tensor] = self.loss(heads[self.on], labels, **given)
        if self.partner is not None:
            found = self.partner(heads[self.on], labels, logits=logits, epoch=epoch)
            terms = terms | {name: terms.get(name, 0) + self.weight * value for name, value in found.items()}
        return terms


class Keys(nn.Module):
    """The rows a loss contrasts with: outputs of a momentum encoder, kept in a queue.

    With momentum 0 there is no second encoder: the keys are the network's own rows.
    """

    def __init__(self, network: Network, queue: KeyQueue, *, on: str, momentum: float) -> None:
        super().__init__()
        self.on = on
        self.momentum = momentum
        # A frozen backbone is shared with the network instead of copied.
        shared = {id(network.model.backbone): network.model.backbone} if network.from_features else {}
        self.encoder = copy.deepcopy(network, shared).requires_grad_(False) if momentum else None
        self.queue = queue

    @torch.no_grad()
    def follow(self, network: Network) -> None:
        """Move the momentum encoder towards the network; called before each batch."""
        if self.encoder is not None:
            update_key_encoder(self.encoder.trained(), network.trained(), self.momentum)

    @torch.no_grad()
    def of(self, inputs: Tensor, seeds: Tensor, heads: Heads, *, chunk_size: int | None) -> Tensor:
        """Keys (b, D) of this process's inputs, `chunk_size` at a time; with momentum 0, the rows of their heads."""
        if self.encoder is None:
            return heads[self.on].detach()
        chunks = zip(*(torch.split(part, chunk_size or len(part)) for part in (inputs, seeds)), strict=True)
        return torch.cat([self.encoder(*chunk)[self.on] for chunk in chunks])

    def memory(self, keys: Tensor, labels: Tensor) -> Memory:
        """The keys of the batch from all processes, then those in the queue; adds the keys to the queue."""
        memory = self.queue.memory(gather(keys), gather(labels))
        self.queue.enqueue(keys, labels)
        return memory


def is_unsupervised(config: Config) -> bool:
    """Whether training uses no labels."""
    return loss_class(config.loss.name).kind == "unsupervised" and config.partner is None


def build_network(config: Config, model: HashModel, *, n_classes: int) -> tuple[Network, Objective, Keys | None]:
    """Network, losses and memory for `config`.

    Raises:
        BadConfig: sections that contradict each other.
    """
    check_losses(config)
    on, partner = config.loss.on, config.partner
    if not n_classes and not is_unsupervised(config):
        known = [name for name in LOSSES if loss_class(name).kind == "unsupervised"]
        raise BadConfig(
            f"the loss {(partner or config.loss).name!r} learns from labels, but the data set has none: use one of "
            f"{', '.join(known)}"
        )
    kind = loss_class(config.loss.name)
    network = Network(
        model,
        reads={on, "features"} if kind.reads_features else {on},
        logits_on=_logits_on(config),
        n_classes=n_classes,
        projection=config.projection,
        from_features=config.model.freeze_backbone,
        dropout=config.model.dropout,
    )
    width = network.widths[on]
    build: dict[str, Any] = {"n_classes": n_classes, "n_bits": width}
    objective = Objective(
        build_loss(config.loss.name, **build, **config.loss.options()),
        on=on,
        partner=None if partner is None else build_loss(partner.name, **build, **partner.options()),
        weight=1.0 if partner is None else partner.weight,
    )
    if config.train.chunk_size is not None:
        _check_chunks(config, model)
    if "outputs" not in network.reads:
        model.head.requires_grad_(False)  # random directions: their signs are still a code of the features
    return network, objective, _build_keys(config, network, width=width, n_classes=n_classes)


def _logits_on(config: Config) -> Literal["outputs", "features", "projection"] | None:
    """What a classifier reads; None if no loss classifies."""
    section = config.partner or config.loss
    return section.on if loss_class(section.name).kind == "classification" else None


def check_losses(config: Config) -> None:
    """Refuse losses and sections that contradict each other.

    Raises:
        BadConfig: what contradicts what.
    """
    on, partner = config.loss.on, config.partner
    classifies = loss_class(config.loss.name).kind == "classification"
    if partner is not None and loss_class(partner.name).kind != "classification":
        known = [name for name in LOSSES if loss_class(name).kind == "classification"]
        raise BadConfig(
            f"partner.name is {partner.name!r}, but a partner must be a classification loss: one of {', '.join(known)}"
        )
    if partner is not None and classifies:
        raise BadConfig(
            f"loss.name {config.loss.name!r} and partner.name {partner.name!r} both classify: leave the partner out"
        )
    if partner is not None and "quantization" in partner.options():
        raise BadConfig("the quantisation term belongs to the loss: set loss.quantization, not partner.quantization")
    needs_projection = "projection" in (on, _logits_on(config))
    if needs_projection and config.projection is None:
        raise BadConfig("a loss on the projection needs a section [projection]: add one, for example with width = 128")
    if config.projection is not None and not needs_projection:
        raise BadConfig("no loss reads the section [projection]: set loss.on = 'projection' or remove it")
    if config.model.freeze_backbone and "outputs" not in (on, _logits_on(config)):
        raise BadConfig(
            f"model.freeze_backbone leaves only the head to learn, but no loss reads its outputs (loss.on is {on!r}): "
            "set loss.on or partner.on to 'outputs', or unfreeze the backbone"
        )
    if config.memory is not None and loss_class(config.loss.name).memory_kind == "none":
        raise BadConfig(f"the loss {config.loss.name!r} does not use a memory: leave the section [memory] out")
    for section, options in (("loss", config.loss.options()), ("partner", partner.options() if partner else {})):
        if own := {"n_bits", "n_classes"} & options.keys():
            raise BadConfig(
                f"{section}.{min(own)} cannot be set: model.n_bits decides the number of bits, and the data set that "
                "of labels"
            )


def _check_chunks(config: Config, model: HashModel) -> None:
    """Refuse batch norm that would compute its statistics from a chunk instead of the batch."""

    def has_batch_norm(part: nn.Module) -> bool:
        return any(isinstance(module, _BatchNorm) for module in part.modules())

    is_live = not (config.model.freeze_backbone or config.model.freeze_batch_norm)
    for part, remedy in ((model.head, "model.head = 'linear'"), (model.backbone, "model.freeze_batch_norm = true")):
        if has_batch_norm(part) and (is_live or part is model.head):
            raise BadConfig(
                f"train.chunk_size is {config.train.chunk_size}, but batch norm would compute its statistics from a "
                f"chunk and not from the batch: set {remedy}, or leave chunk_size out"
            )


def _build_keys(config: Config, network: Network, *, width: int, n_classes: int) -> Keys | None:
    settings = config.memory
    if settings is None:
        return None
    queue = KeyQueue(
        n_classes=n_classes,
        n_bits=width,
        size=settings.size,
        until_full=settings.until_full,
        normalized=loss_class(config.loss.name).memory_kind == "normalized",
    )
    return Keys(network, queue, on=config.loss.on, momentum=settings.momentum)
