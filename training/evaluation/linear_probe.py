"""The second stage of contrastive training: a linear probe on the frozen encoder, and its classification metrics."""

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hashseek.retrieval.checkpoint import Checkpoint
from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.training.data.broken_images import without_broken
from hashseek.training.data.hidden_labels import hide_labels
from hashseek.training.data.splits import Split, Splits, check_labelled
from hashseek.training.evaluation.classification_metrics import class_and_overall, figures, mean_average_precision
from hashseek.training.evaluation.logistic_regression import Probe, fit_probe
from hashseek.training.evaluation.split_encoder import SplitEncoder, check_kind, check_trained_on
from hashseek.training.loop.validation import divided
from hashseek.training.progress import Progress

Layer = Literal["features", "outputs"]
# Strongest first: each probe starts from the previous one.
DECAYS = (1.0, 0.1, 0.01, 1e-3, 1e-4)


def probe_checkpoint(
    checkpoint: Checkpoint,
    splits: Splits,
    *,
    layer: Layer = "features",
    device: str = "auto",
    precision: str = "auto",
    as_trained: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Fit a linear probe to the training split and score it on the query split.

    The weight decay with the best mAP on a validation part of the training split is used for a final fit to all of it.
    It is the part that training with labels leaves out: features that the encoder has memorised would need no weight
    decay. An unsupervised loss trains on it too. A label is predicted if its probability is at least 0.5. Labels that
    were hidden from the checkpoint's training are also hidden from the probe, but the weight decay and the metrics use
    all labels.

    Args:
        checkpoint: the frozen encoder.
        splits: the data set; the query split is only scored.
        layer: the input of the classifier: the backbone's features (D), or the outputs (K) whose signs are the code.
        device, precision: see `Encoder`.
        as_trained: refuse other splits than those of the training; otherwise they are noted.
        progress: shows progress bars and notes.

    Returns:
        weight_decay, val_mAP, and the metrics of `classification_metrics`: p@1, mAP, HA, ebF1, maF1, miF1, Hamming
        loss, CP, CR, CF1, OP, OR, OF1.

    Raises:
        HashseekError: the data set has no labels, images are broken, the data set does not fit the checkpoint, the
            splits are not those of the training although `as_trained` is set, the training split is too small, or
            labels were held out of the training.
    """
    progress = progress or Progress(quiet=True)
    if held_out := checkpoint.header.training.get("held_out"):
        raise BadConfig(
            f"the labels {', '.join(held_out)} were held out of the checkpoint's training, but the probe is fitted to "
            "all labels and images of the training split: probe a checkpoint that was trained without data.held_out"
        )
    check_labelled(splits)
    check_kind(checkpoint.header, splits, name="the checkpoint")
    for note in check_trained_on(checkpoint.header, splits, name="the checkpoint", refuse=as_trained):
        progress.console.print(f"note: {note}", markup=False)
    encoder = SplitEncoder(checkpoint, device=device, precision=precision)
    splits = without_broken(splits, ("train", "query"), source="the data set")

    def read(split: Split, title: str) -> tuple[Tensor, NDArray[np.uint8]]:
        found = encoder.features(split, progress, title)
        if layer == "outputs":
            found = checkpoint.head(found)
        return torch.tensor(found), split.labels

    train, labels = read(splits.train, "training split")
    query, query_labels = read(splits.query, "query split")
    trained = checkpoint.header.training.get("train", {})
    share, seed = trained.get("val_fraction", 0.1), trained.get("seed", 0)
    n_val = round(share * len(train))
    if not 0 < n_val < len(train):
        raise BadDataset(
            f"a share of {share} of {len(train)} training images leaves none to choose the weight decay with, or none "
            "to fit: add images"
        )
    fit_rows, val_rows = divided(len(train), n_val, seed=seed)
    observed = hide_labels(
        labels, share=trained.get("keep_labels", 1), single=trained.get("single_label", False), seed=seed
    )
    targets = torch.from_numpy(observed.astype(np.float32))
    best_decay, best_score, probe = DECAYS[0], -1.0, None
    for decay in DECAYS:
        probe = fit_probe(train[fit_rows], targets[fit_rows], weight_decay=decay, start=probe)
        score = mean_average_precision(probe.probabilities(train[val_rows]).numpy(), labels[val_rows])
        if score > best_score:
            best_decay, best_score = decay, score
    final: Probe = fit_probe(train, targets, weight_decay=best_decay)
    probabilities = final.probabilities(query).numpy()
    found = figures(probabilities, query_labels)
    return {
        "weight_decay": best_decay,
        "val_mAP": best_score,
        **found,
        "Hamming loss": 1 - found["HA"],
        **class_and_overall(probabilities >= 0.5, query_labels),
    }
