"""What the code of a loss cannot say about it: its source, its use, and the values its hyperparameters may take.

`ENTRIES` has one entry a loss. Everything else in a list of losses (defaults, meanings, terms, what a loss needs) is
read from the loss itself by `facts`, so that it is written down once.
"""

import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from hashseek.retrieval.errors import BadCodes
from hashseek.training.losses import CLASSIFICATION, LOSSES, build_loss, common, hyperparameters
from hashseek.training.losses.contrastive import contrast_sets as contrast
from hashseek.training.losses.hashing.hashnet import CONTINUATIONS
from hashseek.training.losses.hashing.hyp2 import PARTS
from hashseek.training.losses.hashing.quantization import QUANTIZERS

KINDS = ("hashing", "contrastive", "classification")

# Values


@dataclass(frozen=True)
class Numbers:
    """The numbers from `least` to `most`, both included unless `above` leaves `least` out."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    whole: bool = False

    def __str__(self) -> str:
        kind = "whole, " if self.whole else ""
        if self.most < math.inf:
            return f"{kind}in {'(' if self.above else '['}{self.least:g}, {self.most:g}]"
        if self.least == -math.inf:
            return f"{kind}any number"
        return f"{kind}{'>' if self.above else '>='} {self.least:g}"


Values = Numbers | tuple[str, ...] | tuple[bool, ...]

ANY = Numbers()
POSITIVE = Numbers(0, above=True)
NOT_NEGATIVE = Numbers(0)
SHARE = Numbers(0, 1)


# Entries


@dataclass(frozen=True)
class Entry:
    """What only the literature and experience tell about a loss."""

    kind: str
    """One of `KINDS`."""
    paper: str
    """Authors and place of publication."""
    formula: str
    """The equations, and the code whose values and gradients the formula reproduces, if there is one."""
    use: str
    """What sets it apart: when to take it."""
    values: Mapping[str, Values] = field(default_factory=dict)
    """What each hyperparameter may be; switches are left out, for their default says it."""
    beside: str = ""
    """What it needs that is not a part of it."""
    queue: str = "optional"
    """How much it needs a queue, if it takes one."""


_STUDY = "Audibert et al., Multi-Label Contrastive Learning: A Comprehensive Study, arXiv 2412.00101"
_MLML = "Zhang et al., Simple and Robust Loss Design for Multi-Label Learning with Missing Labels, arXiv 2112.07368"
_HYP2 = "Xu et al., HyP2 Loss, ACM MM 2022"
_SIMDIS = "Huang et al., Similarity-Dissimilarity Loss, arXiv 2410.13439"

_TEMPERED: Mapping[str, Values] = {"tau": POSITIVE, "reduction": contrast.REDUCTIONS}
_HYP2_VALUES: Mapping[str, Values] = {
    "beta": NOT_NEGATIVE,
    "zeta": Numbers(-1, 1),
    "offset": ANY,
    "parts": PARTS,
}
_SUPCON_VALUES: Mapping[str, Values] = {
    **_TEMPERED,
    "positives": ("any", "all"),
    "base_temperature": POSITIVE,
}
_REG_VALUES: Mapping[str, Values] = {**_TEMPERED, "alpha": ANY}
_REDUCED: Mapping[str, Values] = {"reduction": common.REDUCTIONS}
_CENTRES: Mapping[str, Values] = {"centres": common.CENTRES, "seed": Numbers(0, whole=True)}

ENTRIES: dict[str, Entry] = {
    "hyp2": Entry(
        "hashing",
        _HYP2,
        "Eqs. 2-4",
        "the default: images with several labels; cheap, for it compares with C proxies and the batch alone",
        _HYP2_VALUES,
    ),
    "hyp2_proxy": Entry(
        "hashing",
        _HYP2,
        "Table 5, the proxy term of Eq. 2",
        "ablation of hyp2, and equal to it where no image has two labels",
        _HYP2_VALUES,
    ),
    "hyp2_pair": Entry(
        "hashing",
        _HYP2,
        "Table 5, our formula",
        "ablation of hyp2: pairs of images without proxies",
        _HYP2_VALUES,
    ),
    "hyp2_proxy_pair": Entry(
        "hashing",
        _HYP2,
        "Table 5, our formula",
        "ablation of hyp2: all pairs beside the proxies, not only irrelevant ones",
        _HYP2_VALUES,
    ),
    "dsh": Entry(
        "hashing",
        "Liu et al., Deep Supervised Hashing for Fast Image Retrieval, CVPR 2016",
        "authors' Caffe code (lhmRyan 631901f, read); dense: DeepHash-pytorch ab14068",
        "baseline on distances of pairs: similar ones together, others a margin apart",
        {"m": POSITIVE, "alpha": NOT_NEGATIVE},
    ),
    "dpsh": Entry(
        "hashing",
        "Li et al., Feature Learning based Deep Supervised Hashing with Pairwise Labels, IJCAI 2016",
        "DeepHash-pytorch ab14068; its value also authors' code (jiangqy 0423181)",
        "baseline on the likelihood of pairs",
        {"eta": NOT_NEGATIVE},
    ),
    "dhn": Entry(
        "hashing",
        "Zhu et al., Deep Hashing Network for Efficient Similarity Retrieval, AAAI 2016",
        "authors' TensorFlow code (thulab)",
        "as dpsh with a smooth quantiser; balance where similar pairs are rare",
        {
            "lam": NOT_NEGATIVE,
            "inner": POSITIVE,
            "quantizer": tuple(QUANTIZERS),
            "clip": POSITIVE,
        },
    ),
    "hashnet": Entry(
        "hashing",
        "Cao et al., HashNet: Deep Learning to Hash by Continuation, ICCV 2017",
        "authors' code (thuml 85387b8); DeepHash-pytorch ab14068",
        "where similar pairs are rare; tanh sharpens with the epochs in place of a quantisation term",
        {"a": POSITIVE, "continuation": CONTINUATIONS, "class_num": POSITIVE},
    ),
    "tie_aware": Entry(
        "hashing",
        "Hashseek's own; He et al., Hashing as Tie-Aware Learning to Rank, CVPR 2018, with the likelihood of DPSH",
        "training/losses/hashing/tie_aware.py; no published code",
        "short codes, and wherever mAP counts: it trains the ranking itself, ties included",
        {"a": POSITIVE, "weight": NOT_NEGATIVE},
    ),
    "idhn": Entry(
        "hashing",
        "Zhang et al., Improved Deep Hashing with Soft Pairwise Similarity, IEEE TMM 2020",
        "authors' code (pectinid16 5f3953d)",
        "where the number of shared labels shall count, not only whether there is one",
        {"gamma": NOT_NEGATIVE, "alpha": NOT_NEGATIVE},
    ),
    "csq": Entry(
        "hashing",
        "Yuan et al., Central Similarity Quantization, CVPR 2020",
        "DeepHash-pytorch ab14068; centres also authors' code (yuanli2333 55cab00)",
        "fixed centres far apart, nothing to learn beside the network; few labels an image",
        {"lam": NOT_NEGATIVE, **_CENTRES},
    ),
    "orthohash": Entry(
        "hashing",
        "Hoe et al., One Loss for All: Deep Hashing with a Single Cosine Similarity, NeurIPS 2021",
        "authors' code (kamwoh 94c4a03)",
        "fixed centres and one softmax, no quantisation weight to tune; few labels an image",
        {"s": POSITIVE, "m": Numbers(0, 2), "margin": ("cosine", "arc"), **_CENTRES},
        beside="batch norm after the hash layer",
    ),
    "proxy_anchor": Entry(
        "hashing",
        "Kim et al., Proxy Anchor Loss for Deep Metric Learning, CVPR 2020",
        "Eq. 4; authors' code (tjddus9597 51db570)",
        "learned proxies that look at their hardest rows; made for one label an image",
        {"alpha": POSITIVE, "delta": ANY},
    ),
    "supcon": Entry(
        "contrastive",
        f"Khosla et al., Supervised Contrastive Learning, NeurIPS 2020; {_SIMDIS}",
        "Khosla Eq. 2; Huang Eqs. 1-3, ANY; code HobbitLong/SupContrast",
        "the plain contrast: one shared label is as good as five",
        _SUPCON_VALUES,
    ),
    "supcon_all": Entry(
        "contrastive",
        f"Khosla et al., Supervised Contrastive Learning, NeurIPS 2020; {_SIMDIS}",
        "Khosla Eq. 2; Huang Eqs. 1-3, ALL; code HobbitLong/SupContrast",
        "only the same labels attract: needs a queue where label sets vary, or there are no positives",
        _SUPCON_VALUES,
    ),
    "mulsupcon": Entry(
        "contrastive",
        "Zhang and Wu, Multi-Label Supervised Contrastive Learning, AAAI 2024",
        f"Eqs. 5-7 of {_SIMDIS}; code williamzhangsjtu/MulSupCon 42b2302",
        "every label of an image pulls on its own; images with many labels weigh more",
        {"tau": POSITIVE, "reduction": ("labels", "sample", *contrast.REDUCTIONS)},
    ),
    "l_base": Entry(
        "contrastive",
        _STUDY,
        "Eq. 1",
        "pull in proportion to the overlap of labels, without anything to learn or to balance",
        _TEMPERED,
    ),
    "l_proto": Entry(
        "contrastive",
        _STUDY,
        "Eq. 2",
        "prototypes alone, no pairs: small batches",
        _TEMPERED,
    ),
    "msc": Entry(
        "contrastive",
        f"Audibert et al., ECML-PKDD 2024; {_STUDY}",
        "Eqs. 4-5",
        "rare labels: each label of an image has the same say, however many rows carry it",
        {**_TEMPERED, "beta": NOT_NEGATIVE},
    ),
    "wo_reg": Entry(
        "contrastive",
        _STUDY,
        "Eqs. 11 and 15, W/O-REG",
        "as msc with prototypes that are anchors too; the control for reg",
        _REG_VALUES,
    ),
    "reg": Entry(
        "contrastive",
        _STUDY,
        "Eqs. 11, 15-19",
        "as wo_reg, and positives that are close enough are no longer pushed apart",
        _REG_VALUES,
    ),
    "supcon_reg": Entry(
        "contrastive",
        _STUDY,
        "Eq. 25",
        "the regulariser of reg on plain supcon, without prototypes",
        {**_TEMPERED, "positives": ("any", "all")},
    ),
    "simdis": Entry(
        "contrastive",
        _SIMDIS,
        "Eqs. 13-16",
        'positives with like labels count more, but only with mode "outside"; "inside" trains exactly as supcon',
        {**_TEMPERED, "mode": ("inside", "outside", "outside_norm")},
    ),
    "hbl": Entry(
        "contrastive",
        "Learning Semantic Boundaries: An Adaptive Structural Loss for Multi-Label Contrastive Learning (Hierarchical "
        "Boundary Learning), OpenReview lGvQaiBiD2",
        "Eqs. 1-7",
        "margins between close and distant positives and negatives, on top of supcon or mulsupcon",
        {
            "base": ("any", "mulsupcon"),
            "tau": POSITIVE,
            "lam": NOT_NEGATIVE,
            "gamma": NOT_NEGATIVE,
            "m_rel": NOT_NEGATIVE,
            "m_abs": NOT_NEGATIVE,
            "k_min": Numbers(1, whole=True),
            "gate": ("positives", "soft"),
            "median": ("mean", "lower"),
            "reduction": ("batch", "valid", "sum", "labels", "sample"),
        },
        queue="a batch alone rarely has k_min positives",
    ),
    "clml": Entry(
        "contrastive",
        "Ma et al., Label Structure Preserving Contrastive Embedding for Multi-Label Learning with Missing Labels, "
        "arXiv 2209.01314",
        "Eqs. 4, 6-10; code chuangua/ContrastiveLossMLML 7dcac9a",
        "missing labels: an addition to a classification loss, on the raw features in front of its layer",
        {
            "lam": NOT_NEGATIVE,
            "floor": NOT_NEGATIVE,
            "delta": Numbers(0, 1, above=True),
            "start_epoch": Numbers(0, whole=True),
            "scale": ("mean", "none"),
            "eps": NOT_NEGATIVE,
        },
        beside="a classification loss of the logits",
    ),
    "bce": Entry(
        "classification",
        "a textbook loss",
        "code xinyu1205/robust-loss-mlml dcfa4d5, but exact where that is clamped",
        "the baseline of multi-label classification",
        _REDUCED,
    ),
    "focal": Entry(
        "classification",
        "Lin et al., Focal Loss for Dense Object Detection, ICCV 2017",
        "Eq. 4; code xinyu1205/robust-loss-mlml dcfa4d5",
        "cells that are right already count less",
        {"gamma": NOT_NEGATIVE, **_REDUCED},
    ),
    "asl": Entry(
        "classification",
        "Ridnik et al., Asymmetric Loss For Multi-Label Classification, ICCV 2021",
        "authors' code (Alibaba-MIIL/ASL 8c9e0bd)",
        "few labels an image among many: easy negatives drop out",
        {"gamma_pos": NOT_NEGATIVE, "gamma_neg": NOT_NEGATIVE, "m": SHARE, **_REDUCED},
    ),
    "zlpr": Entry(
        "classification",
        f"Su et al., ZLPR: A Novel Loss for Multi-label Classification, arXiv 2208.02955; {_STUDY}",
        "Eq. 21 of the study",
        "every label ranked against the threshold 0; nothing to tune",
        _REDUCED,
    ),
    "hill": Entry(
        "classification",
        _MLML,
        "authors' code (xinyu1205/robust-loss-mlml dcfa4d5)",
        "missing labels: negatives that look positive count less",
        {"lam": ANY, "margin": ANY, "gamma": NOT_NEGATIVE, **_REDUCED},
    ),
    "splc": Entry(
        "classification",
        _MLML,
        "authors' code (xinyu1205/robust-loss-mlml dcfa4d5)",
        "missing labels: those the network is sure of are put in",
        {
            "tau": SHARE,
            "margin": ANY,
            "gamma": NOT_NEGATIVE,
            "start_epoch": Numbers(0, whole=True),
            **_REDUCED,
        },
    ),
}


# Facts


@dataclass(frozen=True)
class Hyperparameter:
    """One keyword of a loss."""

    name: str
    default: Any
    values: Values
    meaning: str


@dataclass(frozen=True)
class Facts:
    """What a loss says about itself."""

    name: str
    method: type[nn.Module]
    fixed: Mapping[str, Any]
    """Hyperparameters of the method that this name has set for good."""
    text: str
    """Formula and remarks: the docstring up to its arguments."""
    terms: tuple[str, ...]
    learned: tuple[str, ...]
    """Parameters, one row a label."""
    held: tuple[str, ...]
    """Buffers, one row a label."""
    memory: bool
    """Whether it contrasts with a queue if it is given one."""
    logits: str
    """Whether it reads logits: "needed", "optional" or "not read"."""
    hyperparameters: tuple[Hyperparameter, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        """What must or may be there beside outputs and labels."""
        entry = ENTRIES[self.name]
        logits = {"needed": ("logits",), "optional": ("logits (optional)",), "not read": ()}[self.logits]
        return (
            *(f"{name} (learned)" for name in self.learned),
            *(f"{name} (fixed)" for name in self.held),
            *((f"queue ({entry.queue})",) if self.memory else ()),
            *logits,
            *((entry.beside,) if entry.beside else ()),
        )


def facts(name: str) -> Facts:
    """What the loss `name` says about itself: its signature, its docstring, and what it does with a tiny batch.

    Raises:
        BadConfig: there is no such loss.
    """
    n_classes, n_bits = 4, 8
    with torch.random.fork_rng(devices=[]):  # building draws proxies
        loss = build_loss(name, n_classes=n_classes, n_bits=n_bits)
    labels = torch.eye(2, n_classes)
    batch: dict[str, Any] = {"memory": (torch.ones(2, n_bits), labels), "logits": torch.zeros(2, n_classes)}
    outputs = torch.ones(2, n_bits)

    def reads(**wrong: object) -> bool:
        try:
            loss(outputs, labels, **batch | wrong)
        except BadCodes:
            return True
        return False

    built = LOSSES[name]
    fixed = built.keywords if isinstance(built, partial) else {}
    text, meanings = _docstring(type(loss))
    logits = "not read"
    if reads(logits=torch.zeros(0, 0)):
        logits = "needed" if name in CLASSIFICATION else "optional"
    return Facts(
        name=name,
        method=type(loss),
        fixed=fixed,
        text=text,
        terms=tuple(loss(outputs, labels, **batch)),
        learned=tuple(key for key, p in loss.named_parameters() if p.shape == (n_classes, n_bits)),
        held=tuple(key for key, b in loss.named_buffers() if b.shape == (n_classes, n_bits)),
        memory=reads(memory=object()),
        logits=logits,
        hyperparameters=tuple(
            Hyperparameter(key, default, values_of(name, key), meanings[key])
            for key, default in hyperparameters(name).items()
        ),
    )


def values_of(name: str, key: str) -> Values:
    """What the hyperparameter `key` of the loss `name` may be; where its default is None, it may be None too."""
    if isinstance(hyperparameters(name)[key], bool):
        return (False, True)
    return ENTRIES[name].values[key]


def _docstring(method: type[nn.Module]) -> tuple[str, dict[str, str]]:
    """The text before the arguments, and the meaning of each argument."""
    text, _, rest = (inspect.getdoc(method) or "").partition("\nArgs:\n")
    arguments = rest.partition("\nRaises:")[0]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", arguments, re.M)
    return text.strip(), {key: re.sub(r"\s+", " ", meaning) for key, meaning in found}
