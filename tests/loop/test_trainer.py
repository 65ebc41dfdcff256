"""The trainer: what it refuses and how, steps of a user's own, models and optimizers of every kind."""

from __future__ import annotations

import json
import pathlib
import re
import threading
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import (
    CheckFailed,
    ConfigError,
    LockstepError,
    LossOutput,
    Max,
    Sum,
    Trainer,
    optimizers,
)
from framework.checkpoint.store import CheckpointStore
from input_pipelines import from_arrays
from tests.helpers import (
    Ids,
    Toy,
    ToyWithEval,
    Weight,
    assert_copies_equal,
    column,
    copies,
    saved,
    settings,
    store,
    tree,
)

# --- errors ----------------------------------------------------------------------------------------------------------


class ScalarLoss(ToyWithEval):
    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=tf.reduce_mean(model.w * batch))


class NotALossOutput(ToyWithEval):
    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> Any:
        return model.w * batch


class ReservedName(ToyWithEval):
    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=model.w * batch, metrics={"learning_rate": batch})


class NamelessReduction(ToyWithEval):
    def eval_step(self, batch: Any) -> Any:
        return {"loss": tf.reduce_mean(batch)}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("task", "start"),
    [
        (ScalarLoss, "compute_loss returned a scalar loss"),
        (NotALossOutput, "compute_loss returned"),
        (ReservedName, "metric name 'learning_rate'"),
        (NamelessReduction, "eval_step returned 'loss' without saying how"),
    ],
)
def test_what_breaks_the_rules_within_a_step_is_a_config_error_in_one_line(
    task: type[Trainer], start: str, replicas: int
) -> None:
    with pytest.raises(ConfigError) as error:
        task(settings(num_replicas=replicas)).train()
    assert error.value.exit_code == 2
    assert str(error.value).startswith(start)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("replicas", [1, 2])
def test_b18_a_step_that_never_applies_is_refused(tmp_path: pathlib.Path, replicas: int) -> None:
    class Forgetful(Toy):
        def train_step(self, batch: Any) -> Any:
            return self.reduce(self.gradients(batch))

    trainer = Forgetful(settings(run_dir=tmp_path, num_replicas=replicas))
    with pytest.raises(LockstepError, match=r"Forgetful\.train_step returned without calling self\.apply"):
        trainer.train()
    assert trainer.step == 0 and store(tmp_path).steps() == []


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_that_applies_unreduced_sums_is_refused(replicas: int) -> None:
    class Hasty(Toy):
        def train_step(self, batch: Any) -> Any:
            sums = self.gradients(batch)
            self.apply(sums)
            return sums

    with pytest.raises(LockstepError, match=r"not reduced; call reduce\(sums\) first"):
        Hasty(settings(num_replicas=replicas)).train()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_that_reduces_twice_is_refused(replicas: int) -> None:
    class Twice(Toy):
        def train_step(self, batch: Any) -> Any:
            sums = self.reduce(self.reduce(self.gradients(batch)))
            self.apply(sums)
            return sums

    with pytest.raises(LockstepError, match="called twice"):
        Twice(settings(num_replicas=replicas)).train()


def test_an_error_within_a_step_shows_the_line_of_the_user() -> None:
    class Broken(Toy):
        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            raise KeyError("no such feature")

    with pytest.raises(KeyError, match="no such feature"):
        Broken(settings()).train()


@pytest.mark.parametrize("member", ["build_model", "compute_loss"])
def test_a_missing_method_is_named(member: str) -> None:
    class Half(Trainer):
        def train_data(self) -> Any:
            return from_arrays(np.ones(4, np.float32))

    if member == "compute_loss":
        Half.build_model = lambda self: Weight()  # type: ignore[method-assign]
    with pytest.raises(NotImplementedError, match=f"Half needs {member}"):
        Half(settings(optimizer="sgd")).train()


def test_an_option_of_a_task_without_options_is_refused() -> None:
    with pytest.raises(ConfigError, match="Toy takes no option hidden"):
        Toy(settings(), hidden=3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: None, "has no training data"),
        (lambda: 7, "data is a int"),
        (lambda: [np.ones(4)], "data is a list"),
        (lambda: from_arrays(np.ones([0, 2], np.float32)), "has 0 examples"),
        (lambda: tf.data.Dataset.from_tensor_slices(np.ones(3, np.float32)).batch(4, drop_remainder=True), "no batch"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(data: Any, message: str) -> None:
    class Odd(Toy):
        def train_data(self) -> Any:
            return data()

    with pytest.raises(ConfigError, match=message):
        Odd(settings()).train()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: from_arrays(np.ones([0, 2], np.float32)), "has 0 examples"),
        (
            lambda: {"far": tf.data.Dataset.from_tensor_slices(np.ones(3, np.float32)).batch(4, drop_remainder=True)},
            "set far gave no",
        ),
        (lambda: {"far": tf.data.Dataset.from_tensor_slices(np.ones(3)).repeat()}, "set far has no end"),
        (lambda: None, "has no evaluation data"),
    ],
)
def test_data_that_cannot_be_evaluated_is_refused(data: Any, message: str) -> None:
    class Odd(Toy):
        def eval_data(self) -> Any:
            return data()

    with pytest.raises(ConfigError, match=message):
        Odd(settings()).evaluate()


# --- non-finite ------------------------------------------------------------------------------------------------------


class BadAt(Toy):
    """Example 9 is not a number: it is in step 3, on the first or a later replica."""

    xs = np.where(np.arange(16) == 9, np.nan, 1.0).astype(np.float32)
    rate = 0.25


@pytest.mark.parametrize(("replicas", "steps_per_loop"), [(1, 1), (1, 8), (2, 8), (3, 0)])
def test_b24_a_nan_stops_at_its_step_and_leaves_the_last_checkpoint(
    tmp_path: pathlib.Path, replicas: int, steps_per_loop: int
) -> None:
    config = settings(
        run_dir=tmp_path,
        train_steps=8,
        log_every=0,
        checkpoint_every=2,
        checkpoint_in_background=False,
        steps_per_loop=steps_per_loop,
        num_replicas=replicas,
    )
    trainer = BadAt(config)
    message = r"step 3: replica \d is not finite: loss nan, gradient of w; no update was made; "
    message += r"the last checkpoint is of step 2\. "
    with pytest.raises(CheckFailed) as error:
        trainer.train()
    assert re.match(message, str(error.value))
    assert error.value.exit_code == 3 and "\n" not in str(error.value)
    assert trainer.step == 2 and store(tmp_path).steps() == [2]
    for copy in copies(trainer):  # two updates of -0.25
        assert (copy["model/w"], copy["optimizer/iterations"]) == (0.5, 2)
    assert saved(tmp_path, 2)["model/w"] == 0.5
    before = tree(tmp_path / "checkpoints")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["nonfinite_steps"]) == ("failed", 2, 1)
    assert "step 3" in summary["reason"]
    # The same command meets the same example again, at the same step.
    with pytest.raises(CheckFailed) as error:
        BadAt(config).train()
    assert re.match(message, str(error.value))
    assert tree(tmp_path / "checkpoints") == before


def test_b24_the_message_knows_of_a_checkpoint_that_is_still_being_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    awaited = threading.Event()
    write, wait = CheckpointStore._write, CheckpointStore.wait

    def slow(self: CheckpointStore, *args: Any) -> None:  # is not done before somebody waits for it
        awaited.wait(timeout=60)
        write(self, *args)

    def waiting(self: CheckpointStore) -> None:
        if self._saving is not None:
            awaited.set()
        wait(self)

    monkeypatch.setattr(CheckpointStore, "_write", slow)
    monkeypatch.setattr(CheckpointStore, "wait", waiting)
    with pytest.raises(CheckFailed, match=r"the last checkpoint is of step 2\. "):
        BadAt(settings(run_dir=tmp_path, train_steps=8, checkpoint_every=2)).train()


def test_b24_a_bad_gradient_is_told_from_a_bad_loss(tmp_path: pathlib.Path) -> None:
    class Root(Toy):
        xs = np.float32([1, 1, 1, 1, 4, 0, 4, 4])  # sqrt has an infinite gradient at 0

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(loss=tf.sqrt(model.w * batch))

    trainer = Root(settings(run_dir=tmp_path))
    with pytest.raises(CheckFailed, match=r"^step 2: replica 0 is not finite: gradient of w; no update was made"):
        trainer.train()
    assert trainer.step == 1


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_skipped_step_moves_no_weight_is_counted_and_left_out_of_the_figures(
    tmp_path: pathlib.Path, replicas: int
) -> None:
    class Skipping(BadAt):
        def build_optimizer(self) -> Any:
            return optimizers.SGD(learning_rate=0.25, momentum=0.5)

    trainer = Skipping(settings(run_dir=tmp_path, log_every=4, on_nonfinite="skip", num_replicas=replicas))
    result = trainer.train()
    assert (trainer.step, trainer.examples_seen) == (4, 16)
    # v: -0.25, -0.375, (skipped), -0.4375; w: 0.75, 0.375, 0.375, -0.0625
    for copy in copies(trainer):
        assert (copy["model/w"], copy["optimizer/iterations"]) == (-0.0625, 3)
        assert copy["optimizer/momentum/w"] == -0.4375
    [record_nonfinite] = column(tmp_path, "nonfinite")
    assert record_nonfinite == 1
    assert result["loss"] == pytest.approx((1.0 + 0.75 + 0.375) / 3, rel=1e-6)
    assert json.loads((tmp_path / "summary.json").read_text())["nonfinite_steps"] == 1


def test_examples_of_a_skipped_step_were_delivered_all_the_same() -> None:
    class Skipping(BadAt):
        def train_data(self) -> Any:
            return tf.data.Dataset.from_tensor_slices(self.xs).batch(4)

    trainer = Skipping(settings(on_nonfinite="skip"))
    trainer.train()
    assert (trainer.step, trainer.examples_seen) == (4, 16)


def test_a_nonfinite_step_without_a_figure_called_loss_is_a_failed_check() -> None:
    class Nameless(BadAt):
        def train_step(self, batch: Any) -> Any:
            self.apply(self.reduce(self.gradients(batch)))
            return {"seen": Sum(tf.ones_like(batch))}

    with pytest.raises(CheckFailed, match=r"^step 3: "):
        Nameless(settings()).train()


# --- the best metric -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_b26_a_best_metric_that_no_evaluation_gives_is_refused_before_the_first_step(
    tmp_path: pathlib.Path, replicas: int
) -> None:
    trainer = ToyWithEval(settings(run_dir=tmp_path, keep_best="confusion:max", num_replicas=replicas))
    with pytest.raises(
        ConfigError, match=r"keep_best=confusion:max but the evaluation gives the scalars loss, examples"
    ):
        trainer.train()
    assert trainer.step == 0 and list(tmp_path.iterdir()) == []


def test_b26_a_best_metric_without_evaluation_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="keep_best=loss:min without evaluation"):
        Toy(settings(run_dir=tmp_path, keep_best="loss:min")).train()
    with pytest.raises(ConfigError, match="keep_best=loss:min without evaluation"):
        ToyWithEval(settings(run_dir=tmp_path, keep_best="loss:min")).train(evaluate=False)


def test_b26_a_set_s_metric_is_named_with_its_set(tmp_path: pathlib.Path) -> None:
    class Two(ToyWithEval):
        def eval_data(self) -> Mapping[str, Any]:
            return {"near": super().eval_data(), "far": super().eval_data()}

    with pytest.raises(ConfigError, match=r"keep_best=loss:min but the evaluation gives the scalars near/loss"):
        Two(settings(run_dir=tmp_path, keep_best="loss:min")).train()
    Two(settings(run_dir=tmp_path, keep_best="far/loss:min")).train()


class Dipping(ToyWithEval):
    """Evaluation loss by step: w = 1 - 0.25 s, so w^2 is smallest at step 4 and rises from there."""

    xs, rate = np.ones(8, np.float32), 0.25

    def eval_step(self, batch: Any) -> Any:
        return LossOutput(loss=self.model.w**2 * batch)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_best_checkpoint_outlives_newer_ones(tmp_path: pathlib.Path, replicas: int) -> None:
    config = settings(
        run_dir=tmp_path,
        train_steps=12,
        eval_every=2,
        keep_best="loss:min",
        keep_checkpoints=1,
        num_replicas=replicas,
    )
    Dipping(config).train()
    kept = store(tmp_path, best=("loss", "min"))
    assert kept.best_step() == 4  # w is 0 there
    assert kept.steps() == [4, 12]
    assert saved(tmp_path, 4)["model/w"] == 0.0


def test_the_best_is_known_where_the_only_evaluation_follows_the_checkpoint(tmp_path: pathlib.Path) -> None:
    Dipping(settings(run_dir=tmp_path, checkpoint_every=4, keep_best="loss:min")).train()
    assert store(tmp_path, best=("loss", "min")).best_step() == 4


# --- steps of the user's own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_step_written_with_the_public_pieces_equals_the_frameworks_own(replicas: int) -> None:
    class Own(Ids):
        rate = 0.01

        def train_step(self, batch: Any) -> Any:
            sums = self.reduce(self.gradients(batch))
            update = self.apply(sums)
            return {"loss": (sums.stats["loss"].value, sums.weight), "norm": Max(update.grad_norm)}

    class Usual(Ids):
        rate = 0.01

    config = settings(num_replicas=replicas)
    own, usual = Own(config), Usual(config)
    losses = [t.train()["loss"] for t in (own, usual)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert own.model.w.numpy() == usual.model.w.numpy() != 1.0


class TwoWeights(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = tf.Variable(0.0), tf.Variable(0.0)


@pytest.mark.parametrize("replicas", [1, 2])
def test_two_optimizers_each_move_their_own_variables(tmp_path: pathlib.Path, replicas: int) -> None:
    class Two(Toy):
        xs = np.ones(8, np.float32)

        def build_model(self) -> Any:
            return TwoWeights()

        def build_optimizer(self) -> Any:
            model = self.model
            return {
                "slow": (optimizers.SGD(learning_rate=0.5), [model.a]),
                "fast": (keras.optimizers.SGD(2.0), [model.b]),
            }

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(loss=(model.a + 3 * model.b) * batch)

        def train_step(self, batch: Any) -> Any:
            first = self.reduce(self.gradients(batch, [self.model.a]))
            self.apply(first, "slow")
            self.apply(self.reduce(self.gradients(batch, [self.model.b])), "fast")
            return first

    trainer = Two(settings(run_dir=tmp_path, train_steps=3, num_replicas=replicas))
    trainer.train()
    assert (trainer.model.a.numpy(), trainer.model.b.numpy()) == (-1.5, -18.0)
    assert_copies_equal(trainer)
    names = {n for n in saved(tmp_path, 3) if n.startswith("optimizer")}
    assert {"optimizer/slow/iterations", "optimizer/fast/iterations"} <= names
    assert set(trainer.optimizer) == {"slow", "fast"}
    again = Two(settings(run_dir=tmp_path, train_steps=4, num_replicas=replicas))
    again.train()
    assert (again.model.a.numpy(), again.model.b.numpy()) == (-2.0, -24.0)


def test_an_optimizer_that_is_not_there_is_named() -> None:
    class Wrong(Toy):
        def train_step(self, batch: Any) -> Any:
            sums = self.reduce(self.gradients(batch))
            with pytest.raises(ConfigError, match=r"apply\(optimizer='fast'\) but the optimizers are \[''\]"):
                self.apply(sums, "fast")
            self.apply(sums)
            return sums

    Wrong(settings(train_steps=1)).train()


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_figures_of_an_eval_step_are_reduced_as_they_are_named(replicas: int) -> None:
    class Own(ToyWithEval):
        eval_xs = np.float32([-1, -5, -3, -2, -4])

        def eval_step(self, batch: Any) -> Any:
            return {
                "mean": (tf.reduce_sum(batch), tf.cast(tf.size(batch), tf.float32)),
                "all": Sum(batch),
                "most": Max(batch),
            }

    result = Own(settings(num_replicas=replicas)).evaluate()
    assert result == {"mean": -3.0, "all": -15.0, "most": -1.0, "examples": 5.0}


def test_a_layer_frozen_after_some_steps_stays_and_the_step_retraces_once() -> None:
    class Frozen(Toy):
        xs = np.ones([8, 1], np.float32)
        rate = 0.5

        def build_model(self) -> Any:
            return keras.Sequential(
                [keras.Input((1,)), keras.layers.Dense(1, name="a"), keras.layers.Dense(1, name="b")]
            )

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(loss=model(batch)[:, 0])

    trainer = Frozen(settings())
    trainer.train(1)
    trainer.model.get_layer("a").trainable = False
    trainer.refresh()
    kept = [v.numpy() for v in trainer.model.get_layer("a").variables]
    before = trainer.model.get_layer("b").bias.numpy()
    trainer.train(2)
    for variable, value in zip(trainer.model.get_layer("a").variables, kept, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert trainer.model.get_layer("b").bias.numpy() == pytest.approx(before - 2 * 0.5, rel=1e-6)


# --- models and optimizers -------------------------------------------------------------------------------------------


class Lazy(keras.Model):
    """A subclass whose layers are built at their first call."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(3, activation="tanh")
        self.last = keras.layers.Dense(1)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.last(self.hidden(x))


class LazyToy(Toy):
    xs = np.linspace(-1, 1, 24, dtype=np.float32).reshape(12, 2)
    rate = 0.1

    def build_model(self) -> Any:
        return Lazy()

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=tf.square(model(batch)[:, 0] - batch[:, 0]))


@pytest.mark.parametrize("replicas", [2, 3])
def test_c107_a_model_that_builds_at_its_first_call_is_built_in_the_scope(replicas: int) -> None:
    one, many = LazyToy(settings()), LazyToy(settings(num_replicas=replicas))
    losses = one.train()["loss"], many.train()["loss"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for variable in many.model.variables:
        assert len(many.strategy.experimental_local_results(variable.value)) == replicas
    assert_copies_equal(many)
    for a, b in zip(one.model.variables, many.model.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-7)


def test_c107_a_lazy_model_with_evaluation_data_alone_is_built_too() -> None:
    class Scorer(Trainer):
        build_model = LazyToy.build_model
        compute_loss = LazyToy.compute_loss

        def eval_data(self) -> Any:
            return from_arrays(LazyToy.xs)

    result = Scorer(settings(num_replicas=2)).evaluate()
    assert result["examples"] == 12.0
    assert result["loss"] == pytest.approx(LazyToyWithEval(settings()).evaluate()["loss"], rel=1e-5)


class LazyToyWithEval(LazyToy):
    def eval_data(self) -> Any:
        return from_arrays(self.xs)


def test_an_evaluation_needs_no_training_data_whatever_the_config_says_of_epochs() -> None:
    class Scorer(Trainer):
        build_model = LazyToy.build_model
        compute_loss = LazyToy.compute_loss

        def eval_data(self) -> Any:
            return from_arrays(LazyToy.xs)

    assert Scorer(settings(train_steps=None, train_epochs=2)).evaluate()["examples"] == 12.0


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ["sequential", "layer"])
def test_c107_a_sequential_without_input_and_a_bare_layer_are_built(kind: str, replicas: int) -> None:
    class Unbuilt(LazyToy):
        def build_model(self) -> Any:
            layer = keras.layers.Dense(1)
            return layer if kind == "layer" else keras.Sequential([keras.layers.Dense(3, activation="tanh"), layer])

    trainer = Unbuilt(settings(num_replicas=replicas))
    trainer.train()
    assert len(trainer.trainable_variables) == (2 if kind == "layer" else 4)
    assert_copies_equal(trainer)


def test_what_is_no_model_is_refused() -> None:
    class Wrong(Toy):
        def build_model(self) -> Any:
            return lambda x: x

    with pytest.raises(ConfigError, match=r"build_model returned function but it must return a keras\.Model"):
        Wrong(settings()).train()


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_python_condition_on_a_tensor_in_compute_loss_is_traced_as_one(replicas: int) -> None:
    class Conditional(Toy):
        xs, rate = np.ones(4, np.float32), 0.5

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            if model.w > 0.25:  # 1.0, 0.5, then 0.0: the gradient's sign turns
                loss = model.w * batch
            else:
                loss = -model.w * batch
            return LossOutput(loss=loss)

    seen: list[float] = []
    trainer = Conditional(settings(num_replicas=replicas))
    for _ in range(4):
        trainer.train(1)
        seen.append(float(trainer.model.w.numpy()))
    assert seen == [0.5, 0.0, 0.5, 0.0]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_keras_optimizer_moves_as_the_hand_says(replicas: int) -> None:
    class Keras(Toy):
        xs = np.float32([1, 2, 3, 6])

        def build_optimizer(self) -> Any:
            return keras.optimizers.SGD(
                keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.5]), momentum=0.5
            )

    trainer = Keras(settings(train_steps=3, num_replicas=replicas))
    trainer.train()
    # Gradient 3; v: -3, then at rate 0.5 from update 2 on (boundaries are included): -1.5-3, ...
    rates, v, w = [1.0, 1.0, 0.5], 0.0, 1.0
    for rate in rates:
        v = 0.5 * v - rate * 3
        w += v
    assert trainer.model.w.numpy() == pytest.approx(w, rel=1e-6)
    assert_copies_equal(trainer)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_regularisers_of_a_keras_model_are_the_penalty_once(replicas: int) -> None:
    class Regularised(Toy):
        xs = np.zeros([4, 1], np.float32)
        rate = 1.0

        def build_model(self) -> Any:
            layer = keras.layers.Dense(
                1,
                use_bias=False,
                kernel_initializer=keras.initializers.Constant(3.0),
                kernel_regularizer=keras.regularizers.L2(0.1),
            )
            return keras.Sequential([keras.Input((1,)), layer])

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(loss=model(batch)[:, 0])

    trainer = Regularised(settings(train_steps=1, num_replicas=replicas))
    assert trainer.train()["loss"] == pytest.approx(0.9, rel=1e-6)
    assert trainer.model.variables[0].numpy() == pytest.approx(2.4, rel=1e-6)


def test_a_penalty_of_the_users_takes_the_place_of_the_models_losses() -> None:
    class Own(Toy):
        xs = np.zeros([4, 1], np.float32)

        def build_model(self) -> Any:
            return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_regularizer="l2")])

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(loss=model(batch)[:, 0], penalty=7.0)

    assert Own(settings(train_steps=1)).train()["loss"] == 7.0


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_variable_out_of_the_loss_is_left_alone_and_named_in_one_warning(
    replicas: int, capfd: pytest.CaptureFixture[str]
) -> None:
    class Unused(Toy):
        rate = 0.5

        def build_model(self) -> Any:
            model = TwoWeights()
            model.b.assign(3.0)
            return model

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(loss=model.a * batch)

    trainer = Unused(settings(num_replicas=replicas))
    trainer.train()
    assert [c["model/b"] for c in copies(trainer)] == [3.0] * replicas
    assert "the loss does not depend on b; left unchanged" in capfd.readouterr().out


def test_the_warning_about_a_variable_out_of_the_loss_is_given_once(capfd: pytest.CaptureFixture[str]) -> None:
    class Unused(Toy):
        def build_model(self) -> Any:
            return TwoWeights()

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(loss=model.a * batch)

    Unused(settings(num_replicas=2)).train()
    assert capfd.readouterr().out.count("left unchanged") == 1


# --- traces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_c102_inner_loops_of_different_lengths_are_traced_once(replicas: int) -> None:
    class Counting(ToyWithEval):
        traced = {True: 0, False: 0}

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            type(self).traced[training] += 1
            return super().compute_loss(model, batch, training=training)

    Counting.traced = {True: 0, False: 0}
    trainer = Counting(settings(train_steps=20, log_every=3, eval_every=7, num_replicas=replicas, steps_per_loop=5))
    trainer.train()
    trainer.train(5)
    trainer.evaluate()
    assert trainer._run._loop.traces == 1
    assert Counting.traced == {True: replicas, False: replicas}  # each replica's part, once


def test_c102_passes_over_a_dataset_are_traced_once() -> None:
    class AsDataset(Toy):
        def train_data(self) -> Any:
            return tf.data.Dataset.from_tensor_slices(self.xs).batch(5)

    trainer = AsDataset(settings(train_steps=None, train_epochs=4, global_batch_size=5, num_replicas=2))
    trainer.train()
    assert trainer.step == 12 and trainer._run._loop.traces == 1


def test_c103_a_bound_method_as_the_loss_is_traced_once() -> None:
    class Bound(Toy):
        traced = 0

        def loss_fn(self, w: tf.Variable, x: tf.Tensor) -> tf.Tensor:
            self.traced += 1
            return w * x

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(loss=(lambda f: f(model.w, batch))(self.loss_fn))

    trainer = Bound(settings(train_steps=20, log_every=3, steps_per_loop=4))
    trainer.train()
    assert (trainer._run._loop.traces, trainer.traced) == (1, 1)
