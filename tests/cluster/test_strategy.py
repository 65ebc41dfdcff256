"""Which strategy is chosen and why, what is refused, and the settings made before TensorFlow starts."""

from __future__ import annotations

import itertools
import os
import types
from typing import Any

import pytest
import tensorflow as tf

from framework.cluster.cluster import Cluster
from framework.cluster.strategy import Choice, build, choose, communication_options, configure_devices
from framework.config import RunConfig
from framework.errors import ConfigError

ALONE = Cluster()
TWO = Cluster(("a:2222", "b:2222"), 0, "TF_CONFIG")


def chosen(num_gpus: int = 0, cluster: Cluster = ALONE, has_tpu: bool = False, **settings: Any) -> Choice:
    return choose(RunConfig(**settings), cluster, num_gpus, has_tpu)


def refusal(num_gpus: int = 0, cluster: Cluster = ALONE, has_tpu: bool = False, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        chosen(num_gpus, cluster, has_tpu, **settings)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- B19: what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "value", "rule", "cure"),
    [
        ({"num_replicas": -1}, "num_replicas=-1", "at least 0", "for example"),
        ({"strategy": "one_device", "num_replicas": 2}, "num_replicas=2", "one replica", "--num_replicas=1"),
        ({"strategy": "parameter_server"}, "'parameter_server'", "must be one of", "mirrored"),
        ({"num_replicas": 2, "all_reduce": "nccl"}, "all_reduce=nccl", "can do only", "hierarchical"),
        ({"num_replicas": 2, "all_reduce": "ring"}, "all_reduce=ring", "can do only", "one_device"),
        ({"all_reduce": "hierarchical"}, "all_reduce=hierarchical", "can do only", "auto"),
        ({"device": "gpu"}, "device=gpu", "no GPU", "--device=cpu"),
        ({"device": "tpu"}, "device=tpu", "no TPU", "--device=cpu"),
        ({"strategy": "tpu"}, "strategy=tpu", "no TPU", "TPU_NAME"),
        ({"strategy": "multi_worker"}, "strategy=multi_worker", "no cluster", "TF_CONFIG"),
        ({"collective_timeout": 5.0}, "collective_timeout=5.0", "one worker", "leave it out"),
    ],
)
def test_b19_a_refusal_names_value_rule_and_cure(settings: dict[str, Any], value: str, rule: str, cure: str) -> None:
    message = refusal(**settings)
    for part in (value, rule, cure):
        assert part in message


def test_b19_more_replicas_than_gpus() -> None:
    message = refusal(num_gpus=2, num_replicas=4)
    assert message == "num_replicas=4 but 2 GPUs are visible; pass --num_replicas=2 or --device=cpu"
    assert "1 GPU is visible" in refusal(num_gpus=1, num_replicas=2)


@pytest.mark.parametrize("algorithm", ["one_device", "hierarchical", "collective"])
def test_b19_several_workers_cannot_use_an_algorithm_of_one(algorithm: str) -> None:
    assert "can do only auto, ring" in refusal(cluster=TWO, all_reduce=algorithm)


@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
def test_b19_a_strategy_of_one_worker_with_a_cluster_of_two(strategy: str) -> None:
    message = refusal(cluster=TWO, strategy=strategy)
    assert f"strategy={strategy}" in message
    assert "TF_CONFIG names 2 workers" in message
    assert "--cluster=none" in message


def test_b19_the_cure_for_workers_that_come_from_flags_can_be_followed() -> None:
    flags: dict[str, Any] = {"workers": "a:2222,b:2222", "worker_index": 0}
    message = refusal(cluster=Cluster(("a:2222", "b:2222"), 0, "flags"), strategy="mirrored", **flags)
    with pytest.raises(ConfigError):
        RunConfig(cluster="none", strategy="mirrored", **flags)
    assert "--cluster=none" not in message


def test_every_combination_gives_a_choice_or_a_refusal() -> None:
    strategies = ("auto", "one_device", "mirrored", "multi_worker", "tpu")
    algorithms = ("auto", "one_device", "nccl", "ring")
    legal = itertools.product(
        strategies, ("auto", "cpu", "gpu", "tpu"), (0, 1, 2), algorithms, (ALONE, TWO), (0, 1, 2), (False, True)
    )
    for strategy, device, replicas, algorithm, cluster, gpus, tpu in legal:
        try:
            config = RunConfig(strategy=strategy, device=device, num_replicas=replicas, all_reduce=algorithm)
            choice = choose(config, cluster, gpus, tpu)
        except ConfigError:
            continue
        assert strategy in ("auto", choice.kind)
        assert device in ("auto", choice.device)
        assert choice.device != "gpu" or choice.num_replicas <= gpus
        assert choice.all_reduce != "auto"
        assert choice.describe().count("\n") == 0


# --- B20: one device -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_gpus", "device"), [(0, "cpu"), (1, "gpu"), (4, "gpu")])
def test_b20_one_device_is_one_replica_on_what_there_is(num_gpus: int, device: str) -> None:
    choice = chosen(num_gpus, strategy="one_device")
    assert (choice.kind, choice.device, choice.num_replicas) == ("one_device", device, 1)


def test_b20_one_device_on_cpu_beside_a_gpu() -> None:
    choice = chosen(1, strategy="one_device", device="cpu")
    assert (choice.kind, choice.device, choice.num_replicas) == ("one_device", "cpu", 1)


@pytest.mark.parametrize(("num_gpus", "device"), [(0, "CPU"), (1, "GPU")])
def test_b20_auto_on_one_device_says_where_and_why(num_gpus: int, device: str) -> None:
    line = chosen(num_gpus).describe()
    assert f"one_device, 1 replica on {device} (" in line
    assert "no GPU is visible" in line if device == "CPU" else "one GPU" in line


def test_b20_the_strategy_of_one_device_is_on_cpu() -> None:
    strategy = build(chosen(strategy="one_device"), RunConfig(), ALONE)
    assert strategy.num_replicas_in_sync == 1
    assert [d.split("/")[-1] for d in strategy.extended.worker_devices] == ["device:CPU:0"]


# --- B21: mirrored -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_b21_mirrored_over_n_cpus_has_n_replicas_on_n_devices(n: int) -> None:
    config = RunConfig(strategy="mirrored", device="cpu", num_replicas=n)
    choice = choose(config, ALONE, 0, False)
    configure_devices(choice, config)
    strategy = build(choice, config, ALONE)
    assert (choice.num_replicas, strategy.num_replicas_in_sync) == (n, n)
    assert [d.split("/")[-1] for d in strategy.extended.worker_devices] == [f"device:CPU:{i}" for i in range(n)]


@pytest.mark.parametrize(("asked", "used"), [(0, 4), (1, 1), (3, 3)])
def test_b21_mirrored_uses_all_gpus_or_as_many_as_asked(asked: int, used: int) -> None:
    choice = chosen(4, strategy="mirrored", num_replicas=asked)
    assert (choice.kind, choice.device, choice.num_replicas, choice.all_reduce) == ("mirrored", "gpu", used, "nccl")


def test_auto_takes_mirrored_for_several_gpus_or_several_logical_cpus() -> None:
    assert (chosen(2).kind, chosen(2).num_replicas) == ("mirrored", 2)
    assert (chosen(0, num_replicas=3).kind, chosen(0, num_replicas=3).device) == ("mirrored", "cpu")
    assert chosen(2, num_replicas=1).kind == "one_device"


def test_auto_takes_a_cluster_and_a_tpu() -> None:
    choice = chosen(cluster=TWO)
    assert (choice.kind, choice.all_reduce, choice.reason) == ("multi_worker", "ring", "TF_CONFIG names 2 workers")
    assert chosen(2, cluster=TWO).all_reduce == "nccl"
    assert (chosen(has_tpu=True).kind, chosen(has_tpu=True).num_replicas) == ("tpu", 0)
    assert chosen(has_tpu=True, device="cpu").kind == "one_device"


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        ("auto", tf.distribute.ReductionToOneDevice),
        ("one_device", tf.distribute.ReductionToOneDevice),
        ("hierarchical", tf.distribute.HierarchicalCopyAllReduce),
    ],
)
def test_the_algorithm_asked_for_is_the_one_built(algorithm: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        tf.distribute, "MirroredStrategy", lambda devices, cross_device_ops: made.append(cross_device_ops)
    )
    config = RunConfig(device="cpu", num_replicas=2, all_reduce=algorithm)
    build(choose(config, ALONE, 0, False), config, ALONE)
    assert isinstance(made[0], kind)


def test_the_time_limit_of_collectives_reaches_tensorflow() -> None:
    config = RunConfig(collective_timeout=7.5)
    options = communication_options(choose(config, TWO, 0, False), config)
    assert options.timeout_seconds == 7.5
    assert options.implementation == tf.distribute.experimental.CommunicationImplementation.RING
    assert communication_options(chosen(), RunConfig()).timeout_seconds is None


# --- settings before the first op ----------------------------------------------------------------------------------


class Machine:
    """Stands for ``tf.config`` on a machine with GPUs; notes every setting in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: int, started: bool = False):
        self.calls: list[tuple[Any, ...]] = []
        self._started = started
        devices = {"GPU": [f"gpu{i}" for i in range(gpus)], "CPU": ["cpu0"]}
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: devices[kind])
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: devices[kind])
        monkeypatch.setattr(tf.config, "set_visible_devices", self._note("visible"))
        monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: False)
        monkeypatch.setattr(tf.config.experimental, "set_memory_growth", self._note("growth"))
        monkeypatch.setattr(os, "environ", {})

    def _note(self, name: str) -> Any:
        def call(*args: Any) -> None:
            if self._started:
                raise RuntimeError("Visible devices cannot be modified after being initialized")
            self.calls.append((name, *args))

        return call


def test_memory_growth_is_set_on_every_gpu_that_is_used_and_before_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, gpus=3)
    config = RunConfig(num_replicas=2)
    configure_devices(choose(config, ALONE, 3, False), config)
    used = ["gpu0", "gpu1"]
    assert machine.calls == [("visible", used, "GPU"), ("growth", "gpu0", True), ("growth", "gpu1", True)]
    assert os.environ["TF_GPU_THREAD_MODE"] == "gpu_private"


def test_the_users_gpu_thread_mode_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, gpus=1)
    os.environ["TF_GPU_THREAD_MODE"] = "global"
    configure_devices(choose(RunConfig(), ALONE, 1, False), RunConfig())
    assert os.environ["TF_GPU_THREAD_MODE"] == "global"


def test_a_run_on_cpu_hides_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, gpus=2)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda cpu: [types.SimpleNamespace()])
    configure_devices(chosen(2, device="cpu"), RunConfig(device="cpu"))
    assert machine.calls == [("visible", [], "GPU")]


def test_gpu_settings_after_the_first_op_are_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, gpus=2, started=True)
    with pytest.raises(ConfigError, match="make the Trainer before the first TensorFlow op"):
        configure_devices(chosen(2), RunConfig())
