"""Which ``tf.distribute`` strategy, why, and the settings that must be made before TensorFlow's first op."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

from framework.cluster.addresses import Cluster
from framework.cluster.roll_call import PortTaken, roll_call
from framework.config import RunConfig
from framework.errors import ConfigError

# What each strategy and kind of device can do; the first is what 'auto' means.
# On logical CPUs one_device is measured fastest: 87 MB of gradients over 2 devices 46 ms with TensorFlow's default
# (collective), 10 ms with one_device (2 cores, TensorFlow 2.21; see BUILD_NOTES.md).
_ALL_REDUCE = {
    ("one_device", "cpu"): ("none",),
    ("one_device", "gpu"): ("none",),
    ("mirrored", "cpu"): ("one_device", "hierarchical", "collective"),
    ("mirrored", "gpu"): ("nccl", "hierarchical", "one_device", "collective"),
    ("multi_worker", "cpu"): ("ring",),
    ("multi_worker", "gpu"): ("nccl", "ring"),
    ("tpu", "tpu"): ("none",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The strategy to use and the reason for it."""

    kind: str  # one_device | mirrored | multi_worker | tpu
    device: str  # cpu | gpu | tpu
    num_replicas: int  # on this worker; 0 for a TPU, whose size is known only after connecting
    all_reduce: str  # the algorithm, 'auto' resolved; 'none' where nothing is reduced by the framework's choice
    reason: str
    first_gpu: int = 0  # of this worker, where it sees those of its neighbours on the machine too

    def describe(self) -> str:
        """One line for people."""
        count = f"{self.num_replicas} replica{'s' * (self.num_replicas != 1)}" if self.num_replicas else "all cores"
        count += " a worker" * (self.kind == "multi_worker")
        return f"strategy: {self.kind}, {count} on {self.device.upper()} ({self.reason}); all-reduce: {self.all_reduce}"


def choose(config: RunConfig, cluster: Cluster, num_gpus: int, has_tpu: bool, gpus_per_worker: int = 0) -> Choice:
    """Chooses the strategy; nothing is started.

    Args:
      config: ``strategy``, ``device``, ``num_replicas``, ``all_reduce`` and ``collective_timeout`` are read.
      cluster: who takes part.
      num_gpus: GPUs that TensorFlow can see in this process.
      has_tpu: whether a TPU was found.
      gpus_per_worker: a worker's share, in the order of the workers on its machine, where TensorFlow can see more than
        that; 0: not said, all are this worker's.

    Raises:
      ConfigError: the request is impossible here.
    """
    first_gpu = 0
    if 0 < gpus_per_worker < num_gpus:
        first_gpu = cluster.local_index * gpus_per_worker
        if first_gpu + gpus_per_worker > num_gpus:
            raise ConfigError(
                f"{num_gpus} GPUs are visible but worker {cluster.local_index} of this machine should have "
                f"{gpus_per_worker} from number {first_gpu} on; for example srun --gpus-per-task=1 --ntasks-per-node=4 "
                "on a machine with 4 GPUs"
            )
        num_gpus = gpus_per_worker
    device = config.device
    if device == "auto":
        may_be_tpu = has_tpu and config.strategy in ("auto", "tpu")
        device = "tpu" if may_be_tpu or config.strategy == "tpu" else "gpu" if num_gpus else "cpu"
    if device == "gpu" and not num_gpus:
        raise ConfigError(
            "device=gpu but TensorFlow sees no GPU; `python -m framework.doctor` says why, or pass --device=cpu"
        )
    if device == "tpu" and not has_tpu:
        asked = "strategy=tpu" if config.strategy == "tpu" else "device=tpu"
        raise ConfigError(f"{asked} but no TPU was found; set TPU_NAME or pass --device=cpu")
    replicas = config.num_replicas or (num_gpus if device == "gpu" else 1)
    if device == "gpu" and replicas > num_gpus:
        raise ConfigError(
            f"num_replicas={replicas} but {num_gpus} GPU{'s are' if num_gpus > 1 else ' is'} visible; "
            f"pass --num_replicas={num_gpus} or --device=cpu"
        )
    kind, reason = _kind(config, cluster, device, replicas)
    if kind == "one_device":
        replicas = 1
    if kind == "tpu":
        replicas = 0
    if config.collective_timeout and kind != "multi_worker":
        raise ConfigError(
            f"collective_timeout={config.collective_timeout} with one worker: there is no other worker to wait for; "
            "leave it out"
        )
    if config.on_nonfinite == "rollback" and cluster.num_workers > 1:
        raise ConfigError(
            f"on_nonfinite=rollback with {cluster.num_workers} workers: only one worker can go back inside a run; "
            "pass --on_nonfinite=stop and start again from the last checkpoint"
        )
    possible = _ALL_REDUCE[kind, device]
    if config.all_reduce not in ("auto", *possible):
        raise ConfigError(
            f"all_reduce={config.all_reduce} but strategy {kind} on {device.upper()} can do only "
            f"{', '.join(['auto', *(p for p in possible if p != 'none')])}; pass one of these"
        )
    algorithm = possible[0] if config.all_reduce == "auto" else config.all_reduce
    return Choice(
        kind=kind,
        device=device,
        num_replicas=replicas,
        all_reduce=algorithm,
        reason=reason,
        first_gpu=first_gpu if device == "gpu" else 0,
    )


def _kind(config: RunConfig, cluster: Cluster, device: str, replicas: int) -> tuple[str, str]:
    """The strategy's kind and why."""
    asked, workers = config.strategy, cluster.num_workers
    if asked == "multi_worker" and not cluster.workers:
        raise ConfigError(
            "strategy=multi_worker but no cluster was found; set TF_CONFIG, or pass "
            "--workers=host1:2222,host2:2222 --worker_index=0"
        )
    if asked in ("one_device", "mirrored") and cluster.workers:
        cure = "leave --workers out" if cluster.source == "flags" else "--cluster=none to ignore them"
        raise ConfigError(
            f"strategy={asked} but {cluster.source} names {workers} workers; pass --strategy=multi_worker, or {cure}"
        )
    if asked == "tpu" or device == "tpu":
        return "tpu", "a TPU was found" if asked == "auto" else "as asked"
    if asked != "auto":
        return asked, "as asked"
    if cluster.workers:
        return "multi_worker", f"{cluster.source} names {workers} worker{'s' * (workers != 1)}"
    if replicas > 1:
        found = f"{replicas} GPUs are used" if device == "gpu" else f"num_replicas={replicas} logical CPU devices"
        return "mirrored", found
    return "one_device", f"one {device.upper()}" if device == "gpu" or config.device == "cpu" else "no GPU is visible"


def configure_devices(choice: Choice, config: RunConfig) -> None:
    """Makes the settings that TensorFlow takes only before its first op.

    Visible devices, memory growth on every GPU, ``TF_GPU_THREAD_MODE``, logical CPU devices.

    Raises:
      ConfigError: TensorFlow was already started with other settings, so it is too late.
    """
    import tensorflow as tf

    if choice.device == "tpu":
        return
    gpus = tf.config.list_physical_devices("GPU")
    if choice.device == "gpu":
        # Read by TensorFlow when it opens the devices, so it has to be in the environment before.
        os.environ.setdefault("TF_GPU_THREAD_MODE", config.gpu_thread_mode)
        used = gpus[choice.first_gpu : choice.first_gpu + choice.num_replicas]
        _early("the visible GPUs", tf.config.set_visible_devices, used, "GPU")
        for gpu in used:  # all of them: TensorFlow refuses growth that differs between devices
            if not tf.config.experimental.get_memory_growth(gpu):
                _early("memory growth", tf.config.experimental.set_memory_growth, gpu, True)
        return
    if gpus and tf.config.get_visible_devices("GPU"):
        _early("the visible GPUs", tf.config.set_visible_devices, [], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    have = len(tf.config.get_logical_device_configuration(cpu) or [None])
    if have < choice.num_replicas:
        wanted = [tf.config.LogicalDeviceConfiguration() for _ in range(choice.num_replicas)]
        _early(
            f"num_replicas={choice.num_replicas} logical CPU devices (there are {have})",
            tf.config.set_logical_device_configuration,
            cpu,
            wanted,
        )


def _early(what: str, setter: Any, *args: Any) -> None:
    """Calls a setting that TensorFlow refuses once it has started."""
    try:
        setter(*args)
    except RuntimeError as error:
        raise ConfigError(
            f"{what} cannot be set any more: TensorFlow was already started by an earlier op; make the Trainer "
            f"before the first TensorFlow op of the program ({str(error).splitlines()[0]})"
        ) from error


def build(choice: Choice, config: RunConfig, cluster: Cluster, facts: Mapping[str, str] | None = None) -> Any:
    """Makes the ``tf.distribute.Strategy``; call ``configure_devices`` first.

    Args:
      choice, config, cluster: what was resolved.
      facts: what this worker says of itself and all must agree on; see ``framework.cluster.preflight``.

    Raises:
      ConfigError: the server of this worker cannot be started, ops were run before, or workers differ.
      PeerLost: with several workers: some did not come within ``collective_timeout`` seconds.
    """
    import tensorflow as tf

    if choice.kind == "one_device":
        return tf.distribute.OneDeviceStrategy(f"{choice.device.upper()}:0")
    if choice.kind == "mirrored":
        devices = [f"{choice.device.upper()}:{i}" for i in range(choice.num_replicas)]
        operations = {
            "one_device": tf.distribute.ReductionToOneDevice,
            "hierarchical": tf.distribute.HierarchicalCopyAllReduce,
            "nccl": tf.distribute.NcclAllReduce,
            "collective": lambda: None,  # TensorFlow's default
        }
        return tf.distribute.MirroredStrategy(devices, cross_device_ops=operations[choice.all_reduce]())
    if choice.kind == "tpu":
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=os.environ.get("TPU_NAME", "local"))
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(cluster.workers)}),
        task_type="worker",
        task_id=cluster.index,
        rpc_layer="grpc",
        # Without this TensorFlow takes a worker for one without GPUs.
        num_accelerators={"GPU": choice.num_replicas} if choice.device == "gpu" else {},
    )
    # TensorFlow itself would wait for peers without a word and without a limit.
    roll_call(cluster, config.collective_timeout, facts)
    several = _cpu_devices(choice.num_replicas) if choice.device == "cpu" else contextlib.nullcontext()
    try:
        with several:
            return tf.distribute.MultiWorkerMirroredStrategy(
                cluster_resolver=resolver, communication_options=communication_options(choice, config)
            )
    except tf.errors.OpError as error:
        if "Could not start gRPC server" not in str(error):
            raise
        raise PortTaken(cluster.workers[cluster.index]) from error  # between the roll call and TensorFlow's server
    except RuntimeError as error:
        raise ConfigError(
            "the multi-worker strategy must be made before TensorFlow's first op; make the Trainer first "
            f"({str(error).splitlines()[0]})"
        ) from error


@contextlib.contextmanager
def _cpu_devices(count: int) -> Iterator[None]:
    """Makes TensorFlow use ``count`` logical CPU devices of this worker inside the block; by itself it uses one.

    It asks the resolver for GPUs and TPUs only, so the method that lists a worker's devices is replaced; a test on two
    workers with two devices each fails when its name changes.
    """
    from tensorflow.python.distribute import collective_all_reduce_strategy

    kind = collective_all_reduce_strategy.CollectiveAllReduceExtended
    before = kind._initialize_local_devices

    def devices(self: Any, resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        del self, resolver
        return tuple(f"{worker_device}/device:CPU:{i}" for i in range(count)), "CPU"

    kind._initialize_local_devices = devices
    try:
        yield
    finally:
        kind._initialize_local_devices = before


def communication_options(choice: Choice, config: RunConfig) -> Any:
    """``CommunicationOptions`` for this choice: algorithm and time limit between workers."""
    import tensorflow as tf

    names = {"ring": "RING", "nccl": "NCCL"}
    kind = names.get(choice.all_reduce, "AUTO") if choice.kind == "multi_worker" else "AUTO"
    return tf.distribute.experimental.CommunicationOptions(
        implementation=getattr(tf.distribute.experimental.CommunicationImplementation, kind),
        timeout_seconds=config.collective_timeout or None,
    )
