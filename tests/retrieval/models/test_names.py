"""Names of backbones: what each kind says, and which are refused."""

import pytest

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.models.names import check_image_backbone, is_from_outside, is_vector_backbone, widths_of


@pytest.mark.parametrize("name", ["mobilenet", "mlp:10-10", "mlp_bn:10-10", ""])
def test_names_that_are_no_network_for_images_are_refused(name):
    with pytest.raises(BadConfig):
        check_image_backbone(name)


def test_networks_that_timm_does_not_have_are_refused_from_its_source():
    pytest.importorskip("timm")
    for name in ("resnet10t", "vit_small_patch14_dinov2.lvd142m", "tf_efficientnet_b0_ap"):  # the last is an old name
        check_image_backbone(f"timm:{name}")
    with pytest.raises(BadConfig, match="convnext_atto"):
        check_image_backbone("timm:convnext_atom")


def test_the_kinds_of_names():
    assert [
        name for name in ("mlp:3-4-2", "mlp_bn:3-4-2", "resnet18", "a:b", "timm:a") if is_vector_backbone(name)
    ] == [
        "mlp:3-4-2",
        "mlp_bn:3-4-2",
    ]
    assert [name for name in ("mlp:3", "resnet18", "a:b", "timm:a", "pixels") if is_from_outside(name)] == ["a:b"]


def test_the_widths_of_a_backbone_for_vectors():
    assert widths_of("mlp_bn:294-512-64") == [294, 512, 64]
    for name in ("mlp:", "mlp:a", "mlp:3-0", "mlp:100001", "mlp:3--4"):
        with pytest.raises(BadConfig):
            widths_of(name)
