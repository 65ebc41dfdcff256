"""``Trainer``: what a user subclasses. It builds everything in the strategy's scope and owns the step."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from framework import optimizers
from framework.checkpoint.names import fresh_keras_names, variable_names
from framework.cluster import cluster as clusters
from framework.cluster import devices
from framework.cluster import strategy as strategies
from framework.config import RunConfig
from framework.errors import ConfigError, LockstepError
from framework.hooks.hook import Scheduled
from framework.loop.feed import Data, Position
from framework.loop.run import Run
from framework.optimizers.base import Optimizer
from framework.step import gradients as step_gradients
from framework.step import reduce as step_reduce
from framework.step import update as step_update
from framework.step.gradients import StepSums
from framework.step.update import Update
from framework.step.values import LossOutput, Stat, as_stats


class Trainer:
    """Trains a model on every device of a strategy with a visible, hand-written step.

    Subclass it, write ``build_model``, ``train_data`` (or ``eval_data``) and ``compute_loss``, and call ``train``. The
    devices are configured and the strategy is made here, so make the trainer before TensorFlow's first op; model and
    optimizer are built at their first use.

    Args:
      config: the run's settings.
      **options: values for the fields of the class's ``Options`` dataclass, if it has one; then ``self.options``.

    Raises:
      ConfigError: the request is impossible, or there is neither training nor evaluation data.
    """

    # RunConfig fields that suit the task; the command line uses them where no flag was given.
    recipe: ClassVar[Mapping[str, Any]] = {}
    # A dataclass of the task's own settings; its fields become flags of the task.
    Options: ClassVar[type | None] = None

    def __init__(self, config: RunConfig, **options: Any):
        kind = type(self)
        if kind.train_data is Trainer.train_data and kind.eval_data is Trainer.eval_data:
            raise ConfigError(f"{kind.__name__} has neither train_data nor eval_data; write at least one of them")
        if options and kind.Options is None:
            raise ConfigError(f"{kind.__name__} takes no option {', '.join(options)}; it has no Options dataclass")
        self.config = config
        self.options: Any = kind.Options(**options) if kind.Options else None
        self.cluster = clusters.resolve(config)
        self.choice = _choose(config, self.cluster)
        strategies.configure_devices(self.choice, config)
        self.strategy = strategies.build(self.choice, config, self.cluster)
        self._step = 0
        self._model: Any = None
        self._optimizers: dict[str, Optimizer] = {}
        self._communication = strategies.communication_options(self.choice, config)
        self._pack_bytes = int(config.all_reduce_pack_mb * 1e6)
        self._run = Run(self)

    # --- what a subclass writes ----------------------------------------------------------------------------------

    def build_model(self) -> Any:
        """Returns a ``keras.Model``, ``keras.layers.Layer`` or ``tf.Module``; called in the strategy's scope."""
        raise NotImplementedError(f"{type(self).__name__} needs build_model()")

    def build_optimizer(self) -> Any:
        """Returns an optimizer of ``framework.optimizers`` or of Keras; the default is what the config names.

        For several optimizers, a dict: name -> (optimizer, its variables). ``self.model`` exists by then.
        """
        return optimizers.from_config(self.config, self.total_steps)

    def train_data(self) -> Data | None:
        """Training data: a pipeline, a ``tf.data.Dataset`` of global batches, or a function of ``InputContext``.

        Asked for at each call of ``train``; a pipeline goes on at the position that was reached.
        """
        return None

    def eval_data(self) -> Data | Mapping[str, Data] | None:
        """Evaluation data, or a dict of several sets by name; asked for once."""
        return None

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        """Returns one replica's losses, one per example. Runs in replica context, also with an empty batch."""
        raise NotImplementedError(f"{type(self).__name__} needs compute_loss(model, batch, *, training)")

    def hooks(self) -> Sequence[Scheduled]:
        """Hooks of the task's own; they run after the framework's."""
        return ()

    def train_step(self, batch: Any) -> Any:
        """One step in replica context: local sums, all-reduce, update. Returns the sums to report."""
        sums = self.reduce(self.gradients(batch))
        self.apply(sums)
        return sums

    def eval_step(self, batch: Any) -> Any:
        """One evaluation step in replica context; returns this replica's sums, which the framework reduces."""
        return self.loss_output(batch, training=False)

    # --- the pieces of a step ------------------------------------------------------------------------------------

    def loss_output(self, batch: Any, *, training: bool) -> LossOutput:
        """``compute_loss``, with the Keras model's own regularisation losses as penalty unless one was given."""
        output = self.compute_loss(self.model, batch, training=training)
        losses = getattr(self.model, "losses", None)
        if isinstance(output, LossOutput) and output.penalty is None and losses:
            output = dataclasses.replace(output, penalty=tf.add_n(losses))
        return output

    def gradients(self, batch: Any, variables: Sequence[Any] | None = None) -> StepSums:
        """This replica's sums of losses, gradients and figures for ``batch``.

        Args:
          batch: one replica's batch.
          variables: to differentiate for; None: the model's trainable variables.
        """
        wanted = self.trainable_variables if variables is None else variables
        sums = step_gradients.gradients(lambda: self.loss_output(batch, training=True), wanted)
        _warn_without_gradient(sums, self._names)
        return dataclasses.replace(sums, stats={**sums.stats, "examples": _rows(batch)})

    def reduce(self, sums: StepSums) -> StepSums:
        """``sums`` added over all replicas, with the config's packing and algorithm."""
        return step_reduce.reduce(sums, pack_bytes=self._pack_bytes, options=self._communication)

    def apply(self, sums: StepSums, optimizer: str = "") -> Update:
        """Divides, clips as configured, and updates with the optimizer of that name (empty: the only one)."""
        if optimizer not in self._optimizers:
            raise ConfigError(f"apply(optimizer={optimizer!r}) but the optimizers are {list(self._optimizers)}")
        update = step_update.apply(
            sums,
            self._optimizers[optimizer],
            clip_global_norm=self.config.clip_global_norm,
            clip_value=self.config.clip_value,
        )
        _updates().append(update)
        return update

    # --- what a caller uses --------------------------------------------------------------------------------------

    def train(self, steps: int | None = None, *, evaluate: bool = True) -> dict[str, float]:
        """Trains to the configured total, or ``steps`` more, and returns the final figures.

        Args:
          steps: None: to the total of the config (counted from step 0, also after a resume); an int: that many more.
          evaluate: evaluate every ``eval_every`` steps and at the end, if there is evaluation data.

        Returns:
          ``loss`` and the task's metrics over the steps since the last record; with ``eval/`` before them those of the
          last evaluation. Empty if nothing was left to do.

        Raises:
          ConfigError: the settings or the data cannot work; CheckFailed: a step was not finite; Preempted: SIGTERM came
            and the step reached is saved; KeyboardInterrupt: likewise for Ctrl-C.
        """
        if steps is not None and steps < 1:
            raise ConfigError(f"train(steps={steps}) but it must be at least 1, or None for the configured total")
        return self._run.train(steps, evaluate=evaluate)

    def evaluate(self) -> dict[str, float]:
        """Evaluates every example of ``eval_data`` once, from the newest checkpoint if nothing was trained here.

        Returns:
          ``loss``, the task's metrics and ``examples`` (their count); with ``NAME/`` before them for several sets.
        """
        return self._run.evaluate()

    @property
    def step(self) -> int:
        """Steps done since the beginning of the run, also before a resume."""
        return self._step

    @property
    def position(self) -> Position:
        """Where the training is in its data."""
        return self._run.source.position

    @position.setter
    def position(self, position: Position) -> None:
        self._run.source.position = position

    @property
    def examples_seen(self) -> int:
        """Training examples delivered since the beginning of the run."""
        return self.position.examples

    @property
    def total_steps(self) -> int | None:
        """The step the run is to end at; None: at the end of data whose length is not known."""
        return self._run.source.total_steps

    @property
    def model(self) -> Any:
        """The model, built in the scope at the first use."""
        if self._model is None:
            self._build_model()
        return self._model

    @property
    def optimizer(self) -> Any:
        """The optimizer; with several, a dict by name."""
        self.build()
        return self._optimizers[""] if list(self._optimizers) == [""] else self._optimizers

    @property
    def trainable_variables(self) -> list[tf.Variable]:
        """The model's trainable variables, as TensorFlow's."""
        return [step_gradients.native(v) for v in self.model.trainable_variables]

    @property
    def local_replicas(self) -> int:
        """Replicas of this worker."""
        return self.strategy.num_replicas_in_sync // self.cluster.num_workers

    @property
    def first_replica(self) -> int:
        """Number of this worker's first replica among all."""
        return self.cluster.index * self.local_replicas

    def advance(self, steps: int) -> None:
        """Moves ``step``; the loop calls it."""
        self._step += steps

    def describe(self) -> list[str]:
        """Lines that say who takes part, how, and on what batch."""
        replicas, batch = self.strategy.num_replicas_in_sync, self.config.global_batch_size
        share, rest = divmod(batch, replicas)
        parts = f"{share}" if not rest else f"{share + 1} on the first {rest} and {share} on the others"
        return [
            self.cluster.describe(),
            self.choice.describe(),
            f"batch: {batch} examples a step = {replicas} replica{'s' * (replicas > 1)} x {parts}; any split is exact",
        ]

    def state(self) -> dict[str, tf.Variable]:
        """Every variable of a checkpoint by name: the model's and the optimizers'."""
        self.build()
        state = {f"model/{name}": variable for name, variable in variable_names(self.model).items()}
        for key, optimizer in self._optimizers.items():
            prefix = f"optimizer/{key}/" if key else "optimizer/"
            state.update({prefix + name: variable for name, variable in optimizer.state().items()})
        return state

    # --- building ------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Builds model and optimizers with all their slots, in the scope; does nothing the second time."""
        if self._optimizers:
            return
        self.model  # noqa: B018 - builds it before the optimizer
        with self.strategy.scope():
            built = self.build_optimizer()
            if not isinstance(built, Mapping):
                built = {"": (built, self.trainable_variables)}
            for key, pair in built.items():
                if not isinstance(pair, tuple) or len(pair) != 2:
                    raise ConfigError(
                        f"build_optimizer returned {pair!r} for {key!r}; with several optimizers return "
                        "{name: (optimizer, variables)}"
                    )
                self._build_optimizer(key, *pair)

    def _build_optimizer(self, key: str, optimizer: Any, variables: Sequence[Any]) -> None:
        natives = [step_gradients.native(v) for v in variables]
        if not natives:
            raise ConfigError(f"the optimizer {key!r} got no variables: the model has no trainable ones")
        optimizer = optimizers.as_optimizer(optimizer)
        optimizer.build(natives, [self._names[v.ref()] for v in natives])
        self._optimizers[key] = optimizer

    def refresh(self) -> None:
        """Call it after freezing or unfreezing layers: slots are made for new variables, and steps retrace once."""
        variables = self.trainable_variables
        with self.strategy.scope():
            if list(self._optimizers) == [""]:
                self._optimizers[""].build(variables, [self._names[v.ref()] for v in variables])
        self._run.forget_traces()

    @property
    def _names(self) -> dict[Any, str]:
        return {variable.ref(): name for name, variable in variable_names(self.model).items()}

    def _build_model(self) -> None:
        tf.keras.utils.set_random_seed(self.config.seed)
        with self.strategy.scope(), fresh_keras_names():
            model = self.build_model()
            variable_names(model)  # refuses what is not a model
            self._model = model
            if not getattr(model, "built", True) or not variable_names(model):
                self._build_lazily()

    def _build_lazily(self) -> None:
        """Creates the variables of layers that wait for their first call, in the scope, from the data's spec."""
        feed = self._run.any_feed()
        compute = tf.function(lambda batch: self.strategy.run(self._trace_loss, args=(batch,)))
        compute.get_concrete_function(feed.element_spec)

    def _trace_loss(self, batch: Any) -> tf.Tensor:
        return as_stats(self.loss_output(batch, training=True), "compute_loss")["loss"].value

    def replica_train(self, batch: Any, step: tf.Tensor) -> tuple[dict[str, Stat], tf.Tensor]:
        """What the compiled loop runs on each replica: ``train_step``, its figures reduced, and whether it updated."""
        updates = _updates()
        updates.clear()
        with self._run.summaries(step):
            output = self.train_step(batch)
        if not updates:
            raise LockstepError(
                f"{type(self).__name__}.train_step returned without calling self.apply(...): nothing was updated"
            )
        stats = {"examples": _rows(batch), **as_stats(output, "train_step")}
        if isinstance(output, StepSums) and output.reduced:
            stats["examples"] = output.stats.get("examples", stats["examples"])
        stats = step_reduce.reduce_stats(stats, options=self._communication)
        stats["learning_rate"] = Stat("last", updates[0].learning_rate, reduced=True)
        stats["grad_norm"] = Stat("last", updates[0].grad_norm, reduced=True)
        return stats, tf.reduce_all([u.finite for u in updates])

    def replica_eval(self, batch: Any, step: tf.Tensor) -> tuple[dict[str, Stat], tf.Tensor]:
        """What the compiled loop runs on each replica: ``eval_step``, its figures reduced."""
        del step
        stats = {**as_stats(self.eval_step(batch), "eval_step"), "examples": _rows(batch)}
        return step_reduce.reduce_stats(stats, options=self._communication), tf.constant(True)


_thread = threading.local()  # each replica is traced in its own thread


def _updates() -> list[Update]:
    if not hasattr(_thread, "updates"):
        _thread.updates = []
    return _thread.updates


def _rows(batch: Any) -> Stat:
    """Number of examples in a batch: the first dimension of its first part."""
    leaves = tf.nest.flatten(batch)
    if not leaves:
        raise ConfigError("a batch has no parts; the data must give at least one tensor")
    first = leaves[0]
    rows = first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first, tf.int64)[0]
    return Stat("sum", tf.cast(rows, tf.float32))


def _warn_without_gradient(sums: StepSums, names: Mapping[Any, str]) -> None:
    lost = [names.get(v.ref(), v.name) for v, g in zip(sums.variables, sums.gradients, strict=True) if g is None]
    if lost and getattr(_thread, "warned", None) != lost:
        _thread.warned = lost
        print(f"warning: the loss does not depend on {', '.join(lost)}; left unchanged", flush=True)


def _choose(config: RunConfig, cluster: clusters.Cluster) -> strategies.Choice:
    gpus = len(tf.config.list_physical_devices("GPU")) if config.device in ("auto", "gpu") else 0
    may_be_tpu = config.device in ("auto", "tpu") and config.strategy in ("auto", "tpu")
    return strategies.choose(config, cluster, gpus, may_be_tpu and devices.tpu_in_environment())
