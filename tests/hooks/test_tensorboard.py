"""TensorBoard files, read back with TensorBoard's own readers."""

import math
import subprocess
import sys
import types

import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginEventAccumulator

from framework.hooks import TensorBoard

# The first is what scripts read files with, the second what TensorBoard shows; they treat restarts differently.
READERS = [EventAccumulator, PluginEventAccumulator]


def at(step):
    return types.SimpleNamespace(step=step, total_steps=None)


def begun(directory, step):
    board = TensorBoard(directory)
    board.begin(at(step))
    return board


def files(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def folders(directory):
    """Folder -> number of event files in it."""
    found = [file.rpartition("/")[0] for file in files(directory)]
    return {folder: found.count(folder) for folder in found}


def curve(folder, tag="loss", reader=EventAccumulator):
    """The points of a tag as TensorBoard shows them: [(step, value)]."""
    events = reader(str(folder), size_guidance={"tensors": 0}, purge_orphaned_data=True).Reload()
    return [(event.step, float(tf.make_ndarray(event.tensor_proto))) for event in events.Tensors(tag)]


def events(path):
    return [tf.compat.v1.Event.FromString(record.numpy()) for record in tf.data.TFRecordDataset(str(path))]


def tags(folder):
    return sorted(EventAccumulator(str(folder)).Reload().Tags()["tensors"])


def kill(board, directory):
    """Leaves the files as a killed run does: not closed, and made in an earlier second than the next run's."""
    for folder in board._folders.values():
        folder.writer.flush()
    for path in directory.rglob("events.out.tfevents.*"):
        seconds, rest = path.name.removeprefix("events.out.tfevents.").split(".", 1)
        path.rename(path.with_name(f"events.out.tfevents.{int(seconds) - 10}.{rest}"))


def test_b09_a_hook_that_is_never_used_writes_nothing(tmp_path):
    TensorBoard(tmp_path / "tensorboard")
    board = begun(tmp_path / "tensorboard", 0)
    board.end(0, "done")
    assert list(tmp_path.iterdir()) == []


def test_c122_one_file_a_folder_and_one_point_a_step_and_tag(tmp_path):
    board = begun(tmp_path, 0)
    for step in range(1, 11):
        board(step, {"loss": float(step), "accuracy": 0.5})
        if step % 5 == 0:
            board.evaluated(step, "", {"loss": float(step)})
    board.end(10, "done")
    assert folders(tmp_path) == {"train": 1, "eval": 1}
    for reader in READERS:
        assert curve(tmp_path / "train", reader=reader) == [(step, float(step)) for step in range(1, 11)]
        assert curve(tmp_path / "eval", reader=reader) == [(5, 5.0), (10, 10.0)]
    assert tags(tmp_path / "train") == ["accuracy", "loss"]


def test_b08_each_named_evaluation_set_has_its_folder_with_all_tags(tmp_path):
    board = begun(tmp_path, 0)
    board.evaluated(4, "near", {"loss": 0.5, "accuracy": 0.75})
    board.evaluated(4, "far", {"loss": 1.5, "recall": 0.25})
    board.end(4, "done")
    assert folders(tmp_path) == {"eval/near": 1, "eval/far": 1}
    assert tags(tmp_path / "eval/near") == ["accuracy", "loss"]
    assert tags(tmp_path / "eval/far") == ["loss", "recall"]
    assert curve(tmp_path / "eval/far", "recall") == [(4, 0.25)]


def test_b07_an_evaluation_with_the_loss_alone_or_nan_does_not_crash(tmp_path):
    board = begun(tmp_path, 0)
    board.evaluated(1, "", {"loss": math.nan})
    board.end(1, "done")
    [(step, value)] = curve(tmp_path / "eval")
    assert step == 1 and math.isnan(value)


def test_steps_beyond_32_bits_are_kept(tmp_path):
    board = begun(tmp_path, 0)
    board(3_000_000_000, {"loss": 1.0})
    board.end(3_000_000_000, "done")
    assert curve(tmp_path / "train") == [(3_000_000_000, 1.0)]


@pytest.mark.parametrize("reader", READERS)
def test_after_a_resume_the_points_of_the_killed_run_are_struck(tmp_path, reader):
    killed = begun(tmp_path, 0)
    for step in range(1, 8):
        killed(step, {"loss": float(step)})
    killed.evaluated(4, "", {"loss": 4.0})
    killed.evaluated(7, "", {"loss": 7.0})
    kill(killed, tmp_path)

    board = begun(tmp_path, 4)
    for step in (6, 8):  # not the steps of the killed run: 5 and 7 must go though nothing replaces them
        board(step, {"loss": step + 0.5})
    board.evaluated(8, "", {"loss": 8.5})
    board.end(8, "done")
    assert curve(tmp_path / "train", reader=reader) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (6, 6.5), (8, 8.5)]
    assert curve(tmp_path / "eval", reader=reader) == [(4, 4.0), (8, 8.5)]


def test_what_is_struck_is_kept_in_a_file_that_tensorboard_does_not_read(tmp_path):
    killed = begun(tmp_path, 0)
    for step in (1, 2, 3):
        killed(step, {"loss": float(step)})
    killed.write_graph(tf.Graph())
    kill(killed, tmp_path)
    [event_file] = (tmp_path / "train").iterdir()
    whole = event_file.read_bytes()
    event_file.write_bytes(whole + whole[:20])  # a record's head of 12 bytes and a part of its body
    board = begun(tmp_path, 1)
    board.train_writer.flush()
    names = [path.name for path in (tmp_path / "train").iterdir()]
    assert len(names) == 3 and event_file.name in names
    [discarded] = [name for name in names if "tfevents" not in name]
    assert [event.step for event in events(tmp_path / "train" / discarded)] == [2, 3]
    left = events(event_file)
    assert [event.step for event in left if event.HasField("summary")] == [1]
    assert left[0].file_version == "brain.Event:2"
    assert [event.HasField("graph_def") for event in left].count(True) == 1


def test_a_resume_after_the_last_point_leaves_the_files_untouched(tmp_path):
    killed = begun(tmp_path, 0)
    killed(5, {"loss": 5.0})
    kill(killed, tmp_path)
    [event_file] = (tmp_path / "train").iterdir()
    before = event_file.stat()
    board = begun(tmp_path, 5)
    board(6, {"loss": 6.0})
    board.end(6, "done")
    assert (event_file.stat().st_ino, event_file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert folders(tmp_path) == {"train": 2}


@pytest.mark.parametrize("reader", READERS)
def test_a_new_run_in_an_old_folder_takes_over_no_point(tmp_path, reader):
    old = begun(tmp_path, 0)
    old.evaluated(0, "", {"loss": 9.0})
    old.evaluated(5, "", {"loss": 9.0})
    kill(old, tmp_path)
    [old_file] = (tmp_path / "eval").iterdir()
    board = begun(tmp_path, 0)
    board.evaluated(3, "", {"loss": 1.0})
    board.end(3, "done")
    assert events(old_file)[0].file_version == "brain.Event:2"
    assert curve(tmp_path / "eval", reader=reader) == [(3, 1.0)]


@pytest.mark.parametrize("reader", READERS)
def test_an_evaluation_repeated_at_its_step_replaces_the_point(tmp_path, reader):
    board = begun(tmp_path, 0)
    board.evaluated(5, "", {"loss": 5.0})
    board.evaluated(10, "", {"loss": 10.0})
    board.end(10, "done")
    kill(board, tmp_path)
    board.evaluated(10, "", {"loss": 12.0})  # by a new one after the end
    kill(board, tmp_path)
    assert curve(tmp_path / "eval", reader=reader) == [(5, 5.0), (10, 12.0)]
    resumed = begun(tmp_path, 10)
    resumed.evaluated(10, "", {"loss": 13.0})  # by a resumed run
    resumed.end(10, "done")
    assert curve(tmp_path / "eval", reader=reader) == [(5, 5.0), (10, 13.0)]


def test_a_point_repeated_by_the_same_writer_replaces_the_earlier_one(tmp_path):
    board = begun(tmp_path, 0)
    for value in (10.0, 11.0):
        board.evaluated(10, "", {"loss": value})
    board.end(10, "done")
    assert curve(tmp_path / "eval", reader=PluginEventAccumulator) == [(10, 11.0)]


@pytest.mark.parametrize("evaluated_before", [False, True])
def test_going_back_within_a_run_strikes_the_points_after(tmp_path, evaluated_before):
    board = TensorBoard(tmp_path)
    if evaluated_before:  # opens the folder before it is known where the run starts, and so without a START event
        board.evaluated(0, "", {"loss": 0.0})
    board.begin(at(0))
    for step in (1, 2, 3, 4):
        board.evaluated(step, "", {"loss": float(step)})
    board.begin(at(2))
    board.evaluated(5, "", {"loss": 5.0})
    board.end(5, "done")
    points = curve(tmp_path / "eval", reader=PluginEventAccumulator)
    assert points == [(0, 0.0)] * evaluated_before + [(1, 1.0), (2, 2.0), (5, 5.0)]
    assert folders(tmp_path) == {"eval": 1}


@pytest.mark.parametrize("marked", [True, False])
def test_a_tensorboard_that_has_the_folder_open_forgets_the_points_too(tmp_path, marked):
    killed = begun(tmp_path, 0) if marked else TensorBoard(tmp_path)
    for step in (1, 2, 3):
        killed(step, {"loss": float(step)})
    kill(killed, tmp_path)
    reader = PluginEventAccumulator(str(tmp_path / "train"), purge_orphaned_data=True).Reload()
    assert [event.step for event in reader.Tensors("loss")] == [1, 2, 3]
    board = begun(tmp_path, 1)
    board(5, {"loss": 5.0})
    board.end(5, "done")
    assert [event.step for event in reader.Reload().Tensors("loss")] == [1, 5]


@pytest.mark.parametrize("reader", READERS)
def test_evaluating_an_earlier_step_without_training_strikes_nothing(tmp_path, reader):
    board = begun(tmp_path, 0)
    for step in (5, 10):
        board.evaluated(step, "", {"loss": float(step)})
    kill(board, tmp_path)
    TensorBoard(tmp_path).evaluated(7, "", {"loss": 7.0})
    assert sorted(curve(tmp_path / "eval", reader=reader)) == [(5, 5.0), (7, 7.0), (10, 10.0)]


def test_each_point_is_on_disk_when_the_call_returns(tmp_path):
    board = begun(tmp_path, 0)
    for step in (5, 6):
        board(step, {"loss": float(step)})
        assert curve(tmp_path / "train")[-1] == (step, float(step))
        board.evaluated(step, "", {"loss": float(step)})
        assert curve(tmp_path / "eval")[-1] == (step, float(step))


def test_the_end_flushes_and_leaves_the_writer_of_the_step_open(tmp_path):
    board = begun(tmp_path, 0)
    board(5, {"loss": 5.0})
    writer = board.train_writer
    board.end(5, "failed")
    assert curve(tmp_path / "train") == [(5, 5.0)]
    with writer.as_default():  # a compiled step holds it, and may run again
        pass


def test_summaries_of_the_users_step_go_to_the_same_file(tmp_path):
    board = begun(tmp_path, 0)

    @tf.function
    def step_with_summary(step):
        tf.summary.scalar("mine", 2.0, step=step)

    with board.train_writer.as_default():
        step_with_summary(tf.constant(3, tf.int64))
        with tf.summary.record_if(False):
            board(4, {"loss": 1.0})  # its trigger has said when
    board.end(4, "done")
    assert folders(tmp_path) == {"train": 1}
    assert curve(tmp_path / "train", "mine") == [(3, 2.0)]
    assert curve(tmp_path / "train") == [(4, 1.0)]


def test_the_graph_is_written_once(tmp_path):
    board = begun(tmp_path, 0)
    function = tf.function(lambda x: tf.square(x, name="the_square")).get_concrete_function(tf.constant(1.0))
    board.write_graph(function.graph)
    board.write_graph(function.graph)
    board.end(0, "done")
    [path] = (tmp_path / "train").iterdir()
    graphs = [event.graph_def for event in events(path) if event.graph_def]
    assert len(graphs) == 1
    assert "the_square" in [node.name for node in tf.compat.v1.GraphDef.FromString(graphs[0]).node]


def test_importing_the_hooks_runs_no_op():
    # The number of logical devices cannot be set any more once an op has run.
    script = """
import framework.hooks
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
print("devices", len(tf.config.list_logical_devices("CPU")))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "devices 3" in result.stdout, result.stderr
