"""Hash models: backbones, heads, pretrained weights."""

MAX_WIDTH = 100_000  # of a layer
