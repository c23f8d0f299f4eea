"""Layers in NumPy: what PyTorch's modules compute, to the last bit the same alone and in a batch."""

import numpy as np
import pytest
import torch

from hashseek.retrieval.models import mlp
from hashseek.retrieval.models.fully_connected import as_arrays, head_of, mlp_of
from hashseek.retrieval.models.heads import build_head

HEADS = ("linear", "normalized", "linear_bn", "mlp", "mlp:70")
RNG = np.random.default_rng(0)


def trained(module: torch.nn.Module) -> torch.nn.Module:
    """The module as if it were trained: no weight and no statistic has the value it began with."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in module.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.rand(value.shape, generator=generator) + 0.1)
    return module.eval()


@pytest.mark.parametrize("name", HEADS)
def test_a_head_computes_what_its_module_computes(name):
    module = trained(build_head(name, n_features=50, n_bits=12))
    features = RNG.standard_normal((9, 50), np.float32)
    features[4] = 0
    with torch.inference_mode():
        expected = module.double()(torch.from_numpy(features).double()).numpy()
    np.testing.assert_allclose(head_of(name, as_arrays(module.float()))(features), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp:20", "mlp:20-30-7", "mlp_bn:20-30-7"])
def test_a_backbone_computes_what_its_module_computes(name):
    module = trained(mlp.build(name)[0])
    vectors = RNG.standard_normal((9, 20), np.float32)
    layers = mlp_of(as_arrays(module))
    with torch.inference_mode():
        expected = module.double().layers((torch.from_numpy(vectors).double() - module.mean) / module.std).numpy()
    np.testing.assert_allclose(layers(vectors), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["linear", "normalized", "linear_bn", "mlp:300"])
def test_a_row_does_not_depend_on_the_rows_beside_it_or_on_its_place_in_memory(name):
    """To the last bit, since an output may be near 0: the halves of each sum cancel, so only its rounding is left."""
    arrays = as_arrays(build_head(name, n_features=2048, n_bits=20).eval())
    weights = {key: 0 * values if "bias" in key else values for key, values in arrays.items()}
    first = next(values for values in weights.values() if values.ndim == 2)
    first[:, 1024:] = -first[:, :1024]
    layers = head_of(name, weights)
    features = np.tile(RNG.standard_normal((1500, 1024), np.float32), 2)  # more than are computed at a time
    outputs = layers(features)
    for row in (0, 7, 1023, 1024, 1499):
        moved = np.zeros(2048 + row % 5, np.float32)[row % 5 :]
        moved[:] = features[row]
        np.testing.assert_array_equal(layers(moved[None])[0], outputs[row])
    assert layers(features[:0]).shape == (0, 20)
