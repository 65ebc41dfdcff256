"""Clusters from Slurm's variables, well formed and not. The long form of the generated cases: ``-m slow``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import RunConfig
from framework.cluster.cluster import Cluster, resolve
from framework.cluster.slurm import SAMPLE, gpus_per_task
from framework.cluster.strategy import choose
from framework.errors import ConfigError

NODES = "gpu[001-003],cpu5"
EXAMPLES = [pytest.param(150, id="short"), pytest.param(8000, id="long", marks=pytest.mark.slow)]


def step(**changes: str | None) -> dict[str, str]:
    """What srun sets for task 3 of 7 on four nodes, two on each but the last."""
    usual: dict[str, str | None] = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NODELIST": NODES,
        "SLURM_NTASKS": "7",
        "SLURM_TASKS_PER_NODE": "2(x3),1",
        "SLURM_PROCID": "3",
    }
    return {k: v for k, v in {**usual, **changes}.items() if v is not None}


def from_slurm(environ: dict[str, str], **config: Any) -> Cluster:
    return resolve(RunConfig(cluster="slurm", **config), environ)


# Job 7 and step 0: 10000 + 7 * 97.
WORKERS = (
    "gpu001:10679",
    "gpu001:10680",
    "gpu002:10679",
    "gpu002:10680",
    "gpu003:10679",
    "gpu003:10680",
    "cpu5:10679",
)


def test_tasks_are_workers_in_the_order_of_their_rank() -> None:
    cluster = from_slurm(step())
    assert cluster == Cluster(WORKERS, 3, "Slurm")
    assert cluster.local_index == 1
    assert cluster.describe().endswith("from Slurm")


def test_auto_takes_a_step_of_several_tasks() -> None:
    assert resolve(RunConfig(), step()) == Cluster(WORKERS, 3, "Slurm")


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": None},  # the batch script itself
        {"SLURM_PROCID": None},
        {"SLURM_STEP_NUM_TASKS": "1"},  # a shell in an allocation
        {"SLURM_NTASKS": None},
    ],
)
def test_auto_takes_nothing_outside_of_a_step_of_several_tasks(changes: dict[str, str | None]) -> None:
    assert resolve(RunConfig(), step(**changes)) == Cluster()


def test_flags_and_tf_config_go_before_slurm() -> None:
    assert resolve(RunConfig(workers="a:1,b:1", worker_index=1), step()).source == "flags"
    tf_config = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
    assert resolve(RunConfig(), step(TF_CONFIG=tf_config)).source == "TF_CONFIG"
    assert resolve(RunConfig(cluster="none"), step()) == Cluster()


def test_what_is_of_the_step_goes_before_what_is_of_the_job() -> None:
    cluster = from_slurm(
        step(SLURM_STEP_NODELIST="gpu002", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="2", SLURM_PROCID="1")
    )
    assert cluster == Cluster(("gpu002:10679", "gpu002:10680"), 1, "Slurm")


def test_equal_counts_need_not_be_said() -> None:
    environ = step(SLURM_TASKS_PER_NODE=None, SLURM_NTASKS="8", SLURM_PROCID="7")
    assert from_slurm(environ).workers[-2:] == ("cpu5:10679", "cpu5:10680")


def test_one_task_is_a_cluster_of_one() -> None:
    cluster = from_slurm({"SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
    assert cluster == Cluster(("n1:10000",), 0, "Slurm")


def test_a_port_of_ones_own_and_one_for_each_job() -> None:
    assert from_slurm(step(), worker_port=7000).workers[:2] == ("gpu001:7000", "gpu001:7001")
    ports = {from_slurm(step(SLURM_JOB_ID=str(i))).workers[0].rpartition(":")[2] for i in range(1000, 1200)}
    assert len(ports) == 200


def test_tasks_that_are_dealt_out_in_turn() -> None:
    order = from_slurm(step(SLURM_DISTRIBUTION="cyclic")).workers
    assert [w.partition(":")[0] for w in order] == ["gpu001", "gpu002", "gpu003", "cpu5", "gpu001", "gpu002", "gpu003"]
    assert [w[-5:] for w in order] == ["10679"] * 4 + ["10680"] * 3


def test_a_place_that_slurm_says_too_must_agree() -> None:
    assert from_slurm(step(SLURM_NODEID="1", SLURM_LOCALID="1")).index == 3
    with pytest.raises(ConfigError, match=r"SLURM_NODEID='3': task 3 should have 1 .*--distribution=block"):
        from_slurm(step(SLURM_NODEID="3", SLURM_LOCALID="0"))


MALFORMED: dict[str, tuple[dict[str, str | None], str]] = {
    "no_nodes": ({"SLURM_JOB_NODELIST": None}, "SLURM_JOB_NODELIST is not set"),
    "bracket": ({"SLURM_JOB_NODELIST": "gpu[001-003,cpu5"}, "SLURM_JOB_NODELIST='gpu[001-003,cpu5'"),
    "falling": ({"SLURM_JOB_NODELIST": "gpu[3-1]"}, "SLURM_JOB_NODELIST='gpu[3-1]'"),
    "node_twice": ({"SLURM_JOB_NODELIST": "gpu[1-2],gpu2,cpu5"}, "'gpu2' is in it twice"),
    "no_host": ({"SLURM_JOB_NODELIST": "gpu 1,b,c,d"}, "'gpu 1' is no name"),
    "no_tasks": ({"SLURM_NTASKS": None}, "SLURM_NTASKS is not set"),
    "tasks_no_number": ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS='many'"),
    "no_task": ({"SLURM_NTASKS": "0"}, "SLURM_NTASKS='0'"),
    "no_rank": ({"SLURM_PROCID": None}, "SLURM_PROCID is not set"),
    "rank_out_of_range": ({"SLURM_PROCID": "7"}, "SLURM_PROCID='7': SLURM_NTASKS=7"),
    "rank_negative": ({"SLURM_PROCID": "-1"}, "SLURM_PROCID='-1'"),
    "counts_do_not_add_up": ({"SLURM_TASKS_PER_NODE": "2(x4)"}, "adds up to 8 tasks but SLURM_NTASKS=7"),
    "counts_of_few_nodes": ({"SLURM_TASKS_PER_NODE": "4,3"}, "has 2 nodes but the list of nodes has 4"),
    "counts_of_many_nodes": ({"SLURM_TASKS_PER_NODE": "1(x7)"}, "has more nodes"),
    "counts_of_far_too_many": ({"SLURM_TASKS_PER_NODE": "1(x9999999999)"}, "has more nodes"),
    "counts_malformed": ({"SLURM_TASKS_PER_NODE": "2(3),1"}, "'2(3)'"),
    "counts_missing": ({"SLURM_TASKS_PER_NODE": None}, "SLURM_TASKS_PER_NODE is not set"),
    "distribution": ({"SLURM_DISTRIBUTION": "plane=2"}, "SLURM_DISTRIBUTION='plane=2'"),
    "job_id": ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID='x'"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_variable_is_refused_with_key_and_sample(case: str) -> None:
    changes, said = MALFORMED[case]
    with pytest.raises(ConfigError) as caught:
        from_slurm(step(**changes))
    message = str(caught.value)
    assert said in message and SAMPLE in message and "\n" not in message


def test_the_sample_in_messages_is_a_correct_one() -> None:
    words = SAMPLE.partition(", as")[0].replace("'", "").split()
    environ = dict(word.split("=", 1) for word in words)
    assert from_slurm(environ).num_workers == 7


def test_a_worker_port_without_slurm() -> None:
    with pytest.raises(ConfigError, match="worker_port=7000 with cluster=none"):
        RunConfig(cluster="none", worker_port=7000)
    with pytest.raises(ConfigError, match="worker_port=7000 but the cluster comes from none"):
        resolve(RunConfig(worker_port=7000), {})
    with pytest.raises(ConfigError, match="worker_port=65535 with 2 tasks"):
        from_slurm(step(), worker_port=65535)


# --- GPUs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "count"), [(None, 0), ("2", 2), ("h100:4", 4), ("a100:1,v100:2", 3)])
def test_gpus_per_task(text: str | None, count: int) -> None:
    assert gpus_per_task({} if text is None else {"SLURM_GPUS_PER_TASK": text}) == count


@pytest.mark.parametrize("text", ["x", "h100:", "0", "1,,2", "-1"])
def test_gpus_per_task_that_are_no_number(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_GPUS_PER_TASK"):
        gpus_per_task({"SLURM_GPUS_PER_TASK": text})


def test_a_task_takes_its_share_where_it_sees_those_of_its_neighbours() -> None:
    second = from_slurm(step())
    choice = choose(RunConfig(), second, 4, False, 2)
    assert (choice.first_gpu, choice.num_replicas) == (2, 2)
    bound = choose(RunConfig(), second, 2, False, 2)  # Slurm has hidden the others
    assert (bound.first_gpu, bound.num_replicas) == (0, 2)
    with pytest.raises(
        ConfigError, match="3 GPUs are visible but worker 1 of this machine should have 2 from number 2"
    ):
        choose(RunConfig(), second, 3, False, 2)


# --- generated -----------------------------------------------------------------------------------------------------


def compressed(counts: list[int]) -> str:
    """Counts as Slurm writes them: 2,2,2,1 is 2(x3),1."""
    parts: list[list[int]] = []
    for count in counts:
        if parts and parts[-1][0] == count:
            parts[-1][1] += 1
        else:
            parts.append([count, 1])
    return ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in parts)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_layout_comes_out_as_it_was_written(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        width = data.draw(st.integers(1, 4))
        numbers = sorted(data.draw(st.sets(st.integers(0, 10**width - 1), min_size=1, max_size=6)))
        ranges = ",".join(f"{n:0{width}d}" for n in numbers)
        if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
            ranges = f"{numbers[0]:0{width}d}-{numbers[-1]:0{width}d}"
        others = data.draw(st.lists(st.sampled_from(["x-1", "y.z", "h_3"]), unique=True, max_size=3))
        nodes = [f"n{n:0{width}d}" for n in numbers] + others
        counts = data.draw(st.lists(st.integers(1, 4), min_size=len(nodes), max_size=len(nodes)))
        expected = [f"{node}:{7000 + i}" for node, count in zip(nodes, counts) for i in range(count)]
        rank = data.draw(st.integers(0, len(expected) - 1))
        environ = {
            "SLURM_JOB_NODELIST": ",".join([f"n[{ranges}]", *others]),
            "SLURM_NTASKS": str(len(expected)),
            "SLURM_TASKS_PER_NODE": compressed(counts),
            "SLURM_PROCID": str(rank),
        }
        assert from_slurm(environ, worker_port=7000) == Cluster(tuple(expected), rank, "Slurm")

    check()


_piece = st.sampled_from([*"0123456789[](),x- :.n\n²", "gpu[001-003]", "2(x3)", "9" * 30, "(x", "[1-", "\0", "block"])
_text = st.lists(_piece, max_size=8).map("".join)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_variables_give_a_cluster_or_a_config_error(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None)
    @given(
        changes=st.dictionaries(
            st.sampled_from(
                [*step(), "SLURM_DISTRIBUTION", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_NPROCS"]
            ),
            st.none() | _text | st.integers(-1, 9).map(str),
            max_size=3,
        ),
        asked=st.sampled_from(["slurm", "auto"]),
    )
    def check(changes: dict[str, str | None], asked: str) -> None:
        try:
            cluster = resolve(RunConfig(cluster=asked), step(**changes))
        except ConfigError as error:
            assert "SLURM_" in str(error) and "for example" in str(error) and "\n" not in str(error)
            return
        assert 0 <= cluster.index < cluster.num_workers
        assert len(set(cluster.workers)) == len(cluster.workers)

    check()
