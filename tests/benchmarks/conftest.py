"""Contenders that are made of numbers: no process, no TensorFlow, no clock."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.cases import Bound, Case
from benchmarks.process import ContenderFailed, StartUp, Window
from benchmarks.workload import Workload


@dataclasses.dataclass
class Fake:
    """One contender: what it takes, what it loses, and when it breaks."""

    ms: tuple[float, ...] = (1.0,)  # milliseconds a step in each round; the last one stands for all later rounds
    cpu_ms: float = 1.0
    warm_up_ms: float = 50.0
    first_step_s: float = 9.0
    import_s: float = 4.0
    parameters: int = 10
    losses: tuple[float, ...] = (2.0, 1.0)  # of the first step, then of each window; the last one stands
    rss_mb: tuple[float, ...] = (100.0,)  # after each window; the last one stands
    fails_at: int | None = None  # reports before it breaks


class FakeProcess:
    """Stands for ``ContenderProcess``; writes down in ``log`` when it was asked for what."""

    def __init__(self, case, name, fake, number, log):
        self._case, self._name, self._fake, self._log = case, name, fake, log
        self._round = number
        self._reports = 0
        log.append(f"open {name}")

    def start_up(self):
        self._report("start")
        facts = {"parameters": self._fake.parameters, "settings": {}}
        return StartUp(self._fake.import_s, self._fake.first_step_s, self._fake.losses[0], 90.0, facts)

    def window(self):
        number = self._reports  # 1 is the first window
        self._report("window")
        case, fake = self._case, self._fake
        ms = fake.warm_up_ms if number <= case.warm_up else fake.ms[min(self._round, len(fake.ms) - 1)]
        steps = case.ends[number] - case.ends[number - 1]
        return Window(
            step=case.ends[number],
            steps=steps,
            seconds=ms * steps / 1e3,
            cpu_seconds=fake.cpu_ms * steps / 1e3,
            loss=fake.losses[min(number, len(fake.losses) - 1)],
            rss_mb=fake.rss_mb[min(number, len(fake.rss_mb)) - 1],
        )

    def close(self):
        self._log.append(f"close {self._name}")

    def _report(self, what):
        self._log.append(f"{what} {self._name}")
        if self._reports == self._fake.fails_at:
            raise ContenderFailed(f"contender {self._name} broke")
        self._reports += 1


@pytest.fixture
def fakes():
    """``fakes(trainer=Fake(...), bare=Fake(...))``: an opener of fake processes, whose ``log`` says what was asked."""

    def make(**by_name):
        log, rounds = [], dict.fromkeys(by_name, 0)

        def open_contender(case, name):
            number = rounds[name]
            rounds[name] += 1
            return FakeProcess(case, name, by_name[name], number, log)

        open_contender.log = log
        return open_contender

    return make


@pytest.fixture
def fake():
    """The class ``Fake``."""
    return Fake


@pytest.fixture
def case():
    """A small case with a bound on the ratio."""
    return Case(
        name="small",
        about="of numbers only",
        workload=Workload(data="digits", features=64, hidden=(4,), batch=96),
        bounds=(Bound("trainer/bare", 1.05),),
        window_steps=10,
        windows=2,
    )
