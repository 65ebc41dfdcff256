"""All tasks from their command lines: losses fall, and are those of one replica on two."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

import train
from models.registry import Tasks
from tests.helpers import column, records
from tests.input_pipelines.made_files import image_example, jpeg, write_cifar10, write_imagenet

# Task -> flags of a small form that learns within 50 steps, and the figure that falls.
SMALL: dict[str, tuple[str, ...]] = {
    "cifar10": ("--depth=8", "--schedule=constant", "--schedule_boundaries=", "--learning_rate=0.05"),
    "dcgan": ("--width=8", "--noise=10", "--learning_rate=1e-3"),
    "digits": (),
    "imagenet": ("--depth=18", "--image_size=32", "--learning_rate=0.02", "--train_epochs=50", "--warmup_steps=10"),
    "language": ("--length=32", "--width=32", "--layers=2", "--heads=2", "--warmup_steps=5"),
    "masked_language": ("--length=32", "--width=32", "--layers=2", "--heads=2", "--warmup_steps=3"),
    "ranking": ("--buckets=50", "--train_epochs=50"),
    "simclr": ("--depth=8", "--width=16", "--warmup_steps=3"),
    "synthetic": ("--features=20", "--hidden=32", "--examples=64"),
    "vit": ("--width=32", "--layers=2", "--heads=2", "--warmup_steps=3", "--learning_rate=5e-3"),
}
FALLS = {"dcgan": "discriminator_loss"}


@pytest.fixture
def data(tmp_path: pathlib.Path) -> dict[str, list[str]]:
    """Flags that name the data of the tasks that need or take some."""
    write_cifar10(tmp_path / "cifar", each=40, test=20)
    (tmp_path / "imagenet").mkdir()
    write_imagenet(tmp_path / "imagenet", [image_example(jpeg(i), i + 1) for i in range(20)])
    write_imagenet(tmp_path / "imagenet", [image_example(jpeg(i), i + 1) for i in range(3)], split="validation")
    (tmp_path / "ranking").mkdir()
    lines = [[i % 2, *([i % 2 * 5] * 13), *[f"c{i % 2}{j}" for j in range(26)]] for i in range(60)]
    (tmp_path / "ranking" / "train.tsv").write_text("".join("\t".join(map(str, line)) + "\n" for line in lines))
    folders = {"cifar10": "cifar", "imagenet": "imagenet", "ranking": "ranking", "vit": "cifar"}
    flags = {task: [f"--data_dir={tmp_path / folder}"] for task, folder in folders.items()}
    return {**flags, "vit": [*flags["vit"], "--data=cifar10", "--patch=8"]}


def losses(run_dir: pathlib.Path, task: str, replicas: int, data: dict[str, list[str]], *flags: str) -> list[float]:
    """The task's loss at each record of a run of its own."""
    usual = ["--device=cpu", "--progress=off", "--notensorboard", "--mode=train", "--eval_every=0"]
    where = [f"--run_dir={run_dir}", f"--num_replicas={replicas}"]
    arguments = [*usual, *where, *data.get(task, []), *SMALL[task], *flags]
    assert train.main(["train.py", f"--task={task}", *arguments]) == 0
    found = column(run_dir, FALLS.get(task, "loss"))
    assert np.all(np.isfinite(found))
    return found


def test_there_is_a_small_form_of_every_task() -> None:
    assert set(SMALL) == set(Tasks())


@pytest.mark.parametrize(
    "task", ["vit", *(pytest.param(t, marks=pytest.mark.slow) for t in ("masked_language", "simclr", "dcgan"))]
)
def test_two_replicas_with_uneven_parts_have_the_losses_of_one(tmp_path: pathlib.Path, task: str) -> None:
    """Also augmentation, hidden tokens, noise, batch statistics and a loss over the global batch are the same."""
    flags = ("--train_steps=5", "--global_batch_size=7", "--log_every=1", "--checkpoint_every=0")
    one, two = (losses(tmp_path / str(n), task, n, {}, *flags) for n in (1, 2))
    assert len(one) == 5 and len(set(one)) == 5
    np.testing.assert_allclose(two, one, rtol=2e-4)
    if task == "dcgan":
        ours, theirs = (column(tmp_path / str(n), "generator_loss") for n in (1, 2))
        np.testing.assert_allclose(theirs, ours, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("task", sorted(SMALL))
def test_losses_fall_in_50_steps_on_1_and_on_2_replicas(
    tmp_path: pathlib.Path, task: str, data: dict[str, list[str]]
) -> None:
    for replicas in (1, 2):
        flags = ("--train_steps=50", "--global_batch_size=16", "--log_every=5")
        found = losses(tmp_path / str(replicas), task, replicas, data, *flags)
        # The synthetic labels are random: only their frequency can be learnt, or, of few examples, they by heart.
        assert np.mean(found[-3:]) < 0.97 * np.mean(found[:2]), found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "flags",
    [
        ("--task=imagenet", "--depth=50"),
        ("--task=vit", "--data=imagenet", "--variant=s", "--recompute"),
    ],
)
def test_photographs_of_224_pixels_are_learnt_from_records(tmp_path: pathlib.Path, flags: tuple[str, ...]) -> None:
    """ResNet-50 and ViT-S/16 at their real sizes; the same few pictures again and again."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_imagenet(folder, [image_example(jpeg(i, height=260, width=300), i + 1) for i in range(4)])
    write_imagenet(folder, [image_example(jpeg(9), 1)], shards=1, split="validation")
    run = tmp_path / "run"
    usual = ["--device=cpu", "--num_replicas=1", "--progress=off", "--notensorboard", f"--run_dir={run}"]
    length = ["--train_steps=4", "--train_epochs=9", "--warmup_steps=0", "--global_batch_size=4", "--log_every=1"]
    rate = ["--learning_rate=3e-3" if "--task=vit" in flags else "--learning_rate=0.01", "--eval_every=0"]
    assert train.main(["train.py", *flags, *usual, *length, *rate, f"--data_dir={folder}"]) == 0
    found = column(run, "loss")
    assert len(found) == 4 and found[-1] < found[0] and np.all(np.isfinite(found))
    assert records(run, "eval")[-1]["examples"] == 1
