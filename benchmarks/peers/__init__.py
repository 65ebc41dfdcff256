"""What the framework is measured against: one module a peer, each trained as people who know it well would.

``bench`` in pyproject.toml names the packages. A peer whose packages are missing is left out, by name.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping

# glibc gives large blocks back to the system and takes them again at every step, which costs torch page faults.
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1099511627776", "MALLOC_TOP_PAD_": "67108864"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """One contender besides the framework.

    Attributes:
      module: with the function ``train``.
      packages: modules that must be there.
      replicas: numbers of replicas that it can be measured with.
      shares_start: whether it reads weights and the order of examples from a file; see ``benchmarks.start``.
      environment: variables for its process.
      install: how to get the packages.
    """

    module: str
    packages: tuple[str, ...] = ()
    replicas: tuple[int, ...] = (1,)
    shares_start: bool = False
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    install: str = "pip install lockstep-tf[bench]"


def _torch(name: str, replicas: int) -> Peer:
    return Peer(
        module=f"benchmarks.peers.{name}",
        packages=("torch",),
        replicas=(replicas,),
        shares_start=True,
        environment=_KEEP_MEMORY,
    )


PEERS: dict[str, Peer] = {
    "bare": Peer(module="benchmarks.bare", replicas=(1, 2, 4)),
    "keras_fit": Peer(module="benchmarks.peers.keras_fit", replicas=(1, 2)),
    # Not on two replicas: under MirroredStrategy TensorFlow 2.21 fails in the graph of 20 steps ("must feed a value").
    "keras_fit_20": Peer(module="benchmarks.peers.keras_fit_20"),
    "orbit": Peer(
        module="benchmarks.peers.orbit",
        packages=("orbit", "tf_keras"),
        shares_start=True,
        install="pip install tf-keras, and pip install --no-deps tf-models-official, which holds Orbit",
    ),
    "torch": _torch("torch", 1),
    "torch_compile": _torch("torch_compile", 1),
    "torch_ddp": _torch("torch_ddp", 2),
}


def expanded(names: str) -> list[str]:
    """Peers of a comma separated list; ``keras_fit`` is measured with 1 and with 20 steps an execution.

    Raises:
      ValueError: a name that no peer has.
    """
    found: list[str] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in PEERS:
            raise ValueError(f"--against={names}: there is no {name!r}, only {', '.join(PEERS)}")
        found += ["keras_fit", "keras_fit_20"] if name == "keras_fit" else [name]
    return list(dict.fromkeys(found))


def missing(name: str) -> str:
    """Why the peer cannot be measured here; empty if it can."""
    peer = PEERS.get(name)
    lost = [p for p in peer.packages if importlib.util.find_spec(p) is None] if peer else []
    return f"{', '.join(lost)} not installed; {peer.install}" if peer and lost else ""
