"""Several worker processes on this machine: equal losses, one set of files, a clean end."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import train
from framework.hooks import read_metrics

ARGS = [
    "--task=digits",
    "--device=cpu",
    "--mode=train",
    "--hidden=16",
    "--dropout=0",
    "--global_batch_size=32",
    "--optimizer=sgd",
    "--momentum=0.9",
    "--weight_decay=0",
    "--learning_rate=0.05",
    "--schedule=constant",
    "--warmup_steps=0",
    "--log_every=1",
    "--eval_every=0",
    "--checkpoint_every=5",
    "--train_steps=10",
    "--seed=1",
]


class Gang(NamedTuple):
    """Two workers that have trained: where, what they said, and when the last of them was gone."""

    run_dir: Path
    done: list[Any]
    gone_at: float


_gang: list[Gang] = []


@pytest.fixture
def gang(run_workers: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Gang:
    """Made once for this file; ``run_workers`` fails if a process is left."""
    if not _gang:
        run_dir = tmp_path_factory.mktemp("gang") / "run"
        done = run_workers(2, *ARGS, f"--run_dir={run_dir}")
        _gang.append(Gang(run_dir, done, time.time()))
    return _gang[0]


def losses(run_dir: Path) -> list[float]:
    records = read_metrics(run_dir / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, 11))
    return [r["loss"] for r in records]


def weights(run_dir: Path) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(run_dir / "checkpoints" / "step-00000010" / "data"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


# --- B30 -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("one") / "run"
    assert train.main(["train.py", *ARGS, "--strategy=one_device", f"--run_dir={run_dir}"]) == 0
    return run_dir


def assert_equal_training(run_dir: Path, reference: Path) -> None:
    np.testing.assert_allclose(losses(run_dir), losses(reference), rtol=1e-6)
    expected, found = weights(reference), weights(run_dir)
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_b30_mirrored_on_two_devices_trains_as_one_device(one_device: Path, tmp_path: Path) -> None:
    args = [*ARGS, "--strategy=mirrored", "--num_replicas=2", f"--run_dir={tmp_path}"]
    assert train.main(["train.py", *args]) == 0
    assert json.loads((tmp_path / "config.json").read_text())["strategy"]["num_replicas"] == 2
    assert_equal_training(tmp_path, one_device)


def test_b30_two_workers_train_as_one_device(one_device: Path, gang: Gang) -> None:
    assert [d.code for d in gang.done] == [0, 0], gang.done[0].stderr[-2000:] + gang.done[1].stderr[-2000:]
    strategy = json.loads((gang.run_dir / "config.json").read_text())["strategy"]
    assert (strategy["kind"], strategy["num_replicas"]) == ("multi_worker", 2)
    assert_equal_training(gang.run_dir, one_device)


# --- what they say and write ---------------------------------------------------------------------------------------


def test_c091_the_first_lines_name_workers_index_and_replicas(gang: Gang) -> None:
    lines = gang.done[0].stdout.splitlines()
    settings = json.loads((gang.run_dir / "config.json").read_text())
    workers = settings["workers"]
    assert (len(workers), settings["cluster_source"]) == (2, "TF_CONFIG")
    assert f"cluster: worker 0 of 2 ({', '.join(workers)}), from TF_CONFIG" in lines
    assert "batch: 32 examples a step = 2 replicas x 16; any split is exact" in lines
    assert any(
        line.startswith("strategy: multi_worker, 1 replica a worker on CPU (TF_CONFIG names 2") for line in lines
    )


def test_only_the_chief_talks(gang: Gang) -> None:
    assert gang.done[1].stdout == ""


def test_c122_one_event_file_and_one_point_for_a_step_and_tag(gang: Gang) -> None:
    assert all(len(list(folder.iterdir())) == 1 for folder in (gang.run_dir / "tensorboard").iterdir())
    files = list((gang.run_dir / "tensorboard" / "train").iterdir())
    points: Counter[tuple[str, int]] = Counter()
    for record in tf.data.TFRecordDataset(str(files[0])).as_numpy_iterator():
        event = tf.compat.v1.Event.FromString(record)
        points.update((value.tag, event.step) for value in event.summary.value)
    assert {step for tag, step in points if tag == "loss"} == set(range(1, 11))
    assert set(points.values()) == {1}


def test_one_set_of_files_and_nothing_half_written(gang: Gang) -> None:
    names = {str(p.relative_to(gang.run_dir)) for p in gang.run_dir.rglob("*")}
    assert not [n for n in names if "tmp" in n or "discarded" in n]
    assert {n for n in names if n.startswith("checkpoints/") and n.count("/") == 1} == {
        "checkpoints/step-00000005",
        "checkpoints/step-00000010",
    }


def test_c100_all_workers_are_gone_soon_after_the_last_line(gang: Gang) -> None:
    # The summary is written just before the last lines, so this asks for a little more.
    assert gang.gone_at - (gang.run_dir / "summary.json").stat().st_mtime < 10.0


@pytest.mark.slow
def test_c100_a_process_with_two_replicas_is_gone_soon_after_the_last_line(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    done = run_cli([*ARGS, "--num_replicas=2", "--train_steps=3", f"--run_dir={tmp_path}"])
    gone_at = time.time()
    assert done.code == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith("run folder:")
    assert gone_at - (tmp_path / "summary.json").stat().st_mtime < 10.0
