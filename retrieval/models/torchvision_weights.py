"""Pretrained weights of torchvision: their names, their files, and how to get them, without importing torch.

Importing torchvision takes seconds; a misspelt name or a missing file is reported at once. The files are where
torchvision itself looks for them.
"""

import os
from pathlib import Path

from hashseek.retrieval.download import download
from hashseek.retrieval.errors import BadCheckpoint
from hashseek.retrieval.files import user_cache

SUFFIXES = (".safetensors", ".pth", ".pt")
_SOURCE = "https://download.pytorch.org/models/"


def cached(file: str) -> Path:
    """The path of a file of pretrained weights once it is downloaded.

    Raises:
        BadConfig: the user has no home folder.
    """
    home = os.environ.get("TORCH_HOME") or user_cache() / "torch"
    return Path(home).expanduser() / "hub" / "checkpoints" / file


def check_weights_file(path: Path) -> None:
    """Raise `BadCheckpoint` unless the file exists and its name ends in one of the `SUFFIXES`."""
    if not path.is_file():
        raise BadCheckpoint(
            f"there is no weights file {path}: correct the path, or use the pretrained weights (leave out --weights; "
            "in training, set model.weights to default or the name of a weight set)"
        )
    if path.suffix not in SUFFIXES:
        raise BadCheckpoint(f"a weights file must end in {', '.join(SUFFIXES)}, got {path.name}")


def fetch_weights(file: str) -> Path:
    """Download a file of torchvision's weights unless it is there.

    Raises:
        BadCheckpoint: there is no connection, or the download is damaged.
    """
    path = cached(file)
    if path.is_file():
        return path
    try:  # torchvision's names end with the beginning of the SHA-256
        download(_SOURCE + file, path, algorithm="sha256", digest=path.stem.rpartition("-")[2])
    except OSError as error:
        raise BadCheckpoint(
            f"the weights {_SOURCE}{file} could not be downloaded ({error}): try again, copy the file to "
            f"{path.parent} (TORCH_HOME changes this folder), or use a local file (--backbone NAME --weights FILE, in "
            "training model.weights=FILE); without weights, index with --backbone pixels, and train with "
            "model.weights=none"
        ) from None
    return path


# Network -> file of its default weights.
FILES = {
    "alexnet": "alexnet-owt-7be5be79.pth",
    "convnext_base": "convnext_base-6075fbad.pth",
    "convnext_large": "convnext_large-ea097f82.pth",
    "convnext_small": "convnext_small-0c510722.pth",
    "convnext_tiny": "convnext_tiny-983f1562.pth",
    "densenet121": "densenet121-a639ec97.pth",
    "densenet161": "densenet161-8d451a50.pth",
    "densenet169": "densenet169-b2777c0a.pth",
    "densenet201": "densenet201-c1103571.pth",
    "efficientnet_b0": "efficientnet_b0_rwightman-7f5810bc.pth",
    "efficientnet_b1": "efficientnet_b1-c27df63c.pth",
    "efficientnet_b2": "efficientnet_b2_rwightman-c35c1473.pth",
    "efficientnet_b3": "efficientnet_b3_rwightman-b3899882.pth",
    "efficientnet_b4": "efficientnet_b4_rwightman-23ab8bcd.pth",
    "efficientnet_b5": "efficientnet_b5_lukemelas-1a07897c.pth",
    "efficientnet_b6": "efficientnet_b6_lukemelas-24a108a5.pth",
    "efficientnet_b7": "efficientnet_b7_lukemelas-c5b4e57e.pth",
    "efficientnet_v2_l": "efficientnet_v2_l-59c71312.pth",
    "efficientnet_v2_m": "efficientnet_v2_m-dc08266a.pth",
    "efficientnet_v2_s": "efficientnet_v2_s-dd5fe13b.pth",
    "googlenet": "googlenet-1378be20.pth",
    "inception_v3": "inception_v3_google-0cc3c7bd.pth",
    "maxvit_t": "maxvit_t-bc5ab103.pth",
    "mnasnet0_5": "mnasnet0.5_top1_67.823-3ffadce67e.pth",
    "mnasnet0_75": "mnasnet0_75-7090bc5f.pth",
    "mnasnet1_0": "mnasnet1.0_top1_73.512-f206786ef8.pth",
    "mnasnet1_3": "mnasnet1_3-a4c69d6f.pth",
    "mobilenet_v2": "mobilenet_v2-7ebf99e0.pth",
    "mobilenet_v3_large": "mobilenet_v3_large-5c1a4163.pth",
    "mobilenet_v3_small": "mobilenet_v3_small-047dcff4.pth",
    "regnet_x_16gf": "regnet_x_16gf-ba3796d7.pth",
    "regnet_x_1_6gf": "regnet_x_1_6gf-a12f2b72.pth",
    "regnet_x_32gf": "regnet_x_32gf-6eb8fdc6.pth",
    "regnet_x_3_2gf": "regnet_x_3_2gf-7071aa85.pth",
    "regnet_x_400mf": "regnet_x_400mf-62229a5f.pth",
    "regnet_x_800mf": "regnet_x_800mf-94a99ebd.pth",
    "regnet_x_8gf": "regnet_x_8gf-2b70d774.pth",
    "regnet_y_128gf": "regnet_y_128gf_swag-c8ce3e52.pth",
    "regnet_y_16gf": "regnet_y_16gf-3e4a00f9.pth",
    "regnet_y_1_6gf": "regnet_y_1_6gf-0d7bc02a.pth",
    "regnet_y_32gf": "regnet_y_32gf-8db6d4b5.pth",
    "regnet_y_3_2gf": "regnet_y_3_2gf-9180c971.pth",
    "regnet_y_400mf": "regnet_y_400mf-e6988f5f.pth",
    "regnet_y_800mf": "regnet_y_800mf-58fc7688.pth",
    "regnet_y_8gf": "regnet_y_8gf-dc2b1b54.pth",
    "resnet101": "resnet101-cd907fc2.pth",
    "resnet152": "resnet152-f82ba261.pth",
    "resnet18": "resnet18-f37072fd.pth",
    "resnet34": "resnet34-b627a593.pth",
    "resnet50": "resnet50-11ad3fa6.pth",
    "resnext101_32x8d": "resnext101_32x8d-110c445d.pth",
    "resnext101_64x4d": "resnext101_64x4d-173b62eb.pth",
    "resnext50_32x4d": "resnext50_32x4d-1a0047aa.pth",
    "shufflenet_v2_x0_5": "shufflenetv2_x0.5-f707e7126e.pth",
    "shufflenet_v2_x1_0": "shufflenetv2_x1-5666bf0f80.pth",
    "shufflenet_v2_x1_5": "shufflenetv2_x1_5-3c479a10.pth",
    "shufflenet_v2_x2_0": "shufflenetv2_x2_0-8be3c8ee.pth",
    "squeezenet1_0": "squeezenet1_0-b66bff10.pth",
    "squeezenet1_1": "squeezenet1_1-b8a52dc0.pth",
    "swin_b": "swin_b-68c6b09e.pth",
    "swin_s": "swin_s-5e29d889.pth",
    "swin_t": "swin_t-704ceda3.pth",
    "swin_v2_b": "swin_v2_b-781e5279.pth",
    "swin_v2_s": "swin_v2_s-637d8ceb.pth",
    "swin_v2_t": "swin_v2_t-b137f0e2.pth",
    "vgg11": "vgg11-8a719046.pth",
    "vgg11_bn": "vgg11_bn-6002323d.pth",
    "vgg13": "vgg13-19584684.pth",
    "vgg13_bn": "vgg13_bn-abd245e5.pth",
    "vgg16": "vgg16-397923af.pth",
    "vgg16_bn": "vgg16_bn-6c64b313.pth",
    "vgg19": "vgg19-dcbb9e9d.pth",
    "vgg19_bn": "vgg19_bn-c79401a0.pth",
    "vit_b_16": "vit_b_16-c867db91.pth",
    "vit_b_32": "vit_b_32-d86f8d99.pth",
    "vit_h_14": "vit_h_14_swag-80465313.pth",
    "vit_l_16": "vit_l_16-852ce7e3.pth",
    "vit_l_32": "vit_l_32-c7638314.pth",
    "wide_resnet101_2": "wide_resnet101_2-d733dc28.pth",
    "wide_resnet50_2": "wide_resnet50_2-9ba9bcbe.pth",
}
