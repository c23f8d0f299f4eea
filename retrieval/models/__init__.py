"""Hash models: backbones, heads, pretrained weights, truncation."""

MAX_WIDTH = 100_000  # of a layer
