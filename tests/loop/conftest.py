"""Fixtures of every test here."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers import frozen_heap, young_iterators

__all__ = ["frozen_heap", "young_iterators"]


@pytest.fixture(autouse=True)
def survived_signals() -> Iterator[None]:
    """A SIGTERM that the framework does not take up fails the test, and does not end the whole session."""

    def unhandled(number: int, frame: Any) -> None:
        raise AssertionError(f"signal {number} was not taken up by the framework")

    before = signal.signal(signal.SIGTERM, unhandled)
    yield
    signal.signal(signal.SIGTERM, before)
