"""Noise is a function of (seed, step, micro-batch, replica, layer): masks differ between them, and repeat."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import LockstepError, LossOutput, Sum, Trainer, step_seed
from framework.step import randomness
from framework.step.randomness import MAX_MICRO_BATCHES, Place
from input_pipelines import from_arrays
from tests.helpers import assert_copies_equal, copies, mirrored, records, saved, settings

BITS = 40
REPLICAS, MICROS = 2, 2


class Noisy(Trainer):
    """Two dropout layers; each mask is shown as a number of 40 bits, with its layer, replica and micro-batch."""

    xs = np.random.RandomState(0).randn(24, BITS).astype(np.float32)

    def build_model(self) -> Any:
        x = keras.Input((BITS,))
        layers = [keras.layers.Dropout(0.5, name=f"drop{i}") for i in range(2)]
        self.drops = layers
        return keras.Model(x, keras.layers.Dense(1)(layers[1](layers[0](keras.layers.Dense(BITS)(x)))))

    def train_data(self) -> Any:
        return from_arrays(self.xs, shuffle=False)

    def eval_data(self) -> Any:
        return from_arrays(self.xs[:6], shuffle=False)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        loss = tf.square(model(batch, training=training))[:, 0]
        if not training:
            return LossOutput(loss=loss)
        place = randomness.here()
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        powers = tf.constant([2.0**i for i in range(BITS)], tf.float64)
        figures = {}
        for layer in self.drops:
            mask = tf.not_equal(layer(tf.ones([1, BITS]), training=True)[0], 0.0)
            code = tf.reduce_sum(tf.cast(mask, tf.float64) * powers)
            for r, k in itertools.product(range(REPLICAS), range(MICROS)):
                mine = tf.equal(replica, r) & tf.equal(tf.cast(place.micro, tf.int32), k)
                figures[f"{layer.name}/{r}/{k}"] = Sum(tf.where(mine, code, tf.zeros_like(code)))
        return LossOutput(loss=loss, metrics=figures)


def train(run_dir: pathlib.Path, steps: int, *, first: str = "", **changes: Any) -> list[dict[str, float]]:
    """Masks of each step by place; ``first``: what is traced before the training."""
    usual = {"train_steps": steps, "global_batch_size": 6, "num_replicas": REPLICAS, "accumulate_steps": MICROS}
    trainer = Noisy(settings(**{**usual, "run_dir": str(run_dir), "learning_rate": 0.01, **changes}))
    if first == "evaluation":
        trainer.evaluate()
    trainer.train(evaluate=False)
    assert_copies_equal(trainer)
    for name, value in copies(trainer)[0].items():
        if "seed_generator" in name:
            assert value[1] == 0, f"{name} holds {value} between steps"
    return [{n: v for n, v in r.items() if n.startswith("drop")} for r in records(run_dir)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[dict[str, float]]]:
    """A run of five steps."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, train(folder, 5)


def test_masks_differ_between_layers_replicas_micro_batches_and_steps(straight: Any) -> None:
    codes = [code for step in straight[1] for code in step.values()]
    assert len(codes) == 5 * 2 * REPLICAS * MICROS
    assert len(set(codes)) == len(codes)
    kept = [bin(int(code)).count("1") for code in codes]
    assert 0.4 < np.mean(kept) / BITS < 0.6


def test_a_resumed_run_has_the_masks_and_weights_of_one_that_never_stopped(straight: Any, tmp_path: Any) -> None:
    train(tmp_path, 3)
    assert train(tmp_path, 5) == straight[1]
    mine, theirs = saved(tmp_path, 5), saved(straight[0], 5)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(mine[name], value, err_msg=name)


def test_c111_masks_do_not_depend_on_what_was_traced_before(straight: Any, tmp_path: Any) -> None:
    assert train(tmp_path, 5, first="evaluation") == straight[1]


def test_another_seed_gives_other_masks(straight: Any, tmp_path: Any) -> None:
    others = {code for step in train(tmp_path, 2, seed=1) for code in step.values()}
    assert not others & {code for step in straight[1] for code in step.values()}


# --- step_seed -------------------------------------------------------------------------------------------------------


def on_replicas(replicas: int, value: Any) -> list[Any]:
    strategy = mirrored(replicas)
    results = tf.function(lambda: strategy.run(value))()
    return [v.numpy() for v in strategy.experimental_local_results(results)]


def test_step_seed_is_unique_over_a_grid_of_places() -> None:
    steps = [1, 2, 256, 2**31 - 2]
    micros = [0, 1, MAX_MICRO_BATCHES - 1]

    def grid() -> tf.Tensor:
        seeds = []
        for seed, step, micro in itertools.product([0, 2**31 - 1], steps, micros):
            with randomness.at(Place(seed, tf.constant(step, tf.int64), micro)):
                seeds += [step_seed("a"), step_seed("b")]
        return tf.stack(seeds)

    rows = np.concatenate(on_replicas(3, grid))
    assert rows.dtype == np.int64
    assert rows.shape == (3 * 2 * len(steps) * len(micros) * 2, 2)
    assert len({tuple(row) for row in rows}) == len(rows)


def test_step_seed_is_the_same_again_and_for_a_micro_batch_as_a_tensor() -> None:
    def twice() -> tf.Tensor:
        seeds = []
        for micro in (3, tf.constant(3), tf.constant(3, tf.int64)):
            with randomness.at(Place(7, tf.constant(5, tf.int64), micro)):
                seeds.append(step_seed("noise"))
        return tf.stack(seeds)

    (rows,) = on_replicas(1, twice)
    assert (rows == rows[0]).all()


def test_step_seed_outside_a_step_is_refused() -> None:
    with pytest.raises(LockstepError, match="outside a training step"):
        step_seed("noise")


class Shaken(Trainer):
    """Noise from ``step_seed`` in the loss; the figure is its sum on each replica."""

    def build_model(self) -> Any:
        model = tf.Module()
        model.w = tf.Variable(1.0)
        return model

    def train_data(self) -> Any:
        return from_arrays(np.ones(8, np.float32), shuffle=False)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        noise = tf.random.stateless_uniform([], step_seed("shake"))
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        figures = {f"r{r}": Sum(tf.where(tf.equal(replica, r), noise, 0.0)) for r in range(2)}
        return LossOutput(loss=model.w * batch * noise, metrics=figures)


def test_step_seed_in_compute_loss_differs_by_replica_and_step(tmp_path: pathlib.Path) -> None:
    Shaken(settings(num_replicas=2, run_dir=str(tmp_path), learning_rate=0.1)).train()
    values = [r[name] for r in records(tmp_path) for name in ("r0", "r1")]
    assert len(set(values)) == 8


# --- Keras seed generators -------------------------------------------------------------------------------------------


def test_keras_still_names_the_state_of_its_generators_as_expected() -> None:
    """``seed_generators`` finds them by name, shape and kind of dtype; a miss would give all replicas one mask."""
    layer = keras.layers.Dropout(0.5)
    layer.build((1, 4))
    (variable,) = layer.variables
    assert variable.path.rpartition("/")[2] == "seed_generator_state"
    assert (tuple(variable.shape), variable.value.dtype.is_integer) == ((2,), True)
    assert variable.aggregation == "none"
    before = variable.value.numpy()
    layer(tf.ones([1, 4]), training=True)
    np.testing.assert_array_equal(variable.value.numpy(), before + np.array([0, 1]))  # seed, then counter
    found = randomness.seed_generators([variable.value], ["x/" + variable.path])
    assert len(found) == 1


def test_other_variables_are_not_taken_for_generators() -> None:
    variables = [tf.Variable([1, 2]), tf.Variable([1.0, 2.0]), tf.Variable([1, 2, 3])]
    names = ["a/counter", "b/seed_generator_state", "c/seed_generator_state"]
    assert randomness.seed_generators(variables, names) == []


def masks(layer: Any, places: list[tuple[int, int]], replicas: int, draws: int = 1) -> dict[tuple[int, ...], bytes]:
    """Masks of a dropout layer at (step, micro-batch), by (step, micro-batch, replica, draw)."""
    states = [v.value for v in layer.variables]

    def run() -> tf.Tensor:
        found, seeds = [], randomness.generator_seeds(states)
        for step, micro in places:
            with randomness.at(Place(0, tf.constant(step, tf.int64), micro)):
                randomness.place_generators(states, seeds)
                found += [layer(tf.ones([64]), training=True) for _ in range(draws)]
        randomness.reset_generators(states, seeds)
        return tf.stack(found)

    result = {}
    for r, rows in enumerate(on_replicas(replicas, run)):
        for (place, draw), row in zip(itertools.product(places, range(draws)), rows, strict=True):
            result[(*place, r, draw)] = (row != 0).tobytes()
    return result


def dropout(replicas: int) -> Any:
    with mirrored(replicas).scope():
        layer = keras.layers.Dropout(0.5, seed=11)
        layer.build((64,))
    return layer


def test_masks_of_near_places_differ() -> None:
    found = masks(dropout(3), [(s, k) for s in (1, 2, 3) for k in (0, 1)], 3, draws=3)
    assert len(set(found.values())) == len(found) == 54


@pytest.mark.parametrize(
    ("places", "replicas", "draws"),
    [
        ([(1, 0), (65, 0)], 2, 1),  # replica 1 at step 1, replica 0 at step 65
        ([(1, 0), (2, 0)], 1, 5),  # the fifth draw of step 1, the first of step 2
    ],
)
def test_masks_of_far_places_differ(places: list[tuple[int, int]], replicas: int, draws: int) -> None:
    found = masks(dropout(replicas), places, replicas, draws)
    assert len(set(found.values())) == len(found)


def test_generators_are_reset_to_their_seed_and_0() -> None:
    layer = dropout(2)
    masks(layer, [(9, 1)], 2)
    for copy in mirrored(2).experimental_local_results(layer.variables[0].value):
        np.testing.assert_array_equal(copy.numpy(), [11, 0])
