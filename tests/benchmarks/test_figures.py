"""Medians and ratios, worked out by hand."""

import pytest

from benchmarks import figures
from benchmarks.figures import Spread
from benchmarks.process import StartUp, Window
from benchmarks.rounds import Run


def run(seconds, *, steps=10, cpu=1.0, rss=(100.0,)):
    """A run whose windows took ``seconds``."""
    start = StartUp(4.0, 9.0, 2.0, 90.0, {})
    windows = [
        Window((i + 2) * steps, steps, s, cpu, 1.0, rss[min(i + 1, len(rss) - 1)]) for i, s in enumerate(seconds)
    ]
    return Run(start, [Window(steps, steps - 1, 99.0, 99.0, 1.5, rss[0])], windows)


def test_a_spread_has_median_least_and_greatest():
    assert Spread((3.0, 1.0, 2.0)).to_dict() == {"median": 2.0, "min": 1.0, "max": 3.0, "rounds": [3.0, 1.0, 2.0]}
    assert Spread((1.0, 4.0)).median == 2.5


def test_milliseconds_a_step_are_the_median_over_windows_so_one_disturbed_window_does_not_count():
    assert figures.step_ms(run([0.020, 0.900, 0.030])) == pytest.approx(3.0)
    assert figures.cpu_ms(run([0.020], cpu=0.05)) == pytest.approx(5.0)


def test_the_ratio_is_taken_within_a_round_and_then_the_median():
    # Rounds of 2, 20 and 6 ms against 1, 20 and 2 ms: ratios 2, 1, 3, median 2. Medians 6 and 2 would give 3.
    rounds = [
        {"trainer": run([0.02]), "bare": run([0.01])},
        {"trainer": run([0.20]), "bare": run([0.20])},
        {"trainer": run([0.06]), "bare": run([0.02])},
    ]
    ratio = figures.ratio(rounds, "trainer", "bare")
    assert ratio.values == pytest.approx((2.0, 1.0, 3.0))
    assert ratio.median == pytest.approx(2.0)


def test_a_round_that_only_one_came_through_gives_no_ratio():
    rounds = [{"bare": run([0.01])}, {"trainer": run([0.02]), "bare": run([0.01])}]
    assert figures.ratio(rounds, "trainer", "bare").values == pytest.approx((2.0,))
    assert figures.over_rounds(rounds, "trainer", figures.step_ms).values == pytest.approx((2.0,))


def test_growth_of_memory_is_from_the_end_of_the_warm_up_to_the_last_window():
    assert figures.rss_growth_mb(run([1.0, 1.0, 1.0], rss=(500.0, 507.0, 503.0, 504.5))) == 4.5
