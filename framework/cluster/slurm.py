"""Who takes part, from the variables that Slurm sets for each task that ``srun`` starts."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping

from framework.cluster.addresses import MOST, Cluster, check_host, expand, short, whole_number
from framework.errors import ConfigError

SOURCE = "Slurm"
SAMPLE = (
    "SLURM_JOB_NODELIST=gpu[001-003],cpu5 SLURM_NTASKS=7 'SLURM_TASKS_PER_NODE=2(x3),1' SLURM_PROCID=0, "
    "as `srun python train.py ...` sets them"
)
# Variables of the step that srun started, else those of the job: a step may have fewer nodes or tasks.
_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_COUNT = re.compile(r"([0-9]{1,10})(?:\(x([0-9]{1,10})\))?")
# Ports below the usual range of outgoing connections (32768 and up).
_FIRST_PORT, _PORTS = 10_000, 20_000


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of several that ``srun`` started; in the batch script itself it is not."""
    tasks = _first(environ, _TASKS)[1]
    return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ and tasks.strip() not in ("", "1")


def from_slurm(environ: Mapping[str, str], port: int = 0) -> Cluster:
    """One worker for each task of the step, in the order of ``SLURM_PROCID``.

    Args:
      environ: the environment.
      port: of the first task of each node, the next one has the next; 0: made from the ids of job and step, alike in
        all tasks.

    Raises:
      ConfigError: a variable is missing or malformed, or they do not fit each other.
    """
    nodes = _nodes(environ)
    tasks_key, tasks = _number(environ, _TASKS)
    if not 1 <= tasks <= MOST:
        raise _refusal(tasks_key, environ[tasks_key], f"it must be from 1 to {MOST}")
    counts = _counts(environ, tasks_key, tasks, len(nodes))
    _, rank = _number(environ, ("SLURM_PROCID",))
    if rank >= tasks:
        raise _refusal("SLURM_PROCID", str(rank), f"{tasks_key}={tasks}, so it runs from 0 to {tasks - 1}")
    places = _places(counts, environ.get("SLURM_DISTRIBUTION", ""))
    for key, mine in zip(("SLURM_NODEID", "SLURM_LOCALID"), places[rank]):
        if environ.get(key, "").strip() and _number(environ, (key,))[1] != mine:
            raise _refusal(
                key,
                environ[key],
                f"task {rank} should have {mine} by the counts of tasks: they are not dealt out in blocks; pass "
                "srun --distribution=block",
            )
    first = port or _port(environ)
    if first + max(counts) - 1 > 65535:
        raise ConfigError(
            f"worker_port={port} with {max(counts)} tasks on a node: the last port would be above 65535; for example "
            "--worker_port=12345"
        )
    return Cluster(tuple(f"{nodes[node]}:{first + local}" for node, local in places), rank, SOURCE)


def gpus_per_task(environ: Mapping[str, str]) -> int:
    """GPUs that ``SLURM_GPUS_PER_TASK`` gives each task (``2``, ``h100:2``); 0: not said.

    Raises:
      ConfigError: it is malformed.
    """
    text = environ.get("SLURM_GPUS_PER_TASK", "").strip()
    if not text:
        return 0
    numbers = [whole_number(part.rpartition(":")[2]) for part in text.split(",")]
    if any(not number for number in numbers):
        raise ConfigError(
            f"SLURM_GPUS_PER_TASK={short(text)} is no number of GPUs; for example SLURM_GPUS_PER_TASK=2 or h100:2"
        )
    return sum(number or 0 for number in numbers)


def _nodes(environ: Mapping[str, str]) -> list[str]:
    key, text = _first(environ, _NODES)

    def refuse(what: str) -> ConfigError:
        return _refusal(key, text, what)

    if not text.strip():
        raise ConfigError(f"cluster=slurm but {key} is not set; for example {SAMPLE}")
    nodes = expand(text, refuse)
    for node in nodes:
        check_host(node, refuse)
    if len(set(nodes)) < len(nodes):
        twice = collections.Counter(nodes).most_common(1)[0][0]
        raise refuse(f"{short(twice)} is in it twice")
    return nodes


def _counts(environ: Mapping[str, str], tasks_key: str, tasks: int, nodes: int) -> list[int]:
    """Tasks on each node."""
    key, text = _first(environ, _PER_NODE)
    if not text.strip():
        if tasks % nodes:
            raise ConfigError(
                f"{tasks_key}={tasks} on {nodes} nodes but {key} is not set, so the tasks of each node are not known; "
                f"for example {SAMPLE}"
            )
        return [tasks // nodes] * nodes
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        count, times = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if not count or not times:
            raise _refusal(key, text, f"{short(part)} is no number of tasks such as 2 or 2(x3)")
        if len(counts) + times > nodes:
            raise _refusal(key, text, f"it has more nodes than the list of nodes, which has {nodes}")
        counts += [count] * times
    if len(counts) < nodes:
        raise _refusal(key, text, f"it has {len(counts)} nodes but the list of nodes has {nodes}")
    if sum(counts) != tasks:
        raise _refusal(key, text, f"it adds up to {sum(counts)} tasks but {tasks_key}={tasks}")
    return counts


def _places(counts: list[int], distribution: str) -> list[tuple[int, int]]:
    """Node and number on the node of each task, in the order of their rank."""
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    how = re.split(r"[:,]", distribution.strip().lower())[0]
    if how == "cyclic":
        places.sort(key=lambda place: place[::-1])
    elif how not in ("", "*", "block"):
        raise _refusal("SLURM_DISTRIBUTION", distribution, "only block and cyclic are known; srun --distribution=block")
    return places


def _port(environ: Mapping[str, str]) -> int:
    """The same in all tasks of a step, another for the next job: neighbours in number may share a node."""
    ids = [
        _number(environ, (key,))[1] if environ.get(key, "").strip() else 0 for key in ("SLURM_JOB_ID", "SLURM_STEP_ID")
    ]
    return _FIRST_PORT + (ids[0] * 97 + ids[1] * 13) % _PORTS


def _first(environ: Mapping[str, str], keys: tuple[str, ...]) -> tuple[str, str]:
    """The first of the variables that is set, with its value; where none is, the usual one and an empty value."""
    for key in keys:
        if environ.get(key, "").strip():
            return key, environ[key]
    return keys[min(1, len(keys) - 1)], ""


def _number(environ: Mapping[str, str], keys: tuple[str, ...]) -> tuple[str, int]:
    key, text = _first(environ, keys)
    if not text:
        raise ConfigError(f"cluster=slurm but {key} is not set; for example {SAMPLE}")
    number = whole_number(text.strip())
    if number is None:
        raise _refusal(key, text, "it must be a whole number")
    return key, number


def _refusal(key: str, text: str, what: str) -> ConfigError:
    return ConfigError(f"{key}={short(text)}: {what}; for example {SAMPLE}; --cluster=none ignores Slurm")
