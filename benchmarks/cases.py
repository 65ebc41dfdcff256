"""The cases: what is measured against what, how long, and which bounds hold."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.peers import PEERS
from benchmarks.workload import Workload


@dataclasses.dataclass(frozen=True)
class Bound:
    """The median over rounds of ``quantity`` must not be above ``limit``, or, with ``least``, not below it.

    Quantities are ``A/B``, milliseconds a step of contender A over those of B in the same round; ``A/B.first_step``,
    likewise of the seconds from a process's start to the end of its first step; and ``A.rss_growth_mb``, memory gained
    by contender A after the warm-up.
    """

    quantity: str
    limit: float
    least: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement.

    Attributes:
      name: for ``--case``.
      about: one line for people.
      workload: what every contender trains.
      contenders: peers, or modules of ``benchmarks``.
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


# Name -> workload, and steps in a window: of 20, since loops of peers run 20 steps at a time.
_NETWORKS: dict[str, tuple[Workload, int]] = {
    "mlp": (MLP, 100),
    "mlp_32": (dataclasses.replace(MLP, batch=32), 200),
    "resnet20": (Workload(network="resnet20", batch=64), 20),
    "transformer": (Workload(network="transformer", batch=16), 20),
}
# Peer -> how many times its time a step the framework's is to be.
_GOALS = {"bare": 0.99, "keras_fit": 1.3, "keras_fit_20": 1.3, "orbit": 1.15, "torch": 1.0, "torch_compile": 1.0}
_GOALS_2 = {"keras_fit": 1.7}
_GOAL_DDP = {"mlp": 1.8, "mlp_32": 1.8, "resnet20": 1.15, "transformer": 1.05}


def _peer_case(network: str, replicas: int) -> Case:
    workload, window_steps = _NETWORKS[network]
    peers = tuple(name for name, peer in PEERS.items() if replicas in peer.replicas)
    goals = _GOALS if replicas == 1 else {**_GOALS_2, "torch_ddp": _GOAL_DDP[network]}
    return Case(
        name=f"peers_{network}" + (f"_{replicas}" if replicas > 1 else ""),
        about=f"the trainer against its peers, {network}, batch {workload.batch}, {replicas} replica(s)",
        workload=dataclasses.replace(workload, replicas=replicas),
        contenders=("trainer", *peers),
        reference="trainer",
        bounds=tuple(Bound(f"{name}/trainer", limit, least=True) for name, limit in goals.items()),
        window_steps=window_steps,
        warm_up=2,
    )


def _start_up_case(network: str) -> Case:
    case = _peer_case(network, 1)
    return dataclasses.replace(
        case,
        name=f"startup_{network}",
        about=f"from the start of the process to the end of the first step, {network}",
        bounds=(Bound("keras_fit/trainer.first_step", 1.0, least=True),),
        contenders=tuple(name for name in case.contenders if name != "keras_fit_20"),
        window_steps=2,
        warm_up=1,
        windows=1,
    )


def _scaling_case(kind: str, network: str, replicas: int) -> Case:
    workload, window_steps = _NETWORKS[network]
    batch = workload.batch * (replicas if kind == "weak" else 1)
    return Case(
        name=f"{kind}_{network}_{replicas}",
        about=f"{kind} scaling, {network}, batch {batch}, {replicas} replica(s) that share the cores",
        workload=dataclasses.replace(workload, batch=batch, replicas=replicas),
        contenders=("trainer",),
        reference="trainer",
        window_steps=window_steps,
        windows=3,
    )


def _workers_case(network: str) -> Case:
    case = _peer_case(network, 2)
    return dataclasses.replace(
        case,
        name=f"workers_{network}",
        about=f"two worker processes against torch's two, a thread each, {network}, batch {case.workload.batch}",
        workload=dataclasses.replace(case.workload, threads=1),
        contenders=("workers", "torch_ddp"),
        reference="workers",
        bounds=(Bound("torch_ddp/workers", 0.8, least=True),),
    )


_PEER_CASES = tuple(_peer_case(network, replicas) for replicas in (1, 2) for network in _NETWORKS)
_START_UP_CASES = tuple(_start_up_case(network) for network in _NETWORKS)
_SCALING_CASES = tuple(
    _scaling_case(kind, network, replicas)
    for kind in ("weak", "strong")
    for network in ("mlp", "resnet20")
    for replicas in (1, 2, 4)
)

_WORKERS_CASES = tuple(map(_workers_case, _NETWORKS))

_SUITES = {
    "smoke": _CASES,
    "optimizers": _OPTIMIZER_CASES,
    "peers": _PEER_CASES,
    "workers": _WORKERS_CASES,
    "startup": _START_UP_CASES,
    "scaling": _SCALING_CASES,
    "full": (*_CASES, *_OPTIMIZER_CASES, *_PEER_CASES, *_WORKERS_CASES, *_START_UP_CASES, *_SCALING_CASES),
}
CASES = {case.name: case for case in _SUITES["full"]}
SUITES = {name: tuple(case.name for case in cases) for name, cases in _SUITES.items()}
