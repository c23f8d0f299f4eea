"""Classification losses on logits, one file per method."""
