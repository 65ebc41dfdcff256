"""Who takes part, from ``TF_CONFIG``: a JSON text in the environment, also what Kubeflow's operator sets."""

from __future__ import annotations

import json
from typing import Any

from framework.cluster.addresses import Cluster, check_addresses, short
from framework.errors import ConfigError

SAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'


def from_tf_config(text: str) -> Cluster:
    """The cluster that the text describes; a chief comes first, without one worker 0 is the chief.

    An empty object, or one that names nobody, is this process alone, as for TensorFlow.

    Raises:
      ConfigError: it is malformed; the message has the key and a correct sample.
    """

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
        return Cluster()
    if not isinstance(groups, dict) or not groups:
        raise refuse(f"key 'cluster' must be an object of lists of host:port, not {short(groups)}")
    if not isinstance(task, dict):
        raise refuse(f"key 'task' must be an object with 'type' and 'index', not {short(task)}")
    for kind, addresses in groups.items():
        if kind not in ("chief", "worker", "evaluator", "ps"):
            cure = "name it 'chief'" if kind == "master" else "use 'chief' and 'worker'"
            raise refuse(f"cluster has the task type {short(kind)}; {cure}")
        if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
            raise refuse(f"cluster['{kind}'] must be a list of host:port, not {short(addresses)}")
        if kind in ("ps", "evaluator") and addresses:
            raise refuse(f"cluster has '{kind}' tasks; only 'chief' and 'worker' take part in synchronous training")
    chiefs, workers = groups.get("chief", []), groups.get("worker", [])
    if len(chiefs) > 1:
        raise refuse(f"cluster['chief'] has {len(chiefs)} addresses; there is one chief")
    addresses = tuple(chiefs + workers)
    check_addresses(addresses, "TF_CONFIG cluster", f"TF_CONFIG='{SAMPLE}'")
    kind, index = task.get("type"), _as_index(task.get("index"))
    if not isinstance(kind, str) or kind not in groups:
        raise refuse(f"task type {short(kind)} is not in the cluster, which has {', '.join(map(repr, groups))}")
    if index is None or not 0 <= index < len(groups[kind]):
        raise refuse(f"task index {short(task.get('index'))} is out of range: '{kind}' has {len(groups[kind])} task(s)")
    return Cluster(addresses, index + (len(chiefs) if kind == "worker" else 0), "TF_CONFIG")


def to_tf_config(addresses: list[str], index: int) -> str:
    """The ``TF_CONFIG`` of worker ``index``."""
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})


def _as_index(value: Any) -> int | None:
    """An index as int; digits in a string count too (TensorFlow takes both), anything else is None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    return value if isinstance(value, int) else None
