"""Feeds: which rows each replica gets, and structured data from datasets and functions."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import AtSteps, BatchPlan, ConfigError, LockstepError, LossOutput, Pipeline, Scheduled, Sum
from input_pipelines import from_arrays, synthetic
from tests.helpers import Ids, Toy, decode_ids, ids_by_step, ids_figure, saved, settings


def parts(steps: int, replicas: int, **plan: Any) -> list[list[list[int]]]:
    """Positions by step and replica, of one worker that has all replicas."""
    made = BatchPlan(num_replicas=replicas, local_replicas=replicas, **plan).positions().take(steps * replicas)
    rows = [list(map(int, part)) for part in made.as_numpy_iterator()]
    return [rows[i : i + replicas] for i in range(0, len(rows), replicas)]


# --- the plan --------------------------------------------------------------------------------------------------------


def test_a_batch_is_cut_into_contiguous_parts_that_differ_by_one_row_at_most() -> None:
    assert parts(2, 3, global_batch_size=7) == [[[0, 1, 2], [3, 4], [5, 6]], [[7, 8, 9], [10, 11], [12, 13]]]


def test_a_short_last_batch_is_spread_and_nothing_follows() -> None:
    assert parts(3, 2, global_batch_size=4, stop=5) == [[[0, 1], [2, 3]], [[4], []]]
    assert parts(3, 2, global_batch_size=4, stop=4) == [[[0, 1], [2, 3]]]


@pytest.mark.parametrize("stop", [None, 24])
def test_equal_parts_follow_the_rule_of_uneven_ones(stop: int | None) -> None:
    """Micro-batches of 4: replica r has place (r + k) mod 2 in micro-batch k, whichever way the rows are computed."""
    plan = {"global_batch_size": 8, "accumulate_steps": 2}
    even = parts(2, 2, **plan, stop=stop)
    assert even == [[[0, 1, 6, 7], [2, 3, 4, 5]], [[8, 9, 14, 15], [10, 11, 12, 13]]]
    assert parts(2, 2, **plan, stop=23) == even  # a short batch later: not by the table


def test_a_batch_smaller_than_the_replicas_leaves_some_empty() -> None:
    assert parts(2, 4, global_batch_size=2) == [[[0], [1], [], []], [[2], [3], [], []]]


def test_a_plan_starts_at_any_position() -> None:
    far = 10**12
    assert parts(1, 2, global_batch_size=4, start=far) == [[[far, far + 1], [far + 2, far + 3]]]
    assert parts(1, 2, global_batch_size=4, start=3, stop=6) == [[[3, 4], [5]]]


@pytest.mark.parametrize("batch", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_parts_of_all_workers_together_are_the_batch(batch: int, workers: int) -> None:
    replicas, steps, stop = workers * 2, 4, 3 * batch + 1
    seen = []
    for worker in range(workers):
        plan = BatchPlan(
            global_batch_size=batch, num_replicas=replicas, first_replica=worker * 2, local_replicas=2, stop=stop
        )
        assert plan.num_batches == 4
        seen.append([list(map(int, p)) for p in plan.positions().take(steps * 2).as_numpy_iterator()])
    for step in range(steps):
        rows = [p for worker in seen for p in worker[2 * step : 2 * step + 2]]
        together = [i for p in rows for i in p]
        assert together == list(range(step * batch, min(step * batch + batch, stop)))
        assert max(map(len, rows)) - min(map(len, rows)) <= 1


@pytest.mark.parametrize(
    ("start", "stop", "batches"), [(0, None, None), (0, 8, 2), (0, 9, 3), (3, 8, 2), (8, 8, 0), (9, 8, 0)]
)
def test_the_number_of_batches_counts_a_short_last_one(start: int, stop: int | None, batches: int | None) -> None:
    assert BatchPlan(global_batch_size=4, start=start, stop=stop).num_batches == batches


@pytest.mark.parametrize(
    ("batch", "replicas", "stop", "rows"),
    [(8, 2, None, 4), (8, 2, 16, 4), (8, 2, 17, None), (7, 2, None, None), (7, 1, None, 7), (2, 4, None, None)],
)
def test_shapes_are_static_where_every_part_has_the_same_rows(
    batch: int, replicas: int, stop: int | None, rows: int | None
) -> None:
    plan = BatchPlan(global_batch_size=batch, num_replicas=replicas, local_replicas=replicas, stop=stop)
    assert plan.static_rows == rows
    assert plan.positions().element_spec.shape.as_list() == [rows]
    x = np.zeros([24, 3], np.float32)
    assert from_arrays(x).batches(plan).element_spec.shape.as_list() == [rows, 3]


def test_a_class_with_size_and_batches_is_a_pipeline(tmp_path: pathlib.Path) -> None:
    class Squares:
        """Example i is i squared."""

        size = 6

        def batches(self, plan: BatchPlan) -> tf.data.Dataset:
            return plan.positions().map(lambda p: tf.cast(p % 6, tf.float32) ** 2)

    class Own(Toy):
        def train_data(self) -> Any:
            assert isinstance(Squares(), Pipeline)
            return Squares()

    for replicas in (1, 2):
        trainer = Own(settings(train_steps=None, train_epochs=1, log_every=2, num_replicas=replicas))
        assert trainer.train()["loss"] == pytest.approx((0 + 1 + 4 + 9 + 16 + 25) / 6, rel=1e-6)
        assert (trainer.step, trainer.examples_seen) == (2, 6)


# --- structured data -------------------------------------------------------------------------------------------------

IDS = ["a", "bc", "d", "efg", "h"]


class Structured(Toy):
    """Five rows of a ragged, a ragged string, a string and a number; every row is told by its id."""

    def train_data(self) -> Any:
        rows = {
            "ragged": tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0, 5.0, 6.0], [7.0]]),
            "words": tf.ragged.constant([["x"], [], ["y", "z"], ["u"], ["v", "w", "x"]]),
            "name": tf.constant(IDS),
            "id": tf.range(5),
        }
        return tf.data.Dataset.from_tensor_slices(rows).batch(2)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        names = tf.cast(tf.strings.length(batch["name"]), tf.float32)
        metrics = {
            "ids": ids_figure(batch["id"]),
            "numbers": Sum(batch["ragged"].row_lengths()),
            "words": Sum(batch["words"].row_lengths()),
            "letters": Sum(names),
            "x": Sum(tf.cast(batch["words"].flat_values == "x", tf.float32)),
        }
        return LossOutput(loss=tf.reduce_sum(batch["ragged"], 1) * model.w, metrics=metrics)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_c019_c020_ragged_and_string_features_deliver_every_row_once(replicas: int) -> None:
    config = settings(
        train_steps=None, train_epochs=2, global_batch_size=2, log_every=0, steps_per_loop=2, num_replicas=replicas
    )
    trainer = Structured(config)
    seen = trainer.train()
    assert (trainer.step, trainer.examples_seen) == (6, 10)  # 2, 2 and 1 rows, twice
    assert seen.pop("ids") == 2 * sum(2**i for i in range(5))
    assert seen == {
        "loss": pytest.approx(2 * 28 / 10),
        "numbers": 2 * 7.0,
        "words": 2 * 7.0,
        "letters": 2 * 8.0,
        "x": 2 * 2.0,
    }


@pytest.mark.parametrize("replicas", [1, 2])
def test_string_features_of_a_pipeline_deliver_every_row_once(replicas: int) -> None:
    class Named(Toy):
        def train_data(self) -> Any:
            return from_arrays({"id": np.arange(5), "name": np.array(IDS)})

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            letters = tf.strings.length(batch["name"])
            loss = model.w * tf.cast(batch["id"], tf.float32)
            return LossOutput(loss=loss, metrics={"ids": ids_figure(batch["id"]), "letters": Sum(letters)})

    config = settings(train_steps=None, train_epochs=1, global_batch_size=2, log_every=0, num_replicas=replicas)
    seen = Named(config).train()
    assert decode_ids(seen["ids"]) == [0, 1, 2, 3, 4]
    assert (seen["letters"], seen["loss"]) == (8.0, 2.0)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_c015_a_function_of_the_input_context_gives_every_batch(tmp_path: pathlib.Path, replicas: int) -> None:
    """Five batches of 2: on 2 replicas three steps, the last with an empty replica."""

    class Function(Ids):
        xs = np.arange(10, dtype=np.float32)

        def train_data(self) -> Any:
            def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
                assert context.num_replicas_in_sync == replicas
                return tf.data.Dataset.from_tensor_slices(self.xs).batch(2)

            return make

    trainer = Function(settings(run_dir=tmp_path, train_steps=-1, num_replicas=replicas))
    trainer.train()
    assert trainer.step == -(-5 // replicas)
    at = range(0, 10, 2 * replicas)
    assert ids_by_step(tmp_path) == [list(range(i, min(i + 2 * replicas, 10))) for i in at]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_c017_batches_of_a_generator_are_split_and_not_repeated(tmp_path: pathlib.Path, replicas: int) -> None:
    class Generated(Ids):
        def train_data(self) -> Any:
            def batches() -> Any:
                yield from (np.arange(0, 3.0), np.arange(3, 7.0), np.arange(7, 8.0))

            spec = tf.TensorSpec([None], tf.float32)
            return tf.data.Dataset.from_generator(batches, output_signature=spec)

    trainer = Generated(settings(run_dir=tmp_path, train_steps=-1, num_replicas=replicas))
    trainer.train()
    assert ids_by_step(tmp_path) == [[0, 1, 2], [3, 4, 5, 6], [7]]
    assert (trainer.step, trainer.examples_seen) == (3, 8)


@pytest.mark.parametrize("replicas", [1, 2])
def test_c016_data_shorter_than_the_steps_ends_the_run_and_says_so(
    tmp_path: pathlib.Path, replicas: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Short(Ids):
        def train_data(self) -> Any:
            return tf.data.Dataset.from_tensor_slices(self.xs[:10]).batch(4)

    trainer = Short(settings(run_dir=tmp_path, train_steps=7, num_replicas=replicas, progress="lines"))
    trainer.train()
    assert (trainer.step, trainer.examples_seen) == (3, 10)
    assert "the training data ended after step 3 of 7" in capsys.readouterr().out
    assert saved(tmp_path, 3)["run/examples"] == 10


def test_epochs_of_an_endless_dataset_are_refused_as_those_of_an_endless_pipeline_are() -> None:
    class Endless(Toy):
        def train_data(self) -> Any:
            return tf.data.Dataset.from_tensor_slices(self.xs).batch(4).repeat()

        def hooks(self) -> Any:
            def stop(step: int, values: Any) -> None:
                raise RuntimeError("three passes of the one asked for, and no end")

            return [Scheduled(AtSteps([9]), stop)]

    with pytest.raises(ConfigError, match="endless"):
        Endless(settings(train_steps=None, train_epochs=1)).train()


def test_epochs_of_an_endless_pipeline_are_refused() -> None:
    class Endless(Toy):
        def train_data(self) -> Any:
            return synthetic(tf.TensorSpec([]))

    with pytest.raises(ConfigError, match=r"train_epochs=1 but the training data is endless; pass --train_steps"):
        Endless(settings(train_steps=None, train_epochs=1)).train()


@pytest.mark.parametrize("replicas", [1, 2])
def test_c018_a_map_after_the_batch_sees_the_batch_the_user_wrote(tmp_path: pathlib.Path, replicas: int) -> None:
    class Mapped(Ids):
        def train_data(self) -> Any:
            whole = tf.data.Dataset.from_tensor_slices(self.xs[:24]).batch(12, drop_remainder=True)
            return whole.map(lambda x: x - x[11] + x[11])  # row 11 is there only in a whole batch

    trainer = Mapped(settings(run_dir=tmp_path, train_steps=2, global_batch_size=12, num_replicas=replicas))
    trainer.train()
    assert ids_by_step(tmp_path) == [list(range(12)), list(range(12, 24))]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("error", [ConfigError, LockstepError])
def test_an_error_of_the_framework_while_data_is_read_comes_as_it_is(replicas: int, error: type[Exception]) -> None:
    """TensorFlow would make an InvalidArgumentError of many lines of it."""

    class Broken(Toy):
        def train_data(self) -> Any:
            def read(x: Any) -> Any:
                raise error("row 3 of words.txt is not UTF-8; pass --skip_bad_examples=1")

            return tf.data.Dataset.range(8).batch(4).map(lambda x: tf.numpy_function(read, [x], tf.float32))

    with pytest.raises(error) as told:
        Broken(settings(num_replicas=replicas)).train()
    assert str(told.value) == "row 3 of words.txt is not UTF-8; pass --skip_bad_examples=1"
