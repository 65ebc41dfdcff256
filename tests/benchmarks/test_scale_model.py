"""Predicted step times: the formula by hand, the fit on made times, and the command."""

from __future__ import annotations

import pytest

from benchmarks.scale_model import Link, fit, main, predict


def test_a_ring_by_hand() -> None:
    link = Link(bandwidth=1e9, latency=1e-5)
    assert link.ring(1, 1e9) == 0.0
    assert link.ring(2, 1e8) == pytest.approx(2 * 1e-5 + 0.1)
    assert link.ring(4, 1e8) == pytest.approx(6 * 1e-5 + 0.15)


def test_a_ring_inside_each_worker_and_one_over_them() -> None:
    link, inner = Link(1e9), Link(1e11)
    assert predict(0.1, 1e8, 4, 8, link, inner) == pytest.approx(0.1 + 2 * 7 / 8 * 1e-3 + 2 * 3 / 4 * 0.1)
    assert predict(0.1, 1e8, 4, 8, link) == pytest.approx(0.1 + 2 * 31 / 32 * 0.1)
    assert predict(0.1, 1e8, 1, 1, link) == 0.1


@pytest.mark.parametrize("members", [2, 4])
def test_a_fit_gives_back_the_link_that_made_the_times(members: int) -> None:
    link = Link(bandwidth=3e8, latency=2e-4)
    found = fit({s: link.ring(members, s) for s in (4e3, 4e4, 4e5, 4e6)}, members)
    assert (found.bandwidth, found.latency) == pytest.approx((3e8, 2e-4), rel=1e-6)


def test_a_latency_is_never_below_0() -> None:
    assert fit({1e3: 1e-6, 1e4: 2e-5, 1e5: 3e-4}, 2).latency == 0.0


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--step_ms=100", "--gradient_mb=100", "--link_gbps=8", "--link_us=0", "--workers=1,2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["1", "1", "100.00", "100.0%"]
    assert lines[2].split() == ["2", "2", "200.00", "50.0%"]
