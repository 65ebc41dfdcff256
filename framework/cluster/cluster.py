"""Which workers take part: from TF_CONFIG or from flags, to one value that is printed and stored."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from framework.config import RunConfig
from framework.errors import ConfigError

SAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The worker processes of one run, in the order of their index; worker 0 is the chief."""

    workers: tuple[str, ...] = ()  # host:port each; empty: this process alone, no server
    index: int = 0
    source: str = "none"

    @property
    def num_workers(self) -> int:
        """Number of worker processes, at least 1."""
        return max(1, len(self.workers))

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the run's files. No decision about the training may depend on it."""
        return self.index == 0

    def describe(self) -> str:
        """One line for people: who takes part and which of them this process is."""
        if not self.workers:
            return "cluster: this process alone"
        return f"cluster: worker {self.index} of {self.num_workers} ({', '.join(self.workers)}), from {self.source}"


def resolve(config: RunConfig, environ: Mapping[str, str] | None = None) -> Cluster:
    """Returns the cluster that flags and environment describe.

    Args:
      config: ``cluster``, ``workers`` and ``worker_index`` are read.
      environ: the environment, ``os.environ`` if None.

    Raises:
      ConfigError: a setting is malformed; the message has the offending key and a correct sample.
    """
    environ = os.environ if environ is None else environ
    if config.workers:
        return _from_flags(config)
    if config.cluster == "none":
        return Cluster()
    text = environ.get("TF_CONFIG", "")
    cluster = _from_tf_config(text) if text.strip() else Cluster()
    if config.cluster == "tf_config" and not cluster.workers:
        what = "names no worker" if text.strip() else "is not set"
        raise ConfigError(f"cluster=tf_config but TF_CONFIG {what}; for example TF_CONFIG='{SAMPLE}'")
    return cluster


def _from_flags(config: RunConfig) -> Cluster:
    workers = tuple(part.strip() for part in config.workers.split(","))
    _check_addresses(workers, "workers", "--workers=host1:2222,host2:2222")
    index = config.worker_index
    assert index is not None  # RunConfig refuses workers without an index
    if index >= len(workers):
        raise ConfigError(
            f"worker_index={index} but workers names {len(workers)}; indices run from 0 to {len(workers) - 1}"
        )
    return Cluster(workers, index, "flags")


def _from_tf_config(text: str) -> Cluster:
    def refuse(what: str) -> ConfigError:
        return ConfigError(f"TF_CONFIG: {what}; a correct one: TF_CONFIG='{SAMPLE}'")

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise refuse(f"must be an object, not {type(value).__name__}")
    groups, task = value.get("cluster"), value.get("task")
    if not groups and not task:
        return Cluster()  # TensorFlow too reads an empty TF_CONFIG as no cluster
    if not isinstance(groups, dict) or not groups:
        raise refuse(f"key 'cluster' must be an object of lists of host:port, not {groups!r}")
    if not isinstance(task, dict):
        raise refuse(f"key 'task' must be an object with 'type' and 'index', not {task!r}")
    for kind, addresses in groups.items():
        if kind not in ("chief", "worker", "evaluator", "ps"):
            cure = "name it 'chief'" if kind == "master" else "use 'chief' and 'worker'"
            raise refuse(f"cluster has the task type {kind!r}; {cure}")
        if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
            raise refuse(f"cluster['{kind}'] must be a list of host:port, not {addresses!r}")
        if kind in ("ps", "evaluator") and addresses:
            raise refuse(f"cluster has '{kind}' tasks; only 'chief' and 'worker' take part in synchronous training")
    chiefs, workers = groups.get("chief", []), groups.get("worker", [])
    if len(chiefs) > 1:
        raise refuse(f"cluster['chief'] has {len(chiefs)} addresses; there is one chief")
    addresses = tuple(chiefs + workers)
    _check_addresses(addresses, "TF_CONFIG cluster", f"TF_CONFIG='{SAMPLE}'")
    kind, index = task.get("type"), _as_index(task.get("index"))
    if not isinstance(kind, str) or kind not in groups:
        raise refuse(f"task type {kind!r} is not in the cluster, which has {', '.join(map(repr, groups))}")
    if index is None or not 0 <= index < len(groups[kind]):
        raise refuse(f"task index {task.get('index')!r} is out of range: '{kind}' has {len(groups[kind])} task(s)")
    return Cluster(addresses, index + (len(chiefs) if kind == "worker" else 0), "TF_CONFIG")


def _as_index(value: Any) -> int | None:
    """An index as int; digits in a string count too (TensorFlow takes both), anything else is None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    return value if isinstance(value, int) else None


def _check_addresses(addresses: tuple[str, ...], key: str, sample: str) -> None:
    """Raises ConfigError unless all addresses are distinct ``host:port``."""
    if not addresses:
        raise ConfigError(f"{key} names no worker; for example {sample}")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or any(c.isspace() for c in address) or not (port.isascii() and port.isdigit()):
            raise ConfigError(f"{key} has the address {address!r} but it must be host:port; for example {sample}")
        if len(port) > 5 or not 0 < int(port) < 65536:
            raise ConfigError(f"{key} has the port {port} in {address!r}; ports run from 1 to 65535")
    for address in addresses:
        if addresses.count(address) > 1:
            raise ConfigError(f"{key} has the address {address!r} twice; each worker needs its own")
