"""The check that all replicas of all workers hold the same state: between inner loops, compiled on its own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from framework.cluster.agree import gather_arrays
from framework.errors import CheckFailed
from framework.hooks.triggers import EveryNSteps, Never
from framework.monitor import differences
from framework.monitor.differences import Difference
from framework.monitor.fingerprint import fingerprints, has_bits
from framework.monitor.ledger import Ledger
from framework.monitor.replicas import gather_slots
from framework.step.reduce import Reduction, plan_packs

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer

# Small variables of one dtype share a fingerprint: of ResNet-20 with its slots two packs are left, so tracing is quick.
_PACK_BYTES = 4_000_000
_NAMED = 3  # variables named in the message; the rest are counted

FOLDER = "replica_check"


class ReplicaCheck:
    """Compares every variable of a checkpoint, bit for bit, over all replicas of all workers.

    All workers have to call it at the same steps, and do: the trigger goes by steps alone.

    Args:
      trainer: whose state is compared; ``check_replicas_every`` of its config says how often.
      ledger: where the time is booked, as ``checks``.
    """

    def __init__(self, trainer: Trainer, ledger: Ledger):
        self._trainer = trainer
        self._ledger = ledger
        self._every = trainer.config.check_replicas_every
        self._on = bool(self._every) and trainer.strategy.num_replicas_in_sync > 1
        self.trigger = EveryNSteps(self._every) if self._on else Never()
        self._compiled: tuple[dict[str, tf.Variable], Callable[..., Any]] | None = None
        self._left_out: list[str] = []
        self._times = 0
        self._passed_at: int | None = None

    def describe(self) -> str:
        """A line for the start of a run; empty where there is nothing to compare."""
        if not self._on:
            return ""
        return f"checks: all replicas hold the same bits, at the start, every {self._every} steps and at the end"

    def summary(self) -> Any:
        """What ``summary.json`` says of it."""
        if not self._on:
            return "off" if not self._every else "one replica: nothing to compare"
        return {
            "every": self._every,
            "times": self._times,
            "last_step": self._passed_at,
            "variables": len(self._compiled[0]) if self._compiled else 0,
            "left_out": self._left_out,
        }

    def compare(self, *, unless_done: bool = False) -> None:
        """Compares the state as it is now; does nothing with one replica, or if the check is off.

        Args:
          unless_done: not if this step has passed already.

        Raises:
          CheckFailed: copies differ: on all workers alike, after the chief has written the details to ``run_dir``.
        """
        if not self._on or (unless_done and self._passed_at == self._trainer.step):
            return
        step = self._trainer.step
        with self._ledger.timed("checks"):
            variables, function = self._prepared()
            # The step is the key: what one check cannot see by bad luck the next one will.
            table = np.asarray(function(tf.constant(step, tf.int64)))
            if (table != table[0]).any():
                self._fail(variables, table)
        self._times += 1
        self._passed_at = step

    def _prepared(self) -> tuple[dict[str, tf.Variable], Callable[..., Any]]:
        """The variables and the compiled check of them; made again when there are others (``Trainer.refresh``)."""
        state = self._trainer.state()
        variables = {name: v for name, v in state.items() if _comparable(v)}
        if self._compiled is None or not _same(self._compiled[0], variables):
            self._left_out = [name for name in state if name not in variables]
            how = dataclasses.replace(self._trainer.stepper.reduction, report=None)
            self._compiled = variables, compiled(self._trainer.strategy, list(variables.values()), how)
        return self._compiled

    def _fail(self, variables: Mapping[str, tf.Variable], table: np.ndarray) -> None:
        t = self._trainer
        local = {name: t.strategy.experimental_local_results(v) for name, v in variables.items()}
        copies = [{name: v[i].numpy() for name, v in local.items()} for i in range(t.local_replicas)]
        differing, details = differences.find(copies, lambda arrays: gather_arrays(t.strategy, t.cluster, arrays))
        path = self._write(differing, details)
        raise CheckFailed(self._message(table, len(variables), differing, details, path))

    def _message(
        self, table: np.ndarray, count: int, differing: Sequence[str], details: Sequence[Difference], path: str
    ) -> str:
        t = self._trainer
        odd = sorted({replica for one in details for replica in one.odd})
        if not differing:  # what the devices computed differs, and what they hold does not
            odd = differences.majority([hash(row.tobytes()) for row in table])
            what = f"step {t.step}: replicas computed different fingerprints of equal variables"
        else:
            parts = [one.describe(self._who) for one in details[:_NAMED]]
            more = f"; and {len(differing) - len(parts)} more" if len(differing) > len(parts) else ""
            what = f"step {t.step}: replicas differ in {len(differing)} of {count} variables: {'; '.join(parts)}{more}"
        alone = f"; in the minority: {', '.join(map(self._who, odd))}" if odd else ""
        last = "it never passed" if self._passed_at is None else f"it last passed at step {self._passed_at}"
        where = f"; details: {path}" if path else ""
        return (
            f"{what}{alone} (check of replicas; {last}){where}. Look for an assignment outside the step, a seed or "
            "data of one replica's own, or a faulty device; go on from a checkpoint of the last passed step, or older"
        )

    def _who(self, replica: int) -> str:
        cluster = self._trainer.cluster
        worker = f" (worker {replica // self._trainer.local_replicas})" if cluster.num_workers > 1 else ""
        return f"replica {replica}{worker}"

    def _write(self, differing: Sequence[str], details: Sequence[Difference]) -> str:
        """Writes the details, on the chief; the path, or nothing where there is no run folder."""
        from framework.loop import files

        t = self._trainer
        if not t.config.run_dir:
            return ""
        path = os.path.join(t.config.run_dir, FOLDER, f"step-{t.step:08d}.json")
        if t.cluster.is_chief:
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                files.write_json(
                    path,
                    {
                        "step": t.step,
                        "last_passed_step": self._passed_at,
                        "replicas": [self._who(i) for i in range(t.strategy.num_replicas_in_sync)],
                        "differing": list(differing),
                        "variables": [dataclasses.asdict(one) for one in details],
                    },
                )
            except OSError as error:  # what was found is worth more than where it is kept
                print(f"warning: {path} was not written: {error}", flush=True)
                return ""
        return path


def compiled(strategy: Any, variables: Sequence[tf.Variable], how: Reduction | None = None) -> Callable[..., Any]:
    """The check as a ``tf.function``: key (int64 scalar) -> fingerprints of all packs, int64 ``[replicas, packs]``.

    Args:
      strategy: the variables were made in its scope.
      variables: numeric or bool, of known shapes.
      how: how the fingerprints cross the replicas; None: the defaults.
    """
    packs = plan_packs(variables, _PACK_BYTES)

    def replica(key: tf.Tensor) -> tf.Tensor:
        # In replica context a handle is that of the replica's own copy. read_value adds ops to each: for ResNet-20 with
        # its slots on two replicas the graph had 2,628 ops with it and has 1,424, and tracing is most of a first check.
        values = [tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype) for v in variables]
        return gather_slots(fingerprints([[values[i] for i in pack] for pack in packs], key), how)

    def check(key: tf.Tensor) -> tf.Tensor:
        return strategy.experimental_local_results(strategy.run(replica, args=(key,)))[0]

    return tf.function(check, autograph=False)


def _comparable(variable: tf.Variable) -> bool:
    """Whether copies are meant to be equal, and can be compared."""
    apart = getattr(variable, "synchronization", None) == tf.VariableSynchronization.ON_READ
    return not apart and has_bits(variable.dtype) and variable.shape.num_elements() is not None


def _same(a: Mapping[str, tf.Variable], b: Mapping[str, tf.Variable]) -> bool:
    return list(a) == list(b) and all(x is y for x, y in zip(a.values(), b.values(), strict=True))
