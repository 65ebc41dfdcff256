"""Fixtures of every test here."""

from tests.helpers import frozen_heap, young_iterators

__all__ = ["frozen_heap", "young_iterators"]
