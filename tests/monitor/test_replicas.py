"""Replicas that differ are found at the first check: the variable, the replica, the values; and clean runs pass."""

from __future__ import annotations

import functools
import importlib.util
import json
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import framework
from framework import CheckFailed, ConfigError, LossOutput, Trainer
from framework.cluster.cluster import Cluster
from framework.errors import LockstepError
from framework.layers import SyncBatchNormalization
from framework.monitor import differences
from framework.monitor.fingerprint import COLUMNS, bits, fingerprints, from_bits, numbers_per_element
from input_pipelines import from_arrays
from tests.conftest import ROOT
from tests.helpers import Toy, assert_copies_equal, mirrored, per_replica, settings

DTYPES = ["bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


class Net(Trainer):
    """Weights, moving statistics, momentum, an average, dropout."""

    norm: Any = keras.layers.BatchNormalization

    def build_model(self) -> Any:
        layers = [keras.layers.Dense(4), self.norm(), keras.layers.Dropout(0.5), keras.layers.Dense(1, dtype="float32")]
        return keras.Sequential([keras.Input((3,)), *layers])

    def train_data(self) -> Any:
        return from_arrays(np.random.RandomState(1).randn(24, 3).astype(np.float32))

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=0.05 * tf.square(model(batch, training=training) - 1.0)[:, 0])


class Synchronised(Net):
    norm = SyncBatchNormalization


def net(replicas: int, kind: type[Net] = Net, **changes: Any) -> Net:
    usual = {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.05, "ema_decay": 0.9, "check_replicas_every": 2}
    return kind(settings(**{**usual, "num_replicas": replicas, "global_batch_size": 6, **changes}))


def local(trainer: Trainer, name: str, replica: int) -> Any:
    """One replica's copy of a variable."""
    return trainer.strategy.experimental_local_results(trainer.state()[name])[replica]


def flip(variable: Any, place: int, bit: int) -> tuple[Any, Any]:
    """Flips one bit of one element; returns the element before and after."""
    value = np.array(variable.numpy())
    flat = value.reshape(-1)
    before = flat[place]
    if flat.dtype == np.bool_:
        flat[place] = not flat[place]
    else:
        whole = flat.view(f"u{flat.dtype.itemsize}")
        whole[place] ^= np.array(1 << bit, whole.dtype)
    variable.assign(value)
    return before, flat[place]


# --- fingerprints --------------------------------------------------------------------------------------------------


def by_numpy(tensors: list[np.ndarray], key: int) -> int:
    """The fingerprint of one group as the module's text says, in unsigned 64-bit arithmetic."""

    def mixed(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    def odd(count: int, key: int) -> np.ndarray:
        golden = np.uint64(0x9E3779B97F4A7C15)
        start = mixed(np.uint64([key]) * golden)
        return mixed(np.arange(1, count + 1, dtype=np.uint64) * golden + start) | np.uint64(1)

    flat = np.concatenate([t.reshape(-1) for t in tensors])
    numbers = flat.view(np.int32 if flat.dtype.itemsize >= 4 else f"i{flat.dtype.itemsize}").astype(np.int64)
    numbers = numbers.view(np.uint64)
    rows = []
    for start in range(0, len(numbers), COLUMNS):
        row = numbers[start : start + COLUMNS]
        rows.append((row * odd(COLUMNS, key)[: len(row)]).sum(dtype=np.uint64))
    total = (mixed(np.array(rows, np.uint64)) * odd(len(rows), key + 1)).sum(dtype=np.uint64)
    return int(total.view(np.int64))


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "float64"])
@pytest.mark.parametrize("count", [1, COLUMNS - 1, 3 * COLUMNS, 2 * COLUMNS + 5])
def test_a_fingerprint_is_what_numpy_computes(dtype: str, count: int) -> None:
    values = [(100 * np.random.RandomState(i).randn(count)).astype(dtype) for i in range(2)]
    with np.errstate(over="ignore"):
        expected = by_numpy(values, 7)
    assert fingerprints([[tf.constant(v) for v in values]], 7).numpy().tolist() == [expected]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_is_seen(dtype: str) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    value = np.arange(5).astype(kind)
    seen = [int(fingerprints([[tf.constant(value)]])[0])]
    for place in range(5):
        for bit in range(1 if kind == np.bool_ else 8 * kind.itemsize):
            other = tf.Variable(value)
            flip(other, place, bit)
            seen.append(int(fingerprints([[tf.convert_to_tensor(other)]])[0]))
    assert len(set(seen)) == len(seen)


def test_swaps_and_changes_that_a_sum_would_not_see() -> None:
    value = np.random.RandomState(0).randn(4 * COLUMNS).astype(np.float32)
    value[COLUMNS] = -value[0]
    same_sum = value.copy()
    same_sum.view(np.int32)[[3, 9]] += np.int32([1, -1])
    swapped, negated, turned = value.copy(), -value, value.reshape(4, COLUMNS)[[1, 0, 2, 3]].reshape(-1)
    swapped[[0, COLUMNS]] = swapped[[COLUMNS, 0]]  # the two differ in their sign's bit alone
    near = value.copy()
    near[[5, 6]] = -near[[5, 6]]
    cases = [value, same_sum, swapped, negated, turned, near, np.roll(value, 1), value[::-1].copy()]
    for key in range(20):
        assert len({int(fingerprints([[tf.constant(c)]], key)[0]) for c in cases}) == len(cases)


@pytest.mark.parametrize("dtype", [*DTYPES, "complex64", "complex128"])
def test_bits_lead_back_to_the_value(dtype: str) -> None:
    value = tf.cast(tf.constant([0.0, 1.0, 3.0, 0.0]), dtype)
    numbers = tf.reshape(bits(value), [4, numbers_per_element(value.dtype)])
    np.testing.assert_array_equal(from_bits(numbers, value.dtype), value)


def test_empty_tensors_have_fingerprints_and_texts_have_none() -> None:
    assert fingerprints([[tf.zeros([0, 3])], [tf.zeros([0]), tf.ones([2])], [tf.ones([2])]]).numpy()[0] == 0
    with pytest.raises(ConfigError, match="string has no fingerprint"):
        fingerprints([[tf.constant("a")]])


# --- the assertions ------------------------------------------------------------------------------------------------


def run(replicas: int, step: Callable[[Any], None], values: list[Any], *, graph: bool = True) -> None:
    """Calls ``step`` with a value of each replica's own, in the graph or eagerly."""
    strategy = mirrored(replicas)

    def call(value: Any) -> None:
        strategy.run(step, args=(value,))

    (tf.function(call) if graph else call)(per_replica(strategy, values))


def failure(replicas: int, step: Callable[[Any], None], values: list[Any], *, graph: bool = True) -> str:
    """The text of the assertion that fails."""
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        run(replicas, step, values, graph=graph)
    message = str(error.value)
    return message[message.index("replicas differ") :]


def equal(value: Any) -> None:
    framework.assert_replicas_equal(value, name="x")


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_one_element_that_differs_is_named_with_its_value_on_each_replica(replicas: int, graph: bool) -> None:
    value = np.arange(3000, dtype=np.float32).reshape(1000, 3)
    other = value.copy()
    other[700, 1] = 0.125
    values = [value] * (replicas - 1) + [other]
    text = failure(replicas, equal, values, graph=graph)
    assert "x (float32 [1000, 3]) at [700, 1]" in text
    assert "replica 0: 2101, " in text and f"replica {replicas - 1}: 0.125" in text
    assert ("odd one out: replica 2" in text) == (replicas == 3)
    run(replicas, equal, [value] * replicas, graph=graph)


@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "float16", "bfloat16", "float64"])
def test_every_dtype_is_compared(dtype: str) -> None:
    value, other = (tf.cast(tf.constant(v), dtype) for v in ([1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]))
    text = failure(2, equal, [value, other])
    zero, one = ("0", "1") if dtype != "bool" else ("false", "true")
    assert f"({dtype} [4]) at [2]" in text
    assert f"replica 0: {zero}, replica 1: {one}" in text
    run(2, equal, [value, value])


def test_nan_equals_nan_and_zeros_of_two_signs_differ() -> None:
    nan = np.float32([np.nan, 1.0])
    run(2, equal, [nan, nan])
    assert "replica 0: 0, replica 1: -0" in failure(2, equal, [np.float32(0.0), np.float32(-0.0)])
    other = nan.copy()
    other.view(np.int32)[0] ^= 1  # a NaN of other bits
    assert "at [0]" in failure(2, equal, [nan, other])


def test_scalars_empty_tensors_and_nests() -> None:
    nest = {"a": [np.float64(1.0), np.zeros([0, 2], np.float32)], "b": np.int64(5)}
    run(2, equal, [nest, nest])
    other = {"a": [np.float64(1.0 + 2.0**-52), np.zeros([0, 2], np.float32)], "b": np.int64(5)}
    text = failure(2, equal, [nest, other])
    assert text.startswith("replicas differ: x/a/0 (float64 []) at []")
    assert "replica 0: 1, replica 1: 1.0000000000000002" in text


def test_variables_are_compared_and_one_that_is_assigned_on_one_replica_is_found() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])

    @tf.function
    def check() -> None:
        strategy.run(lambda: framework.assert_replicas_equal({"w": variable}, name="model"))

    check()
    strategy.experimental_local_results(variable)[1].assign([1.0, 3.0])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"model/w .* at \[1\] is replica 0: 2, replica 1: 3"):
        check()


def test_close_values_pass_and_the_first_that_is_not_is_named() -> None:
    close = functools.partial(framework.assert_replicas_close, rtol=1e-3, atol=0.0, name="norm")
    base = np.float32([1.0, np.nan, np.inf, 100.0, 5.0])
    near = np.float32([1.0005, np.nan, np.inf, 100.05, 5.0])
    far = np.float32([1.0, np.nan, np.inf, 100.2, 6.0])
    run(3, close, [base, near, base])
    text = failure(3, close, [base, near, far])
    assert "norm (float32 [5]) at [3] by more than 0 + 0.001 * |replica 0| is replica 0: 100, " in text
    assert "replica 1: 100.050003, replica 2: 100.199997" in text
    for bad in (np.float32([1.0, 1.0, np.inf, 100.0, 5.0]), np.float32([1.0, np.nan, -np.inf, 100.0, 5.0])):
        failure(2, close, [base, bad])
    run(2, functools.partial(framework.assert_replicas_close, rtol=0.0, atol=1.0), [np.int64(4), np.int64(5)])


def test_one_replica_has_nothing_to_compare_and_what_is_refused() -> None:
    equal(tf.constant(1.0))
    tf.distribute.OneDeviceStrategy("CPU:0").run(equal, args=(tf.constant(1.0),))
    with pytest.raises(ConfigError, match="x has dtype string"):
        equal(tf.constant("a"))
    with pytest.raises(ConfigError, match="rtol=-1"):
        framework.assert_replicas_close(tf.constant(1.0), rtol=-1.0, atol=0.0)
    with mirrored(2).scope(), pytest.raises(LockstepError, match=r"inside strategy\.run"):
        equal(tf.constant(1.0))


class Asserting(Toy):
    """Says in its step that the replicas' sums are the same, which they are only after the reduction."""

    reduced = True

    def train_step(self, batch: Any) -> Any:
        local = self.gradients(batch)
        sums = self.reduce(local)
        framework.assert_replicas_equal((sums if self.reduced else local).gradients, name="gradients")
        self.apply(sums)
        return sums


def test_an_assertion_in_a_trainers_step_stops_the_run_as_a_failed_check() -> None:
    Asserting(settings(num_replicas=2)).train()
    trainer = Asserting(settings(num_replicas=2))
    trainer.reduced = False
    with pytest.raises(CheckFailed, match=r"gradients/0 \(float32 \[\]\) .*replica 0: 3, replica 1: 7"):
        trainer.train()


# --- the check of a run --------------------------------------------------------------------------------------------

ALTERED = {
    "weight": "model/sequential/dense/kernel",
    "slot": "optimizer/momentum/sequential/dense_1/kernel",
    "moving": "model/sequential/batch_normalization/moving_variance",
    "average": "ema/sequential/dense/bias",
    "counter": "optimizer/iterations",
}


@pytest.fixture(scope="module", params=[2, 3])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Net:
    """A run of 2 steps that passed, to be altered and gone on with."""
    trainer = net(request.param, run_dir=str(tmp_path_factory.mktemp("run")), train_steps=2)
    trainer.train()
    assert_copies_equal(trainer)
    return trainer


@pytest.mark.parametrize("what", ALTERED)
def test_one_bit_in_one_copy_is_found_at_the_first_check(trained: Net, what: str) -> None:
    name, last = ALTERED[what], trained.local_replicas - 1
    names = [n for n in trained.state() if n == name or (what == "slot" and n.endswith("/sequential/dense_1/kernel"))]
    name = next(n for n in names if n.startswith(name.split("/")[0]))
    variable = local(trained, name, last)
    kept = variable.numpy()
    place = kept.size - 1
    before, after = flip(variable, place, 0)
    with pytest.raises(CheckFailed) as error:
        trained.train(steps=2)
    variable.assign(kept)
    message = str(error.value)
    index = [int(i) for i in np.unravel_index(place, kept.shape)]
    where = f" at {index}" if index else ""
    assert f"step 2: replicas differ in 1 of {len(trained.state())} variables: {name} (" in message
    assert f"){where}: replica 0: {before!s}" in message
    assert f"replica {last}: {after!s}" in message
    assert (f"in the minority: replica {last} " in message) == (trained.local_replicas == 3)
    assert error.value.exit_code == 3
    written = json.loads((pathlib.Path(str(trained.config.run_dir)) / "replica_check/step-00000002.json").read_text())
    assert written["differing"] == [name]
    (one,) = written["variables"]
    assert one["elements"][0]["index"] == index and one["count"] == 1
    assert one["elements"][0]["values"][last] == str(after)
    assert trained.step == 2


def test_different_initial_weights_are_found_before_the_first_step() -> None:
    class Unseeded(Net):
        def build_model(self) -> Any:
            model = super().build_model()
            kernel = self.strategy.experimental_local_results(model.layers[0].kernel.value)
            for i, copy in enumerate(kernel):
                copy.assign(np.full([3, 4], i, np.float32))
            return model

    trainer = net(3, Unseeded)
    with pytest.raises(CheckFailed, match=r"step 0: .* replica 0: 0\.0, replica 1: 1\.0, replica 2: 2\.0") as error:
        trainer.train()
    assert "minority" not in str(error.value)  # all three differ
    assert "it never passed" in str(error.value) and "12 of 12 elements" in str(error.value)


class Lazy(Toy):
    """The last replica leaves out the update of step 3."""

    rate = 0.5

    def train_step(self, batch: Any) -> Any:
        before = self.model.w.read_value()
        sums = super().train_step(batch)
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        last = tf.equal(replica, self.strategy.num_replicas_in_sync - 1)
        skips = last & tf.equal(self.optimizer.iterations.read_value(), 3)
        self.model.w.assign(tf.where(skips, before, self.model.w.read_value()))
        return sums


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_replica_that_skips_one_update_is_found_at_the_next_check(replicas: int) -> None:
    trainer = Lazy(settings(num_replicas=replicas, train_steps=12, check_replicas_every=2, global_batch_size=6))
    with pytest.raises(CheckFailed) as error:
        trainer.train()
    message = str(error.value)
    # Gradients are the means of 1..6 and of 7..12 in turn: w is 1 - (3.5 + 9.5 + 3.5 + 9.5) / 2; without step 3's 3.5:
    assert "step 4: replicas differ in 1 of 2 variables: model/w (float32 []): replica 0: -12.0" in message
    assert f"replica {replicas - 1}: -10.25" in message
    assert "it last passed at step 2" in message


class Odd(tf.Module):
    """Variables of every dtype and of unusual shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(1.0)
        self.kinds = {d: tf.Variable(tf.cast([1, 0, 1], d), trainable=False) for d in DTYPES}
        self.scalar = tf.Variable(3, dtype=tf.int64, trainable=False)
        self.empty = tf.Variable(tf.zeros([0, 4]), trainable=False)
        self.large = tf.Variable(tf.zeros([1200, 1000]), trainable=False)


class Kinds(Toy):
    def build_model(self) -> Any:
        return Odd()


@pytest.fixture(scope="module")
def kinds() -> Kinds:
    trainer = Kinds(settings(num_replicas=3, global_batch_size=6, train_steps=1))
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", [f"kinds/{d}" for d in DTYPES] + ["scalar", "large"])
def test_every_kind_of_variable_is_compared(kinds: Kinds, name: str) -> None:
    variable = local(kinds, f"model/{name}", 1)
    kept = variable.numpy()
    before, after = flip(variable, kept.size // 2, 0)
    with pytest.raises(CheckFailed) as error:
        kinds.train(steps=1)
    variable.assign(kept)
    message = str(error.value)
    assert f"1 of {len(kinds.state())} variables: model/{name} (" in message
    assert f"replica 0: {before!s}, replica 1: {after!s}, replica 2: {before!s}" in message
    assert "in the minority: replica 1 " in message


CLEAN: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "synchronised": (Synchronised, {"num_replicas": 3}),
    "float16": (Net, {"accumulate_steps": 2, "precision": "mixed_float16"}),
    "adamw": (Net, {"optimizer": "adamw", "momentum": None, "precision": "mixed_bfloat16"}),
}


@pytest.mark.parametrize("case", CLEAN)
def test_clean_runs_and_their_resumes_raise_no_alarm(case: str, tmp_path: pathlib.Path) -> None:
    kind, changes = CLEAN[case]
    for steps, last in ((5, 5), (7, 7)):
        trainer = net(2, kind, run_dir=str(tmp_path), train_steps=steps, **changes)
        trainer.train()
        checks = json.loads((tmp_path / "summary.json").read_text())["checks"]
        # At 0, 2, 4 and the end 5; then after the resume at 5, 6 and 7.
        times = 4 if steps == 5 else 3
        expected = {"every": 2, "times": times, "last_step": last, "variables": len(trainer.state()), "left_out": []}
        assert (checks["finite"], checks["replicas"]) == ("every step", expected)
    assert not (tmp_path / "replica_check").exists()


def test_a_gan_with_two_optimizers_passes() -> None:
    spec = importlib.util.spec_from_file_location("gan_example", ROOT / "examples/gan.py")
    assert spec is not None and spec.loader is not None
    gan = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gan)
    trainer = gan.Gan(settings(num_replicas=2, global_batch_size=8, train_steps=3, check_replicas_every=1))
    trainer.train(evaluate=False)
    assert_copies_equal(trainer)


def test_one_replica_and_off_compare_nothing_and_only_the_summary_says_so(tmp_path: pathlib.Path, capsys: Any) -> None:
    for name, changes in {"one": {}, "off": {"num_replicas": 2, "check_replicas_every": 0}}.items():
        Toy(settings(run_dir=str(tmp_path / name), progress="lines", train_steps=1, **changes)).train()
    found = [json.loads((tmp_path / n / "summary.json").read_text())["checks"]["replicas"] for n in ("one", "off")]
    assert found == ["one replica: nothing to compare", "off"]
    assert "checks:" not in capsys.readouterr().out


def test_the_start_says_that_it_is_on(capsys: Any) -> None:
    Toy(settings(num_replicas=2, progress="lines", train_steps=1)).train()
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("checks:"))
    assert line == "checks: all replicas hold the same bits, at the start, every 1000 steps and at the end"


def test_the_check_compiles_once_and_the_step_does_not_change() -> None:
    trainer = net(2, train_steps=6, check_replicas_every=1)
    trainer.train()
    _, function = trainer._run._replicas._prepared()
    assert function.experimental_get_tracing_count() == 1
    off = net(2, train_steps=6, check_replicas_every=0)
    off.train()
    ops = [len(t._run._loop.graph().get_operations()) for t in (trainer, off)]
    assert ops[0] == ops[1]


def test_refreshed_variables_are_compared_too() -> None:
    trainer = net(2, train_steps=2)
    trainer.train()
    before = len(trainer.state())
    trainer.model.layers[0].trainable = False
    trainer.refresh()
    trainer.train(steps=2)
    assert trainer._run._replicas.summary()["variables"] == len(trainer.state()) >= before


# --- on the host ---------------------------------------------------------------------------------------------------


def test_only_a_few_of_many_differences_are_listed_and_counted_as_at_least() -> None:
    value = np.zeros([20000], np.float32)
    copies = [{f"v{i}": value + r for i in range(10)} for r in (0, 0, 1)]
    differing, details = differences.find(copies, np.stack)
    assert differing == [f"v{i}" for i in range(10)]
    assert len(details) == differences.DETAILED
    first = details[0]
    assert (first.count, first.all_counted, first.odd, len(first.elements)) == (16384, False, [2], 16)
    assert "at least 16384 of 20000 elements differ" in first.describe(str)


def test_nans_of_other_bits_are_told_apart_by_their_bits() -> None:
    nan = np.float32([np.nan])
    other = nan.copy()
    other.view(np.int32)[0] ^= 1
    _, (one,) = differences.find([{"v": nan}, {"v": other}], np.stack)
    assert one.describe("r{}".format) == "v (float32 [1]) at [0]: r0: nan (0x7fc00000), r1: nan (0x7fc00001)"


def test_a_majority_is_more_than_half() -> None:
    assert differences.majority([1, 1, 2]) == [2]
    assert differences.majority([1, 2, 1, 2]) == []
    assert differences.majority([1, 2]) == []
    assert differences.majority([3, 3, 3]) == []


def test_workers_are_named() -> None:
    trainer = net(2)
    trainer.cluster = Cluster(workers=("a:1", "b:1"), index=0, source="flags")
    assert [trainer._run._replicas._who(i) for i in range(2)] == ["replica 0 (worker 0)", "replica 1 (worker 1)"]
