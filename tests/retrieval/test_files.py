"""Where caches are."""

from pathlib import Path

import pytest

from hashseek.retrieval.files import cache_folder


@pytest.mark.parametrize("own", ["", "/own"])
@pytest.mark.parametrize("common", ["", "/common"])
def test_an_empty_variable_counts_as_not_set(own, common, monkeypatch):
    monkeypatch.setenv("HASHSEEK_CACHE", own)
    monkeypatch.setenv("XDG_CACHE_HOME", common)
    assert cache_folder() == Path(own or f"{common or Path.home() / '.cache'}/hashseek")
