"""Labels that are hidden from training."""

import numpy as np
import pytest

from hashseek.training.data.hidden_labels import hide_labels


def test_labels_are_dropped_at_their_rate_and_the_same_in_every_run():
    labels = (np.random.default_rng(0).random((4000, 10)) < 0.3).astype(np.uint8)
    kept = hide_labels(labels, share=0.4, single=False, seed=1)
    assert not (kept > labels).any()
    assert kept.sum() / labels.sum() == pytest.approx(0.4, abs=0.02)
    np.testing.assert_array_equal(kept, hide_labels(labels, share=0.4, single=False, seed=1))
    assert (kept != hide_labels(labels, share=0.4, single=False, seed=2)).any()
    single = hide_labels(labels, share=1, single=True, seed=1)
    np.testing.assert_array_equal(single.sum(axis=1), labels.any(axis=1))
    assert not (single > labels).any()
    every = hide_labels(np.ones_like(labels), share=1, single=True, seed=1).sum(axis=0, dtype=int)
    assert every.min() > 300, "each of the ten has its turn"
    assert hide_labels(labels, share=1, single=False, seed=1) is labels
