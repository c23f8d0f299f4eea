"""Every test of a data set has a cache of its own."""

import pytest


@pytest.fixture(autouse=True)
def _cache(own_cache):
    pass
