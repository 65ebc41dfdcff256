"""Field cases C011 to C028: input that is split over replicas and workers."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError, LossOutput, RunConfig, Sum
from framework.loop.input_options import InputOptions
from input_pipelines import from_arrays
from input_pipelines.service import LocalService
from tests.field.data_worker import BATCH, COUNT, EPOCHS, THOUSAND, scored
from tests.helpers import Toy, column, decode_ids, ids_by_step, records, settings


class Rows(Toy):
    """A finite dataset of ``count`` numbers 1, 2, ... with weights that show each row."""

    count = 0

    def train_data(self) -> Any:
        xs = np.arange(1, self.count + 1, dtype=np.float32)
        return tf.data.Dataset.from_tensor_slices(xs).batch(self.config.global_batch_size)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=model.w * batch, metrics={"rows": Sum(tf.ones_like(batch)), "total": Sum(batch)})


# --- C011, C012: the last batch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [101, 199, 200])
def test_c011_every_size_of_a_dataset_runs_to_its_end(tmp_path: pathlib.Path, count: int) -> None:
    Rows.count = count
    config = settings(run_dir=tmp_path, train_steps=-1, global_batch_size=100, num_replicas=2)
    trainer = Rows(config)
    trainer.train()
    assert (trainer.step, trainer.examples_seen) == (2, count)
    assert column(tmp_path, "rows") == [100, count - 100]
    last = np.arange(101, count + 1)
    assert records(tmp_path)[-1]["loss"] == pytest.approx(last.mean(), rel=1e-6)


@pytest.mark.parametrize("replicas", [2, 4])
def test_c012_a_replica_without_examples_adds_nothing(tmp_path: pathlib.Path, replicas: int) -> None:
    class Five(Rows):
        count = 5
        rate = 1.0

    trainer = Five(settings(run_dir=tmp_path, train_steps=-1, num_replicas=replicas))
    trainer.train()
    # Loss w x: the weight falls by the mean of the batch. w = 1, then 1 - 2.5.
    assert column(tmp_path, "loss") == pytest.approx([2.5, -1.5 * 5], rel=1e-6)
    assert column(tmp_path, "total") == [10, 5]
    assert float(trainer.model.w.numpy()) == pytest.approx(1 - 2.5 - 5)


# --- two workers on one file: C021, C023, C024, C025, C027, C028, C050, C051 ------------------------------------------

_gang: list[list[dict[str, Any]]] = []


def _run_gang(run_workers: Callable[..., list[Any]], out: pathlib.Path, files: int, limit: float) -> list[Any]:
    """What two workers saw of 46 examples in TFRecord files, in two shuffled passes."""
    for number in range(files):
        with tf.io.TFRecordWriter(str(out / f"{number}.tfrecord")) as writer:
            for i in range(number, COUNT, files):
                feature = {"id": tf.train.Feature(int64_list=tf.train.Int64List(value=[i]))}
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    done = run_workers(2, str(out), script="tests/field/data_worker.py", timeout=limit)
    assert [d.code for d in done] == [0, 0], done[0].stderr[-3000:] + done[1].stderr[-3000:]
    assert "split over 2 workers by data" in done[0].stdout
    return [json.loads((out / f"worker-{i}.json").read_text()) for i in range(2)]


@pytest.fixture
def gang(run_workers: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two workers on one file; made once."""
    if not _gang:
        _gang.append(_run_gang(run_workers, tmp_path_factory.mktemp("gang"), 1, 150))
    return _gang[0]


@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("again", range(10))
def test_c024_no_run_hangs(
    run_workers: Callable[..., list[Any]], tmp_path: pathlib.Path, files: int, again: int
) -> None:
    workers = _run_gang(run_workers, tmp_path, files, 60)
    assert [w["step"] for w in workers] == [EPOCHS * -(-COUNT // BATCH)] * 2
    assert [sum(s["rows"] for s in w["seen"]) for w in workers] == [EPOCHS * COUNT] * 2


def test_c021_a_dict_of_features_reaches_the_step_of_two_workers(gang: list[dict[str, Any]]) -> None:
    """Keys and dtypes are asserted in the step itself; the lengths of all names say that the values came too."""
    for worker in gang:
        names = sum(s["names"] for s in worker["seen"])
        assert names == EPOCHS * sum(len(str(i)) for i in range(COUNT))


def test_c023_c024_one_file_and_two_workers_end_together(gang: list[dict[str, Any]]) -> None:
    for worker in gang:
        assert sum(s["rows"] for s in worker["seen"]) == EPOCHS * COUNT
    assert gang[0]["step"] == gang[1]["step"] == EPOCHS * -(-COUNT // BATCH)


def test_c025_c028_the_examples_of_the_workers_are_disjoint_and_complete(gang: list[dict[str, Any]]) -> None:
    first, second = ({i for s in gang[0]["seen"] for i in decode_ids(s[name])} for name in ("ids0", "ids1"))
    steps = [(decode_ids(s["ids0"]), decode_ids(s["ids1"])) for s in gang[0]["seen"]]
    assert all(not set(a) & set(b) for a, b in steps)
    assert first | second == set(range(COUNT))
    # What is reported is of all workers, so both report the same.
    speed = {"examples_per_second", "step_ms", "input_wait"}
    shared = [[{n: v for n, v in s.items() if n not in speed} for s in worker["seen"]] for worker in gang]
    assert shared[0] == shared[1]


def test_c027_a_shuffle_without_a_seed_gives_each_example_once_a_pass(gang: list[dict[str, Any]]) -> None:
    each = -(-COUNT // BATCH)
    for epoch in range(EPOCHS):
        ids = [i for s in gang[0]["seen"][epoch * each : (epoch + 1) * each] for i in decode_ids(s["ids0"] + s["ids1"])]
        assert sorted(ids) == list(range(COUNT))


def test_c050_c051_two_workers_evaluate_every_example_once(gang: list[dict[str, Any]]) -> None:
    for worker in gang:
        assert worker["evaluated"]["file/examples"] == COUNT
        assert worker["evaluated"]["file/accuracy"] == pytest.approx((COUNT - 1) / COUNT, rel=1e-7)


def test_two_workers_evaluate_a_thousand_examples_as_one_replica_does(gang: list[dict[str, Any]]) -> None:
    class Alone(Toy):
        def eval_data(self) -> Any:
            return from_arrays(THOUSAND)

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return scored(model, batch)

    alone = Alone(settings(global_batch_size=BATCH)).evaluate()
    assert alone["examples"] == alone["rows"] == 1000
    for worker in gang:
        found = {n.removeprefix("thousand/"): v for n, v in worker["evaluated"].items() if n.startswith("thousand/")}
        assert found == pytest.approx(alone, rel=1e-7)


# --- C022: passes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_c022_each_pass_over_a_finite_dataset_has_all_its_batches(tmp_path: pathlib.Path, replicas: int) -> None:
    class Six(Rows):
        count = 24

    config = settings(run_dir=tmp_path, train_steps=None, train_epochs=3, num_replicas=replicas)
    trainer = Six(config)
    trainer.train()
    assert trainer.step == 18
    assert column(tmp_path, "total") == [10, 26, 42, 58, 74, 90] * 3


# --- settings of the input -------------------------------------------------------------------------------------------


class Slow(Rows):
    count = 40

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        figure = tf.pow(tf.constant(2.0, tf.float64), tf.cast(batch, tf.float64))
        return LossOutput(loss=model.w * batch, metrics={"ids": Sum(figure), "rows": Sum(tf.ones_like(batch))})


def test_threads_and_memory_of_the_input_do_not_change_what_comes(tmp_path: pathlib.Path) -> None:
    for name, changes in (("plain", {}), ("tuned", {"input_threads": 2, "input_ram_budget_mb": 64})):
        Slow(settings(run_dir=tmp_path / name, train_steps=-1, **changes)).train()
    assert ids_by_step(tmp_path / "tuned") == ids_by_step(tmp_path / "plain")
    options = InputOptions(settings(input_threads=2, input_ram_budget_mb=64)).tuned(tf.data.Dataset.range(3)).options()
    assert (options.threading.private_threadpool_size, options.autotune.ram_budget) == (2, 64_000_000)


def test_a_data_service_makes_each_element_once(tmp_path: pathlib.Path) -> None:
    with LocalService(workers=2) as service:
        config = settings(run_dir=tmp_path, train_steps=-1, data_service=service.address)
        Slow(config).train()
    ids = [i for step in ids_by_step(tmp_path) for i in step]
    assert sorted(ids) == list(range(1, 41))


@pytest.mark.parametrize(
    ("workers", "changes", "says"),
    [
        (2, {}, "with 2 workers"),
        (1, {"deterministic": True}, "with deterministic=True"),
    ],
)
def test_a_data_service_where_it_would_be_wrong_is_refused(workers: int, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"data_service=a:1 {says}"):
        InputOptions(RunConfig(data_service="a:1", **changes), workers)


def test_a_data_service_for_a_pipeline_is_refused() -> None:
    with pytest.raises(ConfigError, match="data_service=a:1 with a pipeline, whose order is exact"):
        Toy(settings(data_service="a:1")).train()
