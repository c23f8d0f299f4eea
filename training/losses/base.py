"""The base class of all losses: it checks settings and batches, so that a subclass contains only its formula."""

import inspect
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.training.losses.batches import Batch, check_batch, check_memory
from hashseek.training.losses.hyperparameters import Hyperparameter, Number, check, check_keys

KINDS = ("hashing", "contrastive", "classification", "unsupervised")


class Loss(nn.Module):
    """A loss of outputs (B, K) and labels (B, C), with its hyperparameters.

    A subclass declares its hyperparameters as annotated attributes (see `hyperparameters.py`), describes itself in the
    class attributes below, and implements `terms`. A subclass that assigns a hyperparameter without annotating it
    fixes its value: it is not a hyperparameter of that subclass.

    Args:
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        settings: hyperparameters by name.

    Raises:
        BadConfig: an unknown hyperparameter, or a value outside its limits.
    """

    kind: ClassVar[str] = "hashing"
    """One of `KINDS`."""
    source: ClassVar[str] = ""
    """Authors, title and place of publication."""
    formula: ClassVar[str] = ""
    """The equations, and the published code with the same values and gradients, if there is one."""
    use: ClassVar[str] = ""
    """When to choose this loss."""
    needs: ClassVar[tuple[str, ...]] = ()
    """What it needs in addition to outputs, labels, memory and logits, e.g. "proxies (learned)"."""
    memory_kind: ClassVar[Literal["none", "raw", "normalized"]] = "none"
    """Whether it compares with a memory, and how a queue should keep the rows: unchanged, or with length 1."""
    reads_logits: ClassVar[bool] = False
    """Whether it reads logits, if they are given, in addition to the outputs."""
    reads_features: ClassVar[bool] = False
    """Whether it reads the features that the outputs are computed from."""

    def __init__(self, *, n_classes: int, n_bits: int, **settings: Any) -> None:
        super().__init__()
        least = 0 if self.kind == "unsupervised" else 1
        check("n_classes", n_classes, Number("C, number of labels", least=least, whole=True))
        check("n_bits", n_bits, Number("K, width of the outputs", least=1, whole=True))
        self.n_classes = n_classes
        self.n_bits = n_bits
        declared = self.hyperparameters()
        check_keys(f"the loss {type(self).__name__}", settings, declared)
        for name, hyper in declared.items():
            value = settings.get(name, hyper.default)
            hyper.check(value)
            setattr(self, hyper.attribute, value)
        for hyper in declared.values():
            derived = hyper.limits.derived if isinstance(hyper.limits, Number) else None
            if derived is not None and getattr(self, hyper.attribute) is None:
                setattr(self, hyper.attribute, derived(self))

    @classmethod
    def hyperparameters(cls) -> dict[str, Hyperparameter]:
        """The hyperparameters by name, those of base classes first."""
        found: dict[str, Hyperparameter] = {}
        for part in reversed([part for part in cls.__mro__ if issubclass(part, Loss)]):
            annotations = inspect.get_annotations(part, eval_str=True)
            fixed = vars(part).keys() - annotations.keys()
            found = {name: hyper for name, hyper in found.items() if hyper.attribute not in fixed}
            for attribute, annotation in annotations.items():
                if hasattr(annotation, "__metadata__"):  # Annotated[type, limits]
                    limits, *keyword = annotation.__metadata__
                    name = keyword[0] if keyword else attribute
                    found[name] = Hyperparameter(name, attribute, vars(part).get(attribute), limits)
        return found

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,
        logits: Tensor | None = None,
        epoch: int = 0,
        features: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The weighted terms by name, 0-dim, in float32 or float64; their sum is what is minimised.

        Every loss accepts all arguments and uses only those that it needs. Rows, labels or pairs with nothing to
        compare contribute exactly 0.

        Args:
            outputs: (B, K).
            labels: (B, C), 0/1 of any type.
            memory: rows to compare with, (ref (Q, K), ref_y (Q, C)); see `Memory`.
            logits: (B, C).
            epoch: the current epoch, from 0.
            features: (B, D), what the outputs are computed from.

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or outputs, logits or memory that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            batch = self._checked(outputs, labels, memory, logits, epoch)
            terms = self.terms(batch._replace(features=features))
        if not isinstance(terms, dict) or any(not isinstance(term, Tensor) or term.ndim for term in terms.values()):
            raise BadConfig(f"terms() of {type(self).__name__} must return 0-dimensional tensors by name")
        return terms

    def _checked(self, outputs: Tensor, labels: Tensor, memory: object, logits: Tensor | None, epoch: int) -> Batch:
        """The checked arguments of `forward`."""
        n_classes, n_bits = self.n_classes, self.n_bits
        rows, binary = check_batch(outputs, labels, n_classes=n_classes, n_bits=n_bits)
        held = None
        if self.memory_kind != "none":
            held = check_memory(memory, rows, n_classes=n_classes, n_bits=n_bits)
        if not self.reads_logits or logits is None:
            return Batch(rows, binary, held, None, epoch)
        checked, _ = check_batch(logits, labels, n_classes=n_classes, n_bits=n_classes, what="logits")
        return Batch(rows, binary, held, checked, epoch)

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The formula: weighted terms by name, 0-dim and attached to the graph of `batch.outputs`."""
        raise NotImplementedError


class ClassificationLoss(Loss):
    """A loss of one logit per label: `batch.outputs` are the logits (B, C).

    It reads `logits` if they are given, and ignores the outputs. Without logits, the outputs are the logits, for which
    n_bits must be n_classes.
    """

    kind = "classification"

    def _checked(self, outputs: Tensor, labels: Tensor, memory: object, logits: Tensor | None, epoch: int) -> Batch:  # noqa: ARG002
        """The logits as the outputs of the batch.

        Raises:
            BadCodes: no logits while n_bits differs from n_classes, or what `check_batch` refuses.
        """
        if logits is None and self.n_bits != self.n_classes:
            raise BadCodes(
                f"a classification loss needs one logit per label, but the {self.n_bits} outputs do not match the "
                f"{self.n_classes} labels: pass logits of shape (B, {self.n_classes})"
            )
        rows, what = (outputs, "outputs") if logits is None else (logits, "logits")
        x, y = check_batch(rows, labels, n_classes=self.n_classes, n_bits=self.n_classes, what=what)
        return Batch(x, y, None, None, epoch)
