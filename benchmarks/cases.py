"""The cases: what is measured against what, how long, and which bounds hold."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.workload import Workload


@dataclasses.dataclass(frozen=True)
class Bound:
    """The median over rounds of ``quantity`` must not be above ``limit``.

    Quantities are ``A/B``, milliseconds a step of contender A over those of B in the same round, and
    ``A.rss_growth_mb``, memory gained by contender A after the warm-up.
    """

    quantity: str
    limit: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement.

    Attributes:
      name: for ``--case``.
      about: one line for people.
      workload: what every contender trains.
      contenders: modules of ``benchmarks``.
      reference: the contender that others are compared with.
      bounds: what ``--check`` checks.
      window_steps: steps in a window.
      warm_up: windows that are run and dropped, after the first step; at least 1.
      windows: windows that count.
      max_rounds: more rounds than this say nothing new.
    """

    name: str
    about: str
    workload: Workload
    contenders: tuple[str, ...] = ("trainer", "bare")
    reference: str = "bare"
    bounds: tuple[Bound, ...] = ()
    window_steps: int
    warm_up: int = 1
    windows: int = 5
    max_rounds: int = 1000

    def __post_init__(self) -> None:
        if self.warm_up < 1 or self.windows < 1 or self.window_steps < 2:
            raise ValueError(
                f"case {self.name}: warm_up={self.warm_up}, windows={self.windows}, window_steps={self.window_steps} "
                "but a case needs at least one window to warm up, one to measure, and two steps in each"
            )
        if self.reference not in self.contenders:
            raise ValueError(f"case {self.name}: the reference {self.reference!r} is not in {self.contenders}")

    @property
    def ends(self) -> list[int]:
        """Steps at which a contender reports: the first step, then the end of each window."""
        return [1, *(self.window_steps * (i + 1) for i in range(self.warm_up + self.windows))]


DIGITS = Workload(data="digits", features=64, hidden=(256, 256), batch=96)
MLP = Workload(data="random", features=784, hidden=(512, 512), batch=256)
OVERHEAD = (Bound("trainer/bare", 1.05),)

_CASES = (
    Case(
        name="overhead_digits",
        about="the trainer over the bare loop, 64-256-256-10, batch 96",
        workload=DIGITS,
        bounds=OVERHEAD,
        window_steps=400,
    ),
    Case(
        name="overhead_digits_1t",
        about="the same with one thread in each of TensorFlow's pools",
        workload=dataclasses.replace(DIGITS, threads=1),
        window_steps=400,
    ),
    Case(
        name="overhead_mlp",
        about="the trainer over the bare loop, 784-512-512-10, batch 256",
        workload=MLP,
        # That all gradients are finite is tested before every update, so updates cannot overlap the backward pass.
        bounds=(Bound("trainer/bare", 1.2),),
        window_steps=100,
    ),
    Case(
        name="overhead_mlp_32",
        about="the same, batch 32",
        workload=dataclasses.replace(MLP, batch=32),
        bounds=(Bound("trainer/bare", 1.2),),
        window_steps=200,
    ),
    Case(
        name="overhead_digits_2",
        about="two replicas on logical CPU devices against a bare MirroredStrategy loop, batch 96",
        workload=dataclasses.replace(DIGITS, replicas=2),
        window_steps=200,
    ),
    Case(
        name="overhead_mlp_2",
        about="the same, 784-512-512-10, batch 256",
        workload=dataclasses.replace(MLP, replicas=2),
        window_steps=80,
    ),
    Case(
        name="memory",
        about="memory of a training process with evaluations and checkpoints, after 500 and after 3,000 steps",
        workload=dataclasses.replace(DIGITS, eval_every=50, checkpoint_every=50),
        contenders=("trainer",),
        reference="trainer",
        bounds=(Bound("trainer.rss_growth_mb", 10.0),),
        window_steps=500,
        max_rounds=1,
    ),
)


def _optimizer_case(network: str, replicas: int, **workload: Any) -> Case:
    return Case(
        name=f"optimizer_{network}_{replicas}",
        about=f"fused AdamW against Keras 3's AdamW, both in the trainer, {network}, {replicas} replica(s)",
        workload=Workload(network=network, replicas=replicas, **workload),
        contenders=("trainer", "keras_optimizer"),
        reference="keras_optimizer",
        bounds=(Bound("trainer/keras_optimizer", 1.02),),
        window_steps=60 if network == "mlp" else 6,
        windows=3,
    )


_OPTIMIZER_CASES = tuple(
    _optimizer_case(network, replicas, **workload)
    for network, workload in (
        ("mlp", {"features": 784, "hidden": (512, 512), "batch": 256}),
        ("resnet20", {"batch": 64}),
        ("transformer", {"batch": 16}),
    )
    for replicas in (1, 2)
)

CASES = {case.name: case for case in (*_CASES, *_OPTIMIZER_CASES)}
SUITES = {
    "smoke": tuple(case.name for case in _CASES),
    "optimizers": tuple(case.name for case in _OPTIMIZER_CASES),
}
