"""A network made quick is the same network: outputs, gradients, state dict and copies."""

import copy

import pytest
import torch
from torch import nn

from hashseek.retrieval.models.batch_norm_folding import conv_norm_pairs
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.loop.cpu_speedups import _Folded, _QuickConv, _StridedDepthwise, keep_freed_memory, quicken

CPU = torch.device("cpu")


def randomized(model: nn.Module) -> nn.Module:
    """Batch norm that is not the identity."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor, low in (
                (module.running_mean, -0.2),
                (module.running_var, 0.5),
                (module.weight, 0.5),
                (module.bias, -0.2),
            ):
                tensor.data.copy_(low + torch.rand(tensor.shape, generator=generator))
    return model


def gradients(
    model: HashModel, images: torch.Tensor, *, autocast: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        features = model.features(images)
    features = features.float()
    (features * torch.linspace(-1, 1, features.shape[1])).sum().backward()
    return features.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("backbone", "n_pairs"), [("mobilenet_v2", 52), ("resnet18", 20), ("squeezenet1_1", 0)])
@pytest.mark.parametrize("frozen", [True, False])
def test_outputs_and_gradients_stay_what_they_were(backbone, n_pairs, frozen):
    torch.manual_seed(0)
    plain = randomized(HashModel(backbone=backbone, n_bits=8, freeze_batch_norm=frozen)).train()
    if frozen:
        assert len(conv_norm_pairs(plain.backbone)) == n_pairs
    quick = copy.deepcopy(plain)
    quicken(quick.backbone, frozen_batch_norm=frozen, device=CPU)
    assert list(quick.state_dict()) == list(plain.state_dict())
    for module in (*plain.modules(), *quick.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    images = torch.randn(4, 3, 64, 64)
    # In double precision, so that nothing is hidden by rounding.
    (expected, theirs), (found, ours) = (gradients(m.double(), images.double(), autocast=False) for m in (plain, quick))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()), msg=name)
    with torch.inference_mode():
        torch.testing.assert_close(quick.eval().features(images.double()), plain.eval().features(images.double()))


def test_in_bf16_it_rounds_about_as_much_as_the_plain_network():
    errors = {"plain": 0.0, "quick": 0.0}
    for seed in (1, 2):
        torch.manual_seed(seed)
        plain = randomized(HashModel(backbone="mobilenet_v2", n_bits=8, freeze_batch_norm=True)).train()
        plain = plain.to(memory_format=torch.channels_last)
        quick = copy.deepcopy(plain)
        quicken(quick.backbone, frozen_batch_norm=True, device=CPU)
        images = torch.randn(4, 3, 96, 96).to(memory_format=torch.channels_last)
        _, exact = gradients(plain, images, autocast=False)
        for name, model in (("plain", plain), ("quick", quick)):
            _, found = gradients(model, images, autocast=True)
            errors[name] += sum(float((found[key] - exact[key]).norm() / exact[key].norm()) for key in exact)
    assert 0 < errors["quick"] < 2 * errors["plain"]


def test_memory_that_is_kept_is_still_memory():
    keep_freed_memory()
    blocks = [torch.full((1 << 22,), float(i)) for i in range(4)]
    del blocks[1]
    blocks.append(torch.full((1 << 23,), 9.0))
    assert [float(block[-1]) for block in blocks] == [0.0, 2.0, 3.0, 9.0]


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, (2, 2), 1), (5, (2, 2), 2), (3, (2, 1), 0), (7, (3, 2), 3), (1, (2, 2), 0)]
)
@pytest.mark.parametrize("size", [(9, 12), (8, 11)])
def test_strided_depthwise_gradients_are_those_of_differences(kernel, stride, padding, size):
    torch.manual_seed(0)
    inputs = torch.randn(2, 4, *size, dtype=torch.double, requires_grad=True)
    weight = torch.randn(4, 1, kernel, kernel, dtype=torch.double, requires_grad=True)
    bias = torch.randn(4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *a: _StridedDepthwise.apply(*a, stride, (padding, padding)), (inputs, weight, bias)
    )
    expected = nn.functional.conv2d(inputs, weight, bias, stride, padding, groups=4)
    assert torch.equal(_StridedDepthwise.apply(inputs, weight, bias, stride, (padding, padding)), expected)


def test_only_batch_norm_that_alone_reads_a_convolution_is_folded():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(3, 3, 1) for _ in range(3))
            self.na, self.nb, self.shared = (nn.BatchNorm2d(3) for _ in range(3))

        def forward(self, x):
            a = self.a(x)
            x = self.na(a) + a  # read twice
            x = self.shared(self.b(x))
            return self.nb(self.c(self.shared(x)))

    class Untraceable(Branching):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    network = Branching()
    quicken(network, frozen_batch_norm=True, device=CPU)
    assert [name for name, module in network.named_modules() if isinstance(module, _Folded)] == ["nb"]
    assert [name for name, module in network.named_modules() if isinstance(module, _QuickConv)] == ["c"]
    assert conv_norm_pairs(Untraceable()) == []


def test_a_copy_folds_its_own_batch_norm():
    model = randomized(HashModel(backbone="resnet18", n_bits=8, freeze_batch_norm=True)).train()
    quicken(model.backbone, frozen_batch_norm=True, device=CPU)
    twin = copy.deepcopy(model)
    before = twin.features(torch.ones(1, 3, 64, 64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin.features(torch.ones(1, 3, 64, 64)), before)
    assert twin.backbone.conv1.norm is twin.backbone.bn1


def test_batch_norm_that_is_set_to_training_again_normalizes():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    quicken(network, frozen_batch_norm=True, device=CPU)
    images = 5 + torch.randn(8, 3, 6, 6)
    network.train()
    outputs = network(images)
    torch.testing.assert_close(outputs.mean(dim=(0, 2, 3)), torch.zeros(4), atol=1e-5, rtol=0)
    assert (network[1].running_mean != 0).any()
