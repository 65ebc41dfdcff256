"""Faults that were put in are found by the check that is meant for them, with the right replica."""

from __future__ import annotations

import pytest

from benchmarks import replica_faults as faults

BY = {
    "one bit of a weight flipped": "replicas compared",
    "one bit of a slot flipped": "replicas compared",
    "one bit of BatchNorm's state flipped": "replicas compared",
    "other initial weights": "replicas compared",
    "gradients scaled by 100": "gradient norms",
    "slower in its backward pass": "times to the all-reduce",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY)
def test_a_fault_is_found_by_its_check(name: str) -> None:
    fault = next(fault for fault in faults.FAULTS if fault.name == name)
    found = faults.run(fault)
    assert (found["by"], found["named"]) == (BY[name], True), found


def test_every_fault_has_one_name() -> None:
    names = [fault.name for fault in faults.FAULTS]
    assert len(set(names)) == len(names) and set(BY) <= set(names)
