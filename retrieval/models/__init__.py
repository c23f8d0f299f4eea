"""Hash models: backbones, heads, pretrained weights, truncation."""
