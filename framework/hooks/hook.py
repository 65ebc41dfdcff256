"""The hook: a callable on (step, values). When it is called is a separate object, a ``Trigger``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from framework.hooks.triggers import Trigger

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer

Values = Mapping[str, float]


class Hook:
    """A hook whose methods do nothing until overridden; any of them may be left out."""

    def begin(self, trainer: Trainer) -> None:
        """Called once before the first step, after a restore: ``trainer.step`` is where the run starts."""

    def __call__(self, step: int, values: Values) -> None:
        """Called when the hook's trigger fires, with the figures of the steps since it last fired.

        ``values`` holds ``loss``, the task's metrics, ``learning_rate``, ``examples_per_second``, ``step_ms``,
        ``input_wait`` (share of the time, 0..1) and ``grad_norm``. The run's own records also have ``tflops``, ``mfu``
        and what ``Trainer.units_per_example`` gives.
        """

    def evaluated(self, step: int, name: str, values: Values) -> None:
        """Called after each evaluation; ``name`` is empty for the only evaluation set."""

    def end(self, step: int, status: str) -> None:
        """Called once when training ends, also after an error; ``status`` as in ``summary.json``."""


class Scheduled(NamedTuple):
    """A hook (or any callable on (step, values)) and when it runs."""

    trigger: Trigger
    hook: Hook | Callable[[int, Values], Any]
