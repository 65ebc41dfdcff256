"""Rounds of a case: each contender in a fresh process, windows in turn, the order reversed from round to round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from benchmarks.cases import Case
from benchmarks.equal import difference
from benchmarks.process import ContenderFailed, StartUp, Window


class Process(Protocol):
    """What a round needs of ``ContenderProcess``."""

    def start_up(self) -> StartUp: ...

    def window(self) -> Window: ...

    def close(self) -> None: ...


# Starts the contender of a case with this name.
Open: TypeAlias = Callable[[Case, str], Process]


@dataclasses.dataclass
class Run:
    """One contender in one round."""

    start_up: StartUp
    warm_up: list[Window]  # left out of every figure of the steady state
    windows: list[Window] = dataclasses.field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """Loss of the first step, then the mean loss of each window."""
        return [self.start_up.loss, *(w.loss for w in [*self.warm_up, *self.windows])]


@dataclasses.dataclass
class Rounds:
    """What was measured, and who was thrown out and why."""

    runs: list[dict[str, Run]] = dataclasses.field(default_factory=list)
    rejected: dict[str, str] = dataclasses.field(default_factory=dict)


def run_rounds(case: Case, rounds: int, open_contender: Open, say: Callable[[str], None]) -> Rounds:
    """Measures a case.

    A contender that fails, or does not do the same work as the reference, is thrown out of all rounds with a message.
    """
    result = Rounds()
    for number in range(rounds):
        names = [n for n in case.contenders if n not in result.rejected]
        order = names if number % 2 == 0 else names[::-1]
        runs, failures = run_round(case, order, open_contender)
        failures.update(_unequal(case, runs))
        result.rejected.update(failures)
        result.runs.append(runs)
        for name, why in failures.items():
            say(f"{case.name}: {name} is thrown out: {why}")
    for runs in result.runs:
        for name in result.rejected:
            runs.pop(name, None)
    return result


def run_round(case: Case, order: Sequence[str], open_contender: Open) -> tuple[dict[str, Run], dict[str, str]]:
    """One round: contenders start and warm up one after the other, then take turns, window by window.

    Only one contender computes at any time. The order is reversed from window to window, too.

    Returns:
      The run of each contender that came through, and the reason for each that did not.
    """
    processes: dict[str, Process] = {}
    runs: dict[str, Run] = {}
    failures: dict[str, str] = {}
    try:
        for name in order:
            process = processes[name] = open_contender(case, name)
            try:
                runs[name] = Run(process.start_up(), [process.window() for _ in range(case.warm_up)])
            except ContenderFailed as error:
                failures[name] = str(error)
        for number in range(case.windows):
            for name in order if number % 2 == 0 else order[::-1]:
                if name in failures:
                    continue
                try:
                    runs[name].windows.append(processes[name].window())
                except ContenderFailed as error:
                    failures[name] = str(error)
    finally:
        for process in processes.values():
            process.close()
    return {name: run for name, run in runs.items() if name not in failures}, failures


def _unequal(case: Case, runs: dict[str, Run]) -> dict[str, str]:
    """Contenders that did not do the reference's work, with the difference."""
    reference = runs.get(case.reference)
    if reference is None:
        return {}
    found = {name: difference(reference, run) for name, run in runs.items() if run is not reference}
    return {name: why for name, why in found.items() if why}
