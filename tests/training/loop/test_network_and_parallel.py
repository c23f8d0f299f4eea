"""Memory, projection, partner, chunks, processes: what training adds to model and loss keeps its promises."""

import atexit
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from hashseek.retrieval.errors import BadConfig, BadDataset, HashseekError
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.config import parse_config
from hashseek.training.data.datasets.shapes import render_shapes
from hashseek.training.data.hidden_labels import drop_labels
from hashseek.training.loop.fit import fit
from hashseek.training.loop.network import Network, build_network
from hashseek.training.loop.parallel import average_buffers, launch, own_part, sum_gradients
from hashseek.training.loop.step import backward
from hashseek.training.loop.sync_batch_norm import share_batch_norm
from hashseek.training.losses.memory import gather_rows
from hashseek.training.runs.run_folder import Run, read_log
from support.models import run_config

config = run_config
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parts")
    render_shapes(root, n_query=6, n_train=60, n_database=6, size=48, seed=2)
    return root


def curves(run: Run) -> np.ndarray:
    return np.array([[value for key, value in row.items() if "loss" in key or "val" in key] for row in read_log(run)])


# A contrastive loss on a projection with a queue, beside a classification loss: every part at once.
EVERYTHING = {
    "loss": {"name": "mulsupcon", "on": "projection", "tau": 0.2},
    "projection": {"width": 16, "hidden": 24},
    "memory": {"size": 40, "momentum": 0.9},  # no multiple of the batch
    "partner": {"name": "asl", "weight": 0.5},
}


def test_two_processes_give_the_curve_of_one_with_the_same_global_batch(pictures, tmp_path):
    # At a small rate: at a larger one batch norm blows rounding up to a percent within a few steps.
    batch_norm = {"model": {"backbone": "resnet18", "head": "linear_bn"}, "optimizer": {"lr": 1e-5}}
    for name, sections in {"hyp2": {}, "everything": EVERYTHING, "batch norm": batch_norm}.items():
        one = fit(config(pictures, **sections), out=tmp_path / name / "one")
        two = fit(config(pictures, train={"devices": 2}, **sections), out=tmp_path / name / "two")
        np.testing.assert_allclose(curves(two.run), curves(one.run), rtol=2e-3)
        assert two.best_epoch == one.best_epoch


def test_an_error_in_any_process_is_the_one_sentence_of_one_process(pictures, tmp_path):
    fit(config(pictures, train={"epochs": 1}), out=tmp_path / "run")
    with pytest.raises(BadConfig, match="already holds a run: go on with --resume"):
        fit(config(pictures, train={"epochs": 1, "devices": 2}), out=tmp_path / "run")
    with pytest.raises(BadConfig, match=r"4096 devices were asked for, but this machine has \d+ processor cores"):
        fit(config(pictures, train={"devices": 4096, "batch_size": 4096}), out=tmp_path / "other")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        fit(config(pictures, train={"devices": 2}), out=tmp_path / "file" / "run")
    with pytest.raises(BadDataset, match=r"1 training images are too few for train.devices = 2: lower it to 1"):
        fit(config(pictures, train={"devices": 2, "val_fraction": 0.98}), out=tmp_path / "few")


def _statistics_of_all(fabric) -> list[float]:
    norm = nn.BatchNorm1d(2)
    norm.running_mean += torch.tensor([1.0, 4.0]) * fabric.global_rank
    average_buffers(nn.Sequential(norm), None)
    return [*norm.running_mean.tolist(), *norm.running_var.tolist()]


def test_batch_norm_has_the_same_statistics_in_every_process():
    assert launch(_statistics_of_all, device="cpu", devices=2, precision="fp32") == [0.5, 2.0, 1.0, 1.0]


def _open_groups(fabric) -> str:
    """Every process dies, as one did in CI, unless it closed its group before its interpreter closes down."""
    atexit.register(lambda: os.abort() if dist.is_initialized() else None)
    return "done"


def _dying_after_its_work(fabric) -> str:
    if fabric.global_rank == 1:
        atexit.register(os.abort)
    return "done"


def _dying_at_work(fabric) -> None:
    if fabric.global_rank == 1:
        os.abort()
    dist.barrier()


def test_a_process_that_dies_while_it_closes_down_costs_nothing(caplog):
    caplog.set_level(logging.WARNING, logger="training")
    assert launch(_open_groups, device="cpu", devices=2, precision="fp32") == "done"
    assert not caplog.messages
    assert launch(_dying_after_its_work, device="cpu", devices=2, precision="fp32") == "done"
    assert caplog.messages[-1].startswith("a training process died while it closed down, after its work was done")
    with pytest.raises(HashseekError, match="training process 1 of 2 was ended by SIGABRT: .*--resume"):
        launch(_dying_at_work, device="cpu", devices=2, precision="fp32")


def _normalised(fabric) -> list[np.ndarray]:
    """Outputs, gradients and running statistics of a batch norm whose 8 rows are shared out as `n_own` says."""
    rows = torch.randn(8, 3, 2, 2, generator=torch.Generator().manual_seed(0)) * 2 + 5
    slopes = torch.randn(8, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    norm = nn.BatchNorm2d(3)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(2))
    own = slice(0, 8)
    if fabric.world_size > 1:
        share_batch_norm(norm)
        own = slice(0, 3) if fabric.global_rank == 0 else slice(3, 8)  # shares of unequal size
    mine = rows[own].clone().requires_grad_()
    outputs = norm(mine)
    (outputs * slopes[own]).sum().backward()
    gradients = [norm.weight.grad, norm.bias.grad]
    if fabric.world_size > 1:
        sum_gradients(norm.parameters())
    of_all = [gather_rows(part.detach()) if fabric.world_size > 1 else part.detach() for part in (outputs, mine.grad)]
    return [part.numpy() for part in (*of_all, *gradients, norm.running_mean, norm.running_var)]


def test_batch_norm_over_two_processes_is_that_of_one():
    one = launch(_normalised, device="cpu", devices=1, precision="fp32")
    two = launch(_normalised, device="cpu", devices=2, precision="fp32")
    for of_one, of_two in zip(one, two, strict=True):
        np.testing.assert_allclose(of_two, of_one, rtol=1e-5, atol=1e-5)


def test_a_run_with_every_part_killed_and_resumed_ends_like_an_unbroken_one(pictures, tmp_path):
    settings = config(pictures, train={"epochs": 4, "ema": 0.9, "views": 2, "keep_labels": 0.7}, **EVERYTHING)
    unbroken = fit(settings, out=tmp_path / "unbroken").run
    (tmp_path / "config.json").write_text(settings.model_dump_json())
    program = (
        "import json, sys, torch; torch.set_num_threads(1)\n"
        "from pathlib import Path; from hashseek.training.config import parse_config\n"
        "from hashseek.training.loop.fit import fit\n"
        "fit(parse_config(json.loads(Path(sys.argv[1]).read_text()), source='x'), out=Path(sys.argv[2]), resume=True)\n"
    )
    broken = Run(tmp_path / "broken")
    arguments = [sys.executable, "-c", program, str(tmp_path / "config.json"), str(broken.folder)]
    process = subprocess.Popen(arguments, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while len(read_log(broken)) < 2 and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(read_log(broken)) < 4
    resumed = fit(settings, out=broken.folder, resume=True).run
    np.testing.assert_array_equal(curves(resumed), curves(unbroken))
    for name in ("best", "last"):
        assert getattr(resumed, name).read_bytes() == getattr(unbroken, name).read_bytes()


@pytest.mark.parametrize("sections", [{}, EVERYTHING], ids=["hyp2", "everything"])
@pytest.mark.parametrize("chunk_size", [1, 5, 16])
def test_chunks_leave_the_gradients_of_the_whole_batch(sections, chunk_size):
    settings = config(Path(), model={"backbone": "mlp:10-14"}, **sections)
    gradients = []
    for size in (None, chunk_size):
        torch.manual_seed(0)
        model = HashModel(backbone="mlp:10-14", n_bits=12)
        network, objective, keys = build_network(settings, model, n_classes=5)
        inputs, labels = torch.randn(16, 10), (torch.rand(16, 5) < 0.4).float()
        for _ in range(2):  # the second time there is a queue
            network.zero_grad()
            objective.zero_grad()
            backward(network, objective, keys, inputs, labels, epoch=0, autocast=nullcontext, chunk_size=size)
        parameters = [*network.parameters(), *objective.parameters()]
        gradients.append([p.grad.clone() for p in parameters if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 2
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(parts, whole)


def test_chunks_draw_the_same_dropout_twice():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5))

        def forward(self, x):
            return self.layers(x)

    settings = config(Path(), model={"backbone": "mlp:6-8"}, loss={"name": "mulsupcon"})
    model = HashModel(backbone="mlp:6-8", n_bits=12)
    model.backbone = Dropping()
    network, objective, keys = build_network(settings, model, n_classes=3)
    seen = []
    model.backbone.register_forward_hook(lambda module, inputs, output: seen.append(output.detach().clone()))
    labels = torch.ones(8, 3)
    backward(network, objective, keys, torch.randn(8, 6), labels, epoch=0, autocast=nullcontext, chunk_size=4)
    first, second = seen[:2], seen[2:]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0] == 0, first[1] == 0)


def test_a_chunk_size_next_to_live_batch_norm_is_refused(pictures, tmp_path):
    settings = config(pictures, model={"backbone": "resnet18"}, train={"chunk_size": 4})
    with pytest.raises(BadConfig, match="batch norm would take its statistics of a chunk"):
        fit(settings, out=tmp_path / "run")
    settings = config(pictures, model={"head": "linear_bn", "freeze_batch_norm": True}, train={"chunk_size": 4})
    with pytest.raises(BadConfig, match="batch norm in the head 'linear_bn'.*set model.head = 'linear'"):
        fit(settings, out=tmp_path / "head")


def test_a_batch_too_small_for_batch_norm_is_named(pictures, tmp_path):
    settings = config(pictures, model={"backbone": "resnet18", "size": 32}, train={"batch_size": 1})
    with pytest.raises(BadConfig, match=r"no statistics of a single image at 32 px.*freeze_batch_norm = true"):
        fit(settings, out=tmp_path / "run")


def test_noise_is_for_vectors(pictures, tmp_path):
    with pytest.raises(BadConfig, match=r"train.noise is 0.5, but it is added to feature vectors"):
        fit(config(pictures, train={"noise": 0.5}), out=tmp_path / "run")


@pytest.mark.parametrize("damage", ["delete", "garble"])
def test_a_run_without_its_log_is_not_resumed(pictures, tmp_path, damage):
    settings = config(pictures, model={"freeze_backbone": True}, train={"epochs": 1})
    run = fit(settings, out=tmp_path / "run").run
    if damage == "delete":
        run.log.unlink()
    else:
        run.log.write_bytes(b"\0{")
    with pytest.raises(BadConfig, match=r"log.jsonl is missing or damaged: it holds 0 readable epochs, but 1 are"):
        fit(settings, out=tmp_path / "run", resume=True)


def test_keys_follow_slowly_and_the_queue_holds_the_batches_that_came_before():
    settings = config(
        Path(), model={"backbone": "mlp:6-8"}, loss={"name": "supcon"}, memory={"size": 20, "momentum": 0.5}
    )
    model = HashModel(backbone="mlp:6-8", n_bits=12)
    network, objective, keys = build_network(settings, model, n_classes=3)
    start = model.head.weight.detach().clone()
    with torch.no_grad():
        model.head.weight.add_(1)
    for n_filled in (8, 16, 20):
        backward(network, objective, keys, torch.randn(8, 6), torch.ones(8, 3), epoch=0, autocast=nullcontext, views=1)
        assert len(keys.queue) == n_filled
    torch.testing.assert_close(keys.encoder.model.head.weight, start + 0.875)  # half the way, three times
    assert keys.encoder.classifier is None
    assert not any(p.requires_grad for p in keys.parameters())


def test_the_second_view_makes_the_keys():
    settings = config(
        Path(), model={"backbone": "mlp:6-8"}, loss={"name": "supcon"}, memory={"size": 8}, train={"batch_size": 8}
    )
    model = HashModel(backbone="mlp:6-8", n_bits=12)
    network, objective, keys = build_network(settings, model, n_classes=3)
    views = torch.randn(16, 6)
    backward(network, objective, keys, views, torch.ones(8, 3), epoch=0, autocast=nullcontext, views=2)
    expected = nn.functional.normalize(keys.encoder(views[8:])["outputs"], dim=1)
    torch.testing.assert_close(keys.queue.keys, expected)


def test_without_a_key_encoder_every_view_is_an_anchor_and_a_key():
    sections = {
        "model": {"backbone": "mlp:6-8"},
        "loss": {"name": "supcon"},
        "memory": {"size": 16, "momentum": 0},
        "train": {"batch_size": 8, "views": 2},
    }
    model = HashModel(backbone="mlp:6-8", n_bits=12)
    network, objective, keys = build_network(config(Path(), **sections), model, n_classes=3)
    views, labels = torch.randn(16, 6), (torch.rand(8, 3) < 0.5).float()
    expected = nn.functional.normalize(network(views)["outputs"], dim=1)
    backward(network, objective, keys, views, labels, epoch=0, autocast=nullcontext, views=2)
    torch.testing.assert_close(keys.queue.keys, expected.detach())
    torch.testing.assert_close(keys.queue.key_labels.float(), labels.repeat(2, 1))
    sections["memory"]["size"] = 15
    with pytest.raises(BadConfig, match="memory.size is 15, but a batch has 16 rows"):
        build_network(config(Path(), **sections), model, n_classes=3)


def test_chunks_of_frozen_features_beside_a_loss_that_reads_them():
    settings = config(
        Path(),
        model={"backbone": "mlp:6-8", "freeze_backbone": True},
        loss={"name": "supcon", "on": "features"},
        partner={"name": "asl"},
    )
    model = HashModel(backbone="mlp:6-8", n_bits=12)
    network, objective, keys = build_network(settings, model, n_classes=3)
    features, labels = torch.randn(8, 8), (torch.rand(8, 3) < 0.5).float()
    found = []
    for chunk_size in (None, 3):
        network.zero_grad()
        backward(network, objective, keys, features, labels, epoch=0, autocast=nullcontext, chunk_size=chunk_size)
        found.append(model.head.weight.grad.clone())
    assert found[0].abs().sum() > 0
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: its dropout draws from a generator of its own")
def test_chunks_draw_the_same_dropout_twice_on_a_gpu():
    settings = config(Path(), model={"backbone": "mlp:6-8", "dropout": 0.5}, loss={"name": "mulsupcon"})
    network, objective, keys = build_network(settings, HashModel(backbone="mlp:6-8", n_bits=12), n_classes=3)
    network.cuda()
    objective.cuda()
    seen = []
    network.dropout.register_forward_hook(lambda module, inputs, output: seen.append(output.detach().clone()))
    inputs, labels = torch.randn(8, 6).cuda(), torch.ones(8, 3).cuda()
    backward(network, objective, keys, inputs, labels, epoch=0, autocast=nullcontext, chunk_size=4)
    assert all(torch.equal(a, b) for a, b in zip(seen[:2], seen[2:], strict=True))


def test_frozen_features_share_the_backbone_with_the_key_encoder():
    settings = config(Path(), model={"backbone": "mlp:6-8", "freeze_backbone": True}, **EVERYTHING)
    model = HashModel(backbone="mlp:6-8", n_bits=12)
    network, _, keys = build_network(settings, model, n_classes=3)
    assert keys.encoder.model.backbone is model.backbone
    assert keys.encoder.model.head is not model.head
    before = [p.clone() for p in model.backbone.parameters()]
    for _ in range(50):
        keys.follow(network)
    assert all(torch.equal(a, b) for a, b in zip(before, model.backbone.parameters(), strict=True))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"memory": {}}, "the loss 'hyp2' contrasts with no memory"),
        ({"loss": {"name": "supcon"}, "memory": {"size": 8}}, "memory.size is 8, but a batch has 16 rows"),
        ({"loss": {"name": "supcon", "on": "projection"}}, r"needs the section \[projection\]"),
        ({"projection": {}}, r"the section \[projection\] is read by no loss"),
        ({"partner": {"name": "supcon"}}, "'supcon', but a partner must be"),
        ({"loss": {"name": "bce"}, "partner": {"name": "asl"}}, "both classify"),
        ({"loss": {"name": "clml"}, "partner": {"name": "asl", "gama": 1}}, "no hyperparameter 'gama'"),
        (
            {
                "loss": {"name": "supcon", "quantization": {"kind": "l2", "weight": 1}},
                "partner": {"name": "asl", "quantization": {"kind": "l2", "weight": 1}},
            },
            "the same term twice",
        ),
        (
            {
                "model": {"backbone": "mlp:6-8", "freeze_backbone": True},
                "loss": {"name": "supcon", "on": "projection"},
                "projection": {},
            },
            "only the head to learn, but no loss reads its outputs",
        ),
    ],
)
def test_sections_that_do_not_fit_are_refused(sections, message):
    settings = config(Path(), **{"model": {"backbone": "mlp:6-8"}} | sections)
    with pytest.raises(BadConfig, match=message):
        build_network(settings, HashModel(backbone="mlp:6-8", n_bits=12), n_classes=3)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"devices": 3}, "must be a multiple of train.devices, 3"),
        ({"views": 3}, "train.views"),
        ({"keep_labels": 0}, "train.keep_labels"),
        ({"keep_labels": 0.5, "single_label": True}, "set one of them back"),
        ({"seed": 2**32}, "train.seed"),
    ],
)
def test_settings_outside_their_limits_are_refused(train, message):
    with pytest.raises(BadConfig, match=message):
        config(Path(), train=train)
    with pytest.raises(BadConfig, match="features are computed once, from one view"):
        config(Path(), train={"views": 2}, model={"freeze_backbone": True})
    with pytest.raises(BadConfig, match=r"no setting 'memory.sise': did you mean 'size'\?"):
        config(Path(), memory={"sise": 3})
    for section, key in (("memory", "size"), ("projection", "width")):  # more than any machine holds
        with pytest.raises(BadConfig, match=f"{section}.{key}"):
            config(Path(), **{section: {key: 10**12}})


def test_clml_reads_raw_features_and_corrects_labels_by_its_partner_logits():
    settings = config(
        Path(),
        model={"backbone": "mlp:6-8"},
        loss={"name": "clml", "on": "features", "start_epoch": 0, "delta": 0.5},
        partner={"name": "bce", "on": "features"},
    )
    network, objective, _ = build_network(settings, HashModel(backbone="mlp:6-8", n_bits=12), n_classes=3)
    inputs, labels = torch.randn(8, 6), torch.zeros(8, 3)
    labels[:, 0] = 1
    heads = network(inputs)
    assert heads["features"].shape == (8, 8)
    assert heads["logits"].shape == (8, 3)
    with torch.no_grad():
        network.classifier.bias.copy_(torch.tensor([0.0, 50.0, -50.0]))
    terms = objective(network(inputs), labels, memory=None, epoch=0)
    assert set(terms) == {"clml", "bce"}
    corrected = labels.clone()
    corrected[:, 1] = 1
    told = objective.loss(network(inputs)["features"], corrected, epoch=0)
    torch.testing.assert_close(terms["clml"], told["clml"])


def test_a_classification_loss_stands_on_the_codes_outputs():
    settings = config(Path(), model={"backbone": "mlp:6-8"}, loss={"name": "bce"})
    network, objective, _ = build_network(settings, HashModel(backbone="mlp:6-8", n_bits=12), n_classes=3)
    assert (network.classifier.in_features, network.classifier.out_features) == (12, 3)
    backward(network, objective, None, torch.randn(8, 6), torch.ones(8, 3), epoch=0, autocast=nullcontext)
    assert network.model.head.weight.grad.abs().sum() > 0


def test_only_what_a_loss_reads_learns():
    settings = config(Path(), model={"backbone": "mlp:6-8"}, loss={"name": "supcon", "on": "features"})
    network, _, _ = build_network(settings, HashModel(backbone="mlp:6-8", n_bits=12), n_classes=3)
    assert not any(p.requires_grad for p in network.model.head.parameters())
    assert set(Network(network.model, reads={"features"})(torch.randn(4, 6))) == {"features"}


def test_every_row_is_worked_on_by_one_process_and_batches_are_the_same():
    order = np.random.default_rng(0).permutation(53)
    for n_ranks, batch_size in ((1, 8), (2, 8), (4, 8), (2, 64)):
        share = batch_size // n_ranks
        parts = [own_part(order, batch_size=batch_size, rank=rank, n_ranks=n_ranks) for rank in range(n_ranks)]
        assert sorted(np.concatenate(parts).tolist()) == list(range(53))
        for step in range(53 // batch_size):
            joined = np.concatenate([part[step * share : (step + 1) * share] for part in parts])
            assert joined.tolist() == order[step * batch_size : (step + 1) * batch_size].tolist()
    assert len(own_part(np.arange(17), batch_size=8, rank=0, n_ranks=1)) == 16  # one row is no batch
    assert len(own_part(np.arange(1), batch_size=8, rank=0, n_ranks=1)) == 1  # unless it is all there is


def test_labels_are_dropped_at_their_rate_and_the_same_in_every_run():
    labels = (np.random.default_rng(0).random((4000, 10)) < 0.3).astype(np.uint8)
    kept = drop_labels(labels, share=0.4, single=False, seed=1)
    assert not (kept > labels).any()
    assert kept.sum() / labels.sum() == pytest.approx(0.4, abs=0.02)
    np.testing.assert_array_equal(kept, drop_labels(labels, share=0.4, single=False, seed=1))
    assert (kept != drop_labels(labels, share=0.4, single=False, seed=2)).any()
    single = drop_labels(labels, share=1, single=True, seed=1)
    np.testing.assert_array_equal(single.sum(axis=1), labels.any(axis=1))
    assert not (single > labels).any()
    assert drop_labels(labels, share=1, single=False, seed=1) is labels


def test_patience_stops_a_run_that_does_not_get_better(pictures, tmp_path):
    still = config(pictures, optimizer={"lr": 1e-30, "proxy_lr": 1e-30}, train={"epochs": 9, "patience": 2})
    result = fit(still, out=tmp_path / "run")
    assert len(read_log(result.run)) == result.best_epoch + 3 == 3
    again = fit(still, out=tmp_path / "run", resume=True)
    assert len(read_log(again.run)) == 3


def test_vectors_train_and_their_mistakes_are_named(tmp_path):
    rng = np.random.default_rng(0)
    labels = (rng.random((80, 4)) < 0.4).astype(np.uint8)
    vectors = (labels @ rng.normal(size=(4, 9)) + 0.1 * rng.normal(size=(80, 9))).astype(np.float32)
    split = np.where(np.arange(80) < 60, "train", "test")
    np.savez(tmp_path / "scene.npz", X=vectors, Y=labels, split=split, label_names=np.array(list("abcd")))
    content = {
        "data": {"name": "scene", "root": str(tmp_path)},
        "model": {"backbone": "mlp:9-16", "n_bits": 16},
        "optimizer": {"name": "adamw", "lr": 1e-2, "schedule": "restarts", "restart_epochs": 2},
        "train": {"epochs": 6, "batch_size": 20, "device": "cpu", "precision": "fp32", "views": 2, "noise": 0.1},
    }
    result = fit(parse_config(content, source="test"), out=tmp_path / "run")
    losses = [row["loss"] for row in read_log(result.run)]
    assert losses[-1] < losses[0]
    content["model"]["backbone"] = "mlp:8-16"
    with pytest.raises(BadConfig, match=r"vectors of 9 numbers, but the backbone 'mlp:8-16' takes vectors of 8"):
        fit(parse_config(content, source="test"), out=tmp_path / "b")
    content["model"]["backbone"] = "resnet18"
    with pytest.raises(BadConfig, match="takes images: choose mlp:9-512-512"):
        fit(parse_config(content, source="test"), out=tmp_path / "c")
    vectors[3, 2] = np.nan
    np.savez(tmp_path / "scene.npz", X=vectors, Y=labels, split=split, label_names=np.array(list("abcd")))
    content["model"]["backbone"] = "mlp:9-16"
    with pytest.raises(HashseekError, match="NaN"):
        fit(parse_config(content, source="test"), out=tmp_path / "d")
    assert issubclass(BadDataset, HashseekError)
