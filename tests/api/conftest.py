"""Clients of services in the process of the test."""

import pytest

from support.service import serving


@pytest.fixture(scope="session")
def reader(indexed):
    """A client of a read-only service for all pictures."""
    with serving(indexed, read_only=True, max_upload_bytes=2_000_000) as client:
        yield client


@pytest.fixture
def client(own_collection):
    """A client of a service whose collection the test may change."""
    with serving(own_collection) as started:
        yield started
