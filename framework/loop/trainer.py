"""``Trainer``: what a user subclasses. It builds everything in the strategy's scope and owns the step."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import psutil
import tensorflow as tf

from framework import optimizers
from framework.checkpoint.names import trainable_variables, variable_names
from framework.cluster import cluster as clusters
from framework.cluster import devices, preflight, slurm
from framework.cluster import strategy as strategies
from framework.config import RunConfig
from framework.errors import ConfigError
from framework.hooks.hook import Scheduled
from framework.loop import building
from framework.loop.feed import Data, Pipeline, Position
from framework.loop.input_options import InputOptions
from framework.loop.run import Run
from framework.loop.stepper import Stepper
from framework.optimizers.base import Optimizer
from framework.step import gradients as step_gradients
from framework.step import reduce as step_reduce
from framework.step.autograph import own, users
from framework.step.gradients import StepSums
from framework.step.update import Update
from framework.step.values import LossOutput

if TYPE_CHECKING:
    from framework.export import Signature


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
    # Set it where ``compute_loss`` itself gathers or reduces over replicas: micro-batches then stand one after another
    # in the graph, because replicas cannot meet inside a loop.
    loss_communicates: ClassVar[bool] = False

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
        if config.deterministic:
            tf.config.experimental.enable_op_determinism()
        check = self.cluster.num_workers > 1 and not config.mixed_workers
        facts = preflight.facts(config, self.options, kind, self.choice.num_replicas) if check else {}
        self.strategy = strategies.build(self.choice, config, self.cluster, facts)
        self.input_options = InputOptions(config, self.cluster.num_workers)
        self.run_files: dict[str, str] = {}  # name -> text of further files for the run folder
        self.task_name = ""  # on the command line; a resume under another one is refused
        self._step = 0
        self._model: Any = None
        self._optimizers: dict[str, Optimizer] = {}
        self.stepper = Stepper(self)
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

    @own
    def train_step(self, batch: Any) -> Any:
        """One step in replica context: local sums, all-reduce, update. Returns the sums to report."""
        sums = self.reduce(self.gradients(batch))
        self.apply(sums)
        return sums

    @own
    def eval_step(self, batch: Any) -> Any:
        """One evaluation step in replica context; returns this replica's sums, which the framework reduces."""
        return self.loss_output(batch, training=False)

    def signatures(self) -> Mapping[str, Signature]:
        """How an exported model is called, by name of the signature.

        Unless overridden: ``serving_default``, a Keras model called on the first part of a batch, or on all of it where
        a batch has but one part.
        """
        return {"serving_default": building.default_signature(self)}

    def replica_state(self) -> Mapping[str, str]:
        """How non-trainable variables that a step changes become one over the replicas.

        Regular expression on the name -> ``mean`` (weighted by examples), ``sum`` (of changes), ``max`` or ``first``
        (nothing is sent; all replicas change theirs alike). Unless named here floating variables, such as moving
        statistics, are ``mean`` and others ``first``.
        """
        return {}

    def units_per_example(self) -> Mapping[str, float]:
        """What else an example is made of, by name, e.g. ``{"tokens": 1024}``: reported as ``tokens_per_second``."""
        return {}

    # --- the pieces of a step ------------------------------------------------------------------------------------

    @own
    def loss_output(self, batch: Any, *, training: bool) -> LossOutput:
        """``compute_loss``, with the Keras model's own regularisation losses as penalty unless one was given."""
        output = users(self.compute_loss)(self.model, batch, training=training)
        losses = getattr(self.model, "losses", None)
        if isinstance(output, LossOutput) and output.penalty is None and losses:
            output = dataclasses.replace(
                output, penalty=tf.reduce_sum(tf.stack([tf.cast(x, tf.float32) for x in losses]))
            )
        return output

    @own
    def gradients(
        self,
        batch: Any,
        variables: Sequence[Any] | None = None,
        compute: Callable[[Any], LossOutput] | None = None,
    ) -> StepSums:
        """This replica's sums of losses, gradients and figures for ``batch``, over all its micro-batches.

        Args:
          batch: one replica's batch.
          variables: to differentiate for; None: the model's trainable variables.
          compute: batch -> ``LossOutput``; None: ``compute_loss``.
        """
        wanted = self.trainable_variables if variables is None else [step_gradients.native(v) for v in variables]
        if compute is None:
            compute = functools.partial(self.loss_output, training=True)
        return self.stepper.local_sums(batch, wanted, compute)

    @own
    def reduce(self, sums: StepSums) -> StepSums:
        """``sums`` added over all replicas, with the config's packing, algorithm and wire dtype."""
        return step_reduce.reduce(sums, self.stepper.reduction)

    @own
    def apply(self, sums: StepSums, optimizer: str = "") -> Update:
        """Divides, clips as configured, and updates with the optimizer of that name (empty: the only one)."""
        return self.stepper.apply(sums, optimizer)

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

    def export(self, directory: str = "", formats: Sequence[str] = ("saved_model",)) -> str:
        """Writes the model for inference, from the newest checkpoint if nothing was trained here.

        The weights are the moving average if ``ema_decay`` is set. The files hold plain variables: they load on one CPU
        and name no replica. Training goes on from checkpoints, not from an export.

        Args:
          directory: to write; it must not exist, or be empty. Empty text: ``RUN_DIR/export/step-NNNNNNNN``.
          formats: some of ``saved_model`` (with the signatures), ``keras`` (a Keras model's own file) and ``tflite``.

        Returns:
          The directory.

        Raises:
          ConfigError: there are no trained weights, or the directory is in use; LockstepError: a conversion failed.
        """
        return self._run.export(directory, formats)

    def evaluate_continuously(self) -> dict[str, float]:
        """Evaluates each checkpoint that a training run in another process writes to ``run_dir``, until that run ends.

        Returns:
          As ``evaluate``, of the last checkpoint.

        Raises:
          ConfigError: no run folder, no evaluation data, several workers, or another model than the run's;
          LockstepError: no new checkpoint for ``eval_patience`` seconds.
        """
        return self._run.follow()

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
    def latest_checkpoint(self) -> int | None:
        """Step of the newest checkpoint in the run folder; None: there is none."""
        return self._run.saving.latest

    @property
    def model(self) -> Any:
        """The model, built in the scope at the first use."""
        if self._model is None:
            with self.strategy.scope():
                self._model = building.build_model(self)
        return self._model

    @property
    def optimizer(self) -> Any:
        """The optimizer; with several, a dict by name."""
        self.build()
        return self._optimizers[""] if list(self._optimizers) == [""] else self._optimizers

    @property
    def trainable_variables(self) -> list[tf.Variable]:
        """The model's trainable variables, as TensorFlow's."""
        return [step_gradients.native(v) for v in trainable_variables(self.model)]

    @property
    def local_replicas(self) -> int:
        """Replicas of this worker."""
        return self.strategy.num_replicas_in_sync // self.cluster.num_workers

    @property
    def first_replica(self) -> int:
        """Number of this worker's first replica among all."""
        return self.cluster.index * self.local_replicas

    @property
    def compute_dtype(self) -> tf.DType:
        """The dtype to compute in, for a ``tf.Module`` that casts inputs and weights; Keras layers do it alone."""
        names = {"mixed_bfloat16": tf.bfloat16, "mixed_float16": tf.float16}
        return names.get(self.config.precision, tf.float32)

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """The optimizers by name; the only one has the empty name."""
        self.build()
        return self._optimizers

    @property
    def element_spec(self) -> Any:
        """Spec of one replica's batch of the training data, or of evaluation data where there is no other."""
        return self._run.any_feed().element_spec

    @property
    def deals_by_plan(self) -> bool:
        """Whether the training data is a pipeline, which deals out rows as ``BatchPlan`` says."""
        return isinstance(self._run.source.data, Pipeline)

    def count_from_process_start(self) -> None:
        """Counts the time since this process began as start-up, for a program that does nothing else than to train."""
        ledger = self._run.ledger
        age = time.time() - psutil.Process().create_time()
        ledger.backdate(age - ledger.seconds()["total"])

    def check_cluster(self) -> None:
        """Raises ConfigError if the cluster settings changed after the trainer was made: they would be ignored."""
        now = clusters.resolve(self.config)
        if now != self.cluster:
            raise ConfigError(
                f"the cluster settings changed after the trainer was made: then {self.cluster.describe()}; now "
                f"{now.describe()}. Set TF_CONFIG before the trainer is made"
            )

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
            f"batch: {batch} examples a step = {replicas} replica{'s' * (replicas > 1)} x {parts}"
            + (f", in {self.config.accumulate_steps} micro-batches" if self.config.accumulate_steps > 1 else "")
            + "; any split is exact",
            *self.stepper.describe(),
        ]

    def state(self) -> dict[str, tf.Variable]:
        """Every variable of a checkpoint by name: the model's and the optimizers'."""
        self.build()
        state = {f"model/{name}": variable for name, variable in variable_names(self.model).items()}
        for key, optimizer in self._optimizers.items():
            prefix = f"optimizer/{key}/" if key else "optimizer/"
            state.update({prefix + name: variable for name, variable in optimizer.state().items()})
        state.update(self.stepper.state())
        return state

    def averaged_weights(self) -> Any:
        """A context manager inside which the model holds the moving average of its weights, if ``ema_decay`` is set."""
        self.build()
        return self.stepper.averaged()

    # --- building ------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Builds model and optimizers with all their slots, in the scope; does nothing the second time."""
        if self._optimizers:
            return
        model = self.model
        with self.strategy.scope():
            built = self.build_optimizer()
            if not isinstance(built, Mapping):
                built = {"": (built, trainable_variables(model))}
            for key, pair in built.items():
                if not isinstance(pair, tuple) or len(pair) != 2:
                    raise ConfigError(
                        f"build_optimizer returned {pair!r} for {key!r}; with several optimizers return "
                        "{name: (optimizer, variables)}"
                    )
                self._build_optimizer(key, *pair)
            self.stepper.build()

    def _build_optimizer(self, key: str, optimizer: Any, variables: Sequence[Any]) -> None:
        if not variables:
            raise ConfigError(f"the optimizer {key!r} got no variables: the model has no trainable ones")
        optimizer = optimizers.as_optimizer(optimizer)
        # Keras variables as they are, not the TensorFlow variable inside: they carry constraints.
        optimizer.build(list(variables), self._names_of(variables), frozen=self._frozen_names(variables))
        self._optimizers[key] = optimizer

    def refresh(self) -> None:
        """Call it after freezing or unfreezing layers: slots are made for new variables, and steps retrace once."""
        self.build()
        variables = trainable_variables(self.model)
        with self.strategy.scope():
            if list(self._optimizers) == [""]:
                names, frozen = self._names_of(variables), self._frozen_names(variables)
                self._optimizers[""].build(list(variables), names, frozen=frozen)
            self.stepper.build()
        self._run.forget_traces()

    def _names_of(self, variables: Sequence[Any]) -> list[str]:
        names = {variable.ref(): name for name, variable in variable_names(self.model).items()}
        return [names[step_gradients.native(v).ref()] for v in variables]

    def _frozen_names(self, variables: Sequence[Any]) -> list[str]:
        """Names of the other variables: patterns of the optimizer may speak of what is frozen now."""
        return sorted(set(variable_names(self.model)) - set(self._names_of(variables)))


def _choose(config: RunConfig, cluster: clusters.Cluster) -> strategies.Choice:
    gpus = len(tf.config.list_physical_devices("GPU")) if config.device in ("auto", "gpu") else 0
    may_be_tpu = config.device in ("auto", "tpu") and config.strategy in ("auto", "tpu")
    share = slurm.gpus_per_task(os.environ) if cluster.source == slurm.SOURCE else 0
    return strategies.choose(config, cluster, gpus, may_be_tpu and devices.tpu_in_environment(), share)
