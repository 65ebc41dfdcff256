"""What the trainer's step pieces share: micro-batches, noise, loss scale, replicas' state, average, reduction."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from framework.checkpoint.names import layers_of, made_trainable, trainable_variables, variable_names
from framework.cluster import strategy as strategies
from framework.errors import ConfigError, LockstepError
from framework.loop.feed import micro_parts
from framework.monitor import stamps
from framework.monitor.stamps import Stamps
from framework.step import gradients as step_gradients
from framework.step import randomness
from framework.step.autograph import users
from framework.step.gradients import StepSums, accumulate, local_only, native, power_of_two, row_count
from framework.step.reduce import Reduction, all_reduce_sum, reduce_stats
from framework.step.state import LossScale, ReplicaState, WeightAverage
from framework.step.update import Update, apply
from framework.step.values import LossOutput, Stat, as_stats

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer

_WISHES = "~wishes"  # name of the workers' wishes among the figures, which no figure of a user's can have

_thread = threading.local()  # each replica is traced in its own thread


class Stepper:
    """The pieces of a trainer's step, made of its config; ``train`` and ``evaluate`` are what the loop compiles."""

    def __init__(self, trainer: Trainer):
        config = trainer.config
        self._trainer = trainer
        self._scale: LossScale | None = None
        self._average: WeightAverage | None = None
        self._replica_state: ReplicaState | None = None
        self._generators: list[tf.Variable] = []
        # Raised by a worker that is to stop: it crosses with the sums, so that all stop behind the same step.
        # What this worker tells the others with the sums of a step: see StepResult.wishes.
        self._wishes = np.zeros(1 + trainer.cluster.num_workers, np.float32)
        self._told = tf.Variable(self._wishes, trainable=False) if trainer.cluster.num_workers > 1 else None
        self._warned: set[str] = set()
        self._known: set[str] = set()  # names of the model's variables
        self.packs: list[dict[str, Any]] = []
        self.columns: list[str] = []  # names of the columns of the loop's ``norms``
        self.jit, self._jit_reason = _choose_jit(config.jit, trainer.choice.device)
        wire = None if config.gradient_dtype == "float32" else tf.as_dtype(config.gradient_dtype)
        self.reduction = Reduction(
            pack_bytes=int(config.all_reduce_pack_mb * 1e6),
            options=strategies.communication_options(trainer.choice, config),
            wire=wire,
            wire_scale=power_of_two(config.global_batch_size),
            sparse=config.sparse_gradients,
            report=self._report,
            watch=self._stamp if stamps.possible(trainer) == "" else None,
        )

    def build(self) -> None:
        """Makes the variables that belong to the step; in the scope, after model and optimizers."""
        t, config = self._trainer, self._trainer.config
        named = variable_names(t.model)
        self._known = set(named)
        trainable = {native(v).ref() for v in trainable_variables(t.model)}
        rest = {name: v for name, v in named.items() if v.ref() not in trainable}
        self._generators = randomness.seed_generators(list(rest.values()), list(rest))
        generators = {v.ref() for v in self._generators}
        weights = {v.ref() for v in made_trainable(t.model)}
        held = {name: v for name, v in rest.items() if v.ref() not in generators | weights}
        self._replica_state = ReplicaState(held, t.replica_state())
        if config.precision == "mixed_float16" and self._scale is None:
            self._scale = LossScale(config.loss_scale or 2.0**15, dynamic=not config.loss_scale)
        if config.ema_decay:
            self._average = self._average or WeightAverage(config.ema_decay)
            self._average.add({n: v for n, v in named.items() if v.ref() in trainable})

    def state(self) -> dict[str, tf.Variable]:
        """Variables of a checkpoint by name."""
        parts = [part.state() for part in (self._scale, self._average) if part is not None]
        return {name: variable for part in parts for name, variable in part.items()}

    def averaged(self) -> Any:
        """A context manager inside which the model holds the averaged weights; without an average it does nothing."""
        return self._average.swapped() if self._average is not None else contextlib.nullcontext()

    def restart_average(self) -> None:
        """Starts the average of the weights, if there is one, again from the present weights."""
        if self._average is not None:
            self._average.restart()

    def describe(self) -> list[str]:
        """Lines about what is not the plainest choice."""
        config, lines = self._trainer.config, []
        if config.precision != "float32":
            scale = f", loss scale {config.loss_scale or 'dynamic'}" if config.precision == "mixed_float16" else ""
            lines.append(f"precision: {config.precision}, float32 weights{scale}")
        if config.jit != "off":
            lines.append(f"jit: {'on' if self.jit else 'off'} ({self._jit_reason})")
        return lines

    # --- pieces --------------------------------------------------------------------------------------------------

    def local_sums(
        self, batch: Any, variables: Sequence[tf.Variable], compute: Callable[[Any], LossOutput]
    ) -> StepSums:
        """See ``Trainer.gradients``."""
        t = self._trainer
        before = self._replica_state.read() if self._replica_state is not None else {}
        scale = self._scale.value() if self._scale is not None else None
        compute = users(compute)
        place = getattr(_thread, "place", None) or randomness.Place(t.config.seed, tf.zeros([], tf.int64))

        seeds = randomness.generator_seeds(self._generators)

        def one(micro_batch: Any, k: Any) -> StepSums:
            if tf.nest.flatten(micro_batch)[0].shape[0] is not None:
                return local_part(micro_batch, k)
            # It may have no example; then normalisation layers give NaN, in their gradients and in their statistics.
            there = row_count(micro_batch) > 0
            kept = self._replica_state.read() if self._replica_state is not None else {}
            sums = local_part(micro_batch, k)
            if self._replica_state is not None:
                self._replica_state.keep_unless(there, kept)
            return dataclasses.replace(sums, gradients=[_zero_unless(there, g) for g in sums.gradients])

        def local_part(micro_batch: Any, k: Any) -> StepSums:
            with randomness.at(dataclasses.replace(place, micro=k)):
                randomness.place_generators(self._generators, seeds)
                local = functools.partial(
                    step_gradients.gradients,
                    variables=variables,
                    scale=scale,
                    examples=t.config.global_batch_size,
                )
                if self.jit:
                    return _compiled(lambda batch: local(lambda: compute(batch)), micro_batch)
                return local(lambda: compute(micro_batch))

        unroll = t.loss_communicates or _communicates(t.model)
        count, sizes = t.config.accumulate_steps, self._micro_sizes(batch)
        if self.jit and unroll:
            raise ConfigError(
                "jit=on but the model reduces over replicas in its forward pass (synchronised batch normalisation): "
                "XLA here covers local work only; pass --jit=off"
            )
        sums = accumulate(one, batch, count, variables=variables, unroll=unroll, sizes=sizes)
        randomness.reset_generators(self._generators, seeds)
        self._note(variables, sums)
        rows = _rows(batch)
        state: dict[str, Stat] = {}
        if self._replica_state is not None:
            if t.strategy.num_replicas_in_sync > 1:
                state = self._replica_state.sums(before, rows.value)
            here = _step()
            here.common = before if here.common is None else here.common
        stats = {**sums.stats, "examples": rows}
        if self._told is not None:
            stats[_WISHES] = Stat("sum", self._told.read_value() / t.local_replicas)
        return dataclasses.replace(sums, stats=stats, state=state)

    def _micro_sizes(self, batch: Any) -> tf.Tensor | None:
        """Rows of each of this replica's micro-batches where they are not equal; None: as equal as can be.

        A pipeline deals out micro-batch by micro-batch (``BatchPlan``), so a micro-batch is the same on any number of
        replicas. Of what sizes cannot be told from one replica's rows alone when the batch is uneven.
        """
        t, count = self._trainer, self._trainer.config.accumulate_steps
        replicas = t.strategy.num_replicas_in_sync
        if count == 1 or replicas == 1 or not t.deals_by_plan or tf.nest.flatten(batch)[0].shape[0] is not None:
            return None
        (total,) = all_reduce_sum([row_count(batch)], self.reduction)
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return micro_parts(total, count, replica, replicas)[1]

    def apply(self, sums: StepSums, optimizer: str) -> Update:
        """See ``Trainer.apply``."""
        t, config, here = self._trainer, self._trainer.config, _step()
        if optimizer not in t.optimizers:
            raise ConfigError(f"apply(optimizer={optimizer!r}) but the optimizers are {list(t.optimizers)}")
        # The loss itself is not scaled: if it is not finite, no scale is to blame.
        overflow = tf.math.is_finite(sums.stats["loss"].value) if "loss" in sums.stats else tf.constant(True)
        overflow &= self._scale.can_fall() if self._scale is not None and sums.scale is not None else False

        # What the copies had in common: before a first gradients(), or after another apply(), which made them equal.
        common = here.common
        if common is None and self._replica_state is not None and here.updates:
            common = self._replica_state.read()

        def on_update() -> None:
            if self._replica_state is not None and common is not None:
                self._replica_state.commit(common, sums.state)
            if self._scale is not None and sums.scale is not None:
                self._scale.good_step()
            if self._average is not None:
                self._average.update()

        def on_skip() -> None:
            if self._replica_state is not None and common is not None:
                self._replica_state.undo(common)
            if self._scale is not None and sums.scale is not None:
                self._scale.bad_step(overflow)

        update = apply(
            sums,
            t.optimizers[optimizer],
            clip_global_norm=config.clip_global_norm,
            clip_norm=config.clip_norm,
            clip_value=config.clip_value,
            on_update=on_update,
            on_skip=on_skip,
        )
        here.common = None
        here.wishes = sums.stats.get(_WISHES)
        here.updates.append(update)
        here.alarms.append(tf.logical_not(update.finite | overflow))
        if sums.norms is not None:
            here.norms.append(sums.norms)
            here.columns += ["loss", *self._variable_names(sums.variables)]
        return update

    # --- what the loop compiles ----------------------------------------------------------------------------------

    def train(self, batch: Any, step: tf.Tensor) -> Any:
        """One training step on this replica, as ``framework.loop.loop.ReplicaStep``."""
        from framework.loop.loop import StepResult

        t, here = self._trainer, _Step()
        here.stamps = Stamps() if self.stamped else None
        _thread.step, _thread.place = here, randomness.Place(t.config.seed, step)
        try:
            with randomness.at(_thread.place):
                output = users(t.train_step)(batch)
        finally:
            _thread.step = _thread.place = None
        late = sorted(set(variable_names(t.model)) - self._known)
        if late:
            raise ConfigError(
                f"the model made {', '.join(late)} in the first step, too late for slots and copies on the replicas; "
                "make them in build_model"
            )
        if not here.updates:
            raise LockstepError(
                f"{type(t).__name__}.train_step returned without calling self.apply(...): nothing was updated"
            )
        stats = as_stats(output, "train_step")
        stats.pop(_WISHES, None)
        stats = reduce_stats({"examples": _rows(batch), **stats}, self.reduction)
        stats["learning_rate"] = Stat("last", here.updates[0].learning_rate, reduced=True)
        stats["grad_norm"] = Stat("last", here.updates[0].grad_norm, reduced=True)
        if self._scale is not None:
            stats["loss_scale"] = Stat("last", self._scale.value(), reduced=True)
        finite = tf.reduce_all([u.finite for u in here.updates])
        self.columns = here.columns
        norms = tf.concat(here.norms, 1) if here.norms else tf.zeros([0])
        wishes = None if here.wishes is None else here.wishes.value
        arrival = here.stamps.arrival() if here.stamps is not None else None
        return StepResult(stats, finite, tf.reduce_any(here.alarms), norms, wishes, arrival)

    @property
    def stamped(self) -> bool:
        """Whether steps tell each replica's ``StepResult.arrival``."""
        return self.reduction.watch is not None

    def _stamp(self, what: str, tensors: Sequence[tf.Tensor]) -> None:
        here = _step()
        if here.stamps is not None:
            here.stamps.note(what, tensors)

    def ask_to_stop(self, wish: float) -> None:
        """Makes the next step the last on all workers of a cluster, and tells them the sum of all wishes."""
        self._tell(0, wish)

    def ask_for(self, steps: int) -> None:
        """Tells the other workers, with the next steps, how long the inner loop behind these may be at most."""
        self._tell(1 + self._trainer.cluster.index, float(steps))

    def _tell(self, place: int, wish: float) -> None:
        assert self._told is not None
        if self._wishes[place] != wish:
            self._wishes[place] = wish
            self._told.assign(self._wishes)

    def evaluate(self, batch: Any, step: tf.Tensor) -> Any:
        """One evaluation step on this replica."""
        from framework.loop.loop import StepResult

        del step
        stats = {**as_stats(users(self._trainer.eval_step)(batch), "eval_step"), "examples": _rows(batch)}
        no = tf.constant(False)
        return StepResult(reduce_stats(stats, self.reduction), tf.constant(True), no, tf.zeros([0]))

    def _report(self, packs: list[dict[str, Any]]) -> None:
        if packs != self.packs:
            self.packs = packs
            if self._trainer.config.show_packs and self._trainer.cluster.is_chief:
                for i, pack in enumerate(packs):
                    size = f"{pack['bytes'] / 1e6:.3f} MB"
                    print(f"pack {i}: {pack['tensors']} tensors, {size}, {pack['dtype']}", flush=True)

    def _note(self, variables: Sequence[tf.Variable], sums: StepSums) -> None:
        """Warns once of variables that the loss does not depend on."""
        names = self._variable_names(variables)
        lost = [n for n, g in zip(names, sums.gradients, strict=True) if g is None and n not in self._warned]
        if lost:
            self._warned.update(lost)
            print(f"warning: the loss does not depend on {', '.join(lost)}; left unchanged", flush=True)

    def _variable_names(self, variables: Sequence[tf.Variable]) -> list[str]:
        names = {v.ref(): n for n, v in variable_names(self._trainer.model).items()}
        return [names.get(v.ref(), v.name) for v in variables]


class _Step:
    """What one replica's step leaves for the loop while it is traced."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.alarms: list[tf.Tensor] = []
        self.norms: list[tf.Tensor] = []
        self.columns: list[str] = []
        self.wishes: Stat | None = None
        self.stamps: Stamps | None = None
        self.common: Mapping[str, tf.Tensor] | None = None  # the replicas' state before local changes


def _step() -> _Step:
    """The step being traced in this thread; outside of the loop, one that nobody reads."""
    return getattr(_thread, "step", None) or _Step()


def _zero_unless(there: tf.Tensor, gradient: Any) -> Any:
    """``gradient``, or zeros if not ``there``; slices of no example have no rows anyway."""
    if gradient is None or isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.where(there, gradient, tf.zeros_like(gradient))


def _rows(batch: Any) -> Stat:
    return Stat("sum", tf.cast(row_count(batch), tf.float32))


def _communicates(model: Any) -> bool:
    """Whether the forward pass itself reduces over replicas, which a loop in the graph does not allow."""
    return any(getattr(layer, "synchronized", False) for layer in layers_of(model))


def _choose_jit(asked: str, device: str) -> tuple[bool, str]:
    if asked != "auto":
        return asked == "on", "as asked"
    if device == "tpu":
        return False, "a TPU compiles the whole step with XLA anyway"
    if device == "gpu":
        return False, "not measured on a GPU; try --jit=on"
    # Measured on two cores: ResNet-20 twice as slow under XLA, a small transformer 15 % faster (BUILD_NOTES.md).
    return False, "on CPU, XLA takes convolutions away from oneDNN; --jit=on gains on a transformer"


def _compiled(local: Callable[[Any], StepSums], batch: Any) -> StepSums:
    """``local`` under XLA; the function is new for each replica's trace, because it holds that replica's variables."""
    kept: dict[str, Any] = {}

    @tf.function(jit_compile=True)
    def run(batch: Any) -> Any:
        with local_only("inside XLA; pass --jit=off"):
            sums = kept["sums"] = local(batch)
        dense = [None if g is None else tf.convert_to_tensor(g) for g in sums.gradients]
        return dense, sums.weight, {n: (s.value, s.weight) for n, s in sums.stats.items()}

    gradients, weight, stats = run(batch)
    sums: StepSums = kept["sums"]
    named = {n: sums.stats[n]._replace(value=value, weight=weight) for n, (value, weight) in stats.items()}
    return dataclasses.replace(sums, gradients=gradients, weight=weight, stats=named)
