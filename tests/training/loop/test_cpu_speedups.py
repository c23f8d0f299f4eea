"""A network with folded batch norm is the same network: outputs, gradients, state dict and copies."""

import copy

import pytest
import torch
from torch import nn

from hashseek.retrieval.models.batch_norm_folding import conv_norm_pairs
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.loop.cpu_speedups import compute_depthwise_in_float32, fold_frozen_batch_norm


def frozen_model(backbone: str) -> HashModel:
    """A model in training mode whose frozen batch norm is not the identity."""
    torch.manual_seed(0)
    model = HashModel(backbone=backbone, n_bits=8, freeze_batch_norm=True)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor, low in (
                (module.running_mean, -0.2),
                (module.running_var, 0.5),
                (module.weight, 0.5),
                (module.bias, -0.2),
            ):
                tensor.data.copy_(low + torch.rand(tensor.shape))
        elif isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


@pytest.mark.parametrize(("backbone", "n_pairs"), [("mobilenet_v2", 52), ("resnet18", 20), ("squeezenet1_1", 0)])
def test_folding_changes_neither_outputs_nor_gradients(backbone, n_pairs):
    plain = frozen_model(backbone).double()  # in double precision, rounding cannot hide a difference
    assert len(conv_norm_pairs(plain.backbone)) == n_pairs
    folded = copy.deepcopy(plain)
    fold_frozen_batch_norm(folded.backbone)
    assert list(folded.state_dict()) == list(plain.state_dict())
    images = torch.randn(4, 3, 64, 64).double()
    outputs = [model.features(images) for model in (plain, folded)]
    torch.testing.assert_close(outputs[1], outputs[0])
    for features in outputs:
        (features * torch.linspace(-1, 1, features.shape[1])).sum().backward()
    ours = dict(folded.named_parameters())
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name].grad, parameter.grad, msg=name)


@pytest.mark.parametrize("after", [nn.Identity(), nn.BatchNorm2d(8)], ids=["alone", "with folded batch norm"])
def test_depthwise_convolutions_are_computed_in_float32_under_autocast(after):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8, bias=False), after).eval()
    exact = copy.deepcopy(layers)
    fold_frozen_batch_norm(layers)
    compute_depthwise_in_float32(layers)
    images = torch.randn(4, 8, 16, 16).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = layers(images)
    assert outputs.dtype is torch.bfloat16
    outputs.float().square().sum().backward()
    rounded = outputs.detach().float()
    (exact(images.detach().float()) * 2 * rounded).sum().backward()
    expected, found = exact[0].weight.grad, layers[0].weight.grad
    assert found.dtype is torch.float32
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_a_copy_folds_its_own_batch_norm():
    model = frozen_model("resnet18")
    fold_frozen_batch_norm(model.backbone)
    twin = copy.deepcopy(model)
    before = twin.features(torch.ones(1, 3, 64, 64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin.features(torch.ones(1, 3, 64, 64)), before)
    assert twin.backbone.conv1.norm is twin.backbone.bn1


def test_batch_norm_in_training_mode_normalizes():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    fold_frozen_batch_norm(network)
    network.train()
    outputs = network(5 + torch.randn(8, 3, 6, 6))
    torch.testing.assert_close(outputs.mean(dim=(0, 2, 3)), torch.zeros(4), atol=1e-5, rtol=0)
    assert (network[1].running_mean != 0).any()
