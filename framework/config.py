"""``RunConfig``: everything a run can be told, checked before anything starts.

The fields are flat and carry their own help text, choices and bounds, so that the command line (``flags.py``) is made
from them and cannot differ from them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Any

from framework.config_pairs import check_pairs
from framework.errors import ConfigError


def _option(
    default: Any,
    group: str,
    help: str,  # noqa: A002 - the word absl and argparse use
    *,
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    return dataclasses.field(
        default=default, metadata={"group": group, "help": help, "choices": choices, "low": low, "high": high}
    )


OPTIMIZERS = ("sgd", "adam", "adamw", "lamb", "lars", "lion", "adafactor", "muon")
DECAYING = OPTIMIZERS[2:]  # those that decay weights themselves
SCHEDULES = ("constant", "cosine", "step", "polynomial")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of one run, with the flags' names as keywords.

    Raises:
      ConfigError: a value has the wrong type or is out of range, or two values do not go together. Nothing has
        been started by then.
    """

    # --- the run -------------------------------------------------------------------------------------------------
    run_dir: str | None = _option(
        None,
        "run",
        "Folder of the run: metrics, checkpoints, TensorBoard. None (in Python): nothing is written.",
    )
    train_steps: int | None = _option(
        None,
        "run",
        "Total number of updates, counted from step 0, also after a resume. -1: to the end of the data.",
        low=-1,
    )
    train_epochs: int | None = _option(
        None, "run", "Total number of passes over the training data; with train_steps the smaller wins.", low=1
    )
    max_minutes: float = _option(
        0.0, "run", "Stop in good order after this many minutes; the same command goes on. 0: no limit.", low=0.0
    )
    global_batch_size: int = _option(128, "run", "Examples per update, over all replicas and micro-batches.", low=1)
    accumulate_steps: int = _option(
        1,
        "run",
        "Micro-batches per update, one after the other; the batch of an update stays the same.",
        low=1,
        high=1024,
    )
    seed: int = _option(0, "run", "Seed of weights, data order and noise.", low=0, high=2**31 - 1)
    deterministic: bool = _option(
        False, "run", "Only deterministic ops and a fixed order of input and reduction; slower. See docs."
    )
    resume: str = _option(
        "auto",
        "run",
        "auto: go on from the newest whole checkpoint in run_dir, if any; never: refuse a run_dir that holds a run; "
        "must: refuse to start without one.",
        choices=("auto", "never", "must"),
    )
    resume_anyway: bool = _option(
        False, "run", "Go on although seed, optimizer, task or its options are not those the run was started with."
    )
    init_from: str = _option(
        "",
        "run",
        "A checkpoint, or a run folder (its newest whole one): a run that starts at step 0 takes the model's weights "
        "from it. A resume does not read it.",
    )
    init_include: str = _option(
        "",
        "run",
        "init_from: regular expressions, comma separated: only variables in whose name one is found. Empty: all.",
    )
    init_exclude: str = _option(
        "", "run", "init_from: likewise; these variables keep their own initial values, e.g. a new head."
    )

    # --- devices and strategy ------------------------------------------------------------------------------------
    strategy: str = _option(
        "auto",
        "cluster",
        "How replicas are made. auto explains its choice in one line.",
        choices=("auto", "one_device", "mirrored", "multi_worker", "tpu"),
    )
    device: str = _option("auto", "cluster", "Kind of device.", choices=("auto", "cpu", "gpu", "tpu"))
    num_replicas: int = _option(
        0, "cluster", "Replicas per worker; 0: all devices. On CPU: that many logical devices.", low=0
    )
    cluster: str = _option(
        "auto",
        "cluster",
        "Where worker addresses come from. auto: --workers, TF_CONFIG, or a step of Slurm's srun. See docs.",
        choices=("auto", "none", "tf_config", "slurm", "kubernetes", "flags"),
    )
    workers: str = _option(
        "",
        "cluster",
        "host:port of every worker, comma separated, in the order of their index; gpu[01-04]:2222 is four of them.",
    )
    worker_index: int | None = _option(
        None, "cluster", "Index of this process in --workers; kubernetes: from the environment.", low=0
    )
    worker_port: int = _option(
        0, "cluster", "slurm: port of a node's first task, the next has the next; 0: by job.", low=0, high=65535
    )
    mixed_workers: bool = _option(
        False, "cluster", "Start although versions, code, settings or data differ over the workers."
    )
    collective_timeout: float = _option(
        0.0, "cluster", "Seconds a collective, or the start, may wait for other workers; 0: no limit.", low=0.0
    )
    all_reduce: str = _option(
        "auto",
        "cluster",
        "Algorithm of the all-reduce. One worker: one_device, hierarchical, nccl, collective. Several: ring, nccl.",
        choices=("auto", "one_device", "hierarchical", "collective", "nccl", "ring"),
    )
    all_reduce_pack_mb: float = _option(
        32.0, "cluster", "Tensors are joined into packs of at most this many MB before the all-reduce.", low=0.0
    )
    gradient_dtype: str = _option(
        "float32",
        "cluster",
        "dtype in which gradients cross the replicas; bfloat16 and float16 halve the bytes and round.",
        choices=("float32", "bfloat16", "float16"),
    )
    sparse_gradients: str = _option(
        "auto",
        "cluster",
        "How gradients of embeddings cross the replicas: as a dense tensor, or as rows and indices. auto: by size.",
        choices=("auto", "dense", "sparse"),
    )
    show_packs: bool = _option(False, "cluster", "Print the packs of the all-reduce: dtype, tensors, bytes.")
    gpu_thread_mode: str = _option(
        "gpu_private",
        "cluster",
        "TF_GPU_THREAD_MODE, set before the first op when GPUs are used and the variable is not set.",
        choices=("global", "gpu_private", "gpu_shared"),
    )

    # --- precision -----------------------------------------------------------------------------------------------
    precision: str = _option(
        "float32",
        "precision",
        "mixed: computations in half precision, float32 weights.",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
    )
    loss_scale: float = _option(
        0.0, "precision", "mixed_float16: a fixed scale of the loss; 0: dynamic.", low=0.0, high=2.0**31
    )
    jit: str = _option(
        "auto",
        "precision",
        "XLA for the local gradients, never for the all-reduce. auto says what it chose and why.",
        choices=("auto", "on", "off"),
    )

    # --- optimizer -----------------------------------------------------------------------------------------------
    optimizer: str = _option("adamw", "optimizer", "Update rule.", choices=OPTIMIZERS)
    learning_rate: float = _option(1e-3, "optimizer", "Peak learning rate.", low=0.0)
    schedule: str = _option("constant", "optimizer", "Learning rate after the warm-up.", choices=SCHEDULES)
    warmup_steps: int = _option(0, "optimizer", "Updates over which the rate rises linearly to its peak.", low=0)
    schedule_end: float = _option(
        0.0, "optimizer", "cosine, polynomial: the final rate as a share of the peak.", low=0.0, high=1.0
    )
    schedule_power: float = _option(1.0, "optimizer", "polynomial: the power; 1 is linear.", low=0.0)
    schedule_boundaries: str = _option("", "optimizer", "step: updates at which the rate drops, comma separated.")
    schedule_factor: float = _option(
        0.1, "optimizer", "step: the rate is multiplied by this at each boundary.", low=0.0
    )
    momentum: float | None = _option(
        None, "optimizer", "sgd, lars, muon: momentum. None: 0.9; muon 0.95.", low=0.0, high=1.0
    )
    nesterov: bool = _option(False, "optimizer", "sgd: Nesterov momentum.")
    beta_1: float = _option(
        0.9, "optimizer", "adam, adamw, lamb, lion, muon: decay of the first moment.", low=0.0, high=1.0
    )
    beta_2: float | None = _option(
        None,
        "optimizer",
        "adam, adamw, lamb, muon: decay of the second moment; lion: of its only one. None: 0.999; lion 0.99.",
        low=0.0,
        high=1.0,
    )
    epsilon: float | None = _option(
        None,
        "optimizer",
        "adam, adamw, lamb, muon: added to the root of the second moment. None: 1e-7; lamb 1e-6.",
        low=0.0,
    )
    weight_decay: float = _option(
        0.0,
        "optimizer",
        "Decay of weights per unit of learning rate; lars and lamb: before the trust ratio. sgd and adam refuse it.",
        low=0.0,
    )
    decay_exclude: str = _option(
        "",
        "optimizer",
        "Regular expressions, comma separated: a variable in whose name one is found is not decayed; lars, lamb: nor "
        "scaled by a trust ratio. Usual: bias,gamma,beta.",
    )
    learning_rate_multipliers: str = _option(
        "",
        "optimizer",
        "Factors of the learning rate by name, e.g. backbone=0.1,head=1.0: the first regular expression found counts; "
        "0 freezes.",
    )
    muon_exclude: str = _option(
        "",
        "optimizer",
        "muon: regular expressions, comma separated, of matrices for AdamW. Empty: names with embed, head or logits.",
    )
    clip_global_norm: float = _option(
        0.0, "optimizer", "Largest norm of all gradients together, after the reduction; 0: off.", low=0.0
    )
    clip_value: float = _option(
        0.0, "optimizer", "Largest absolute value of each gradient element, after the reduction; 0: off.", low=0.0
    )

    clip_norm: float = _option(
        0.0, "optimizer", "Largest norm of each variable's gradient, after the reduction; 0: off.", low=0.0
    )
    ema_decay: float = _option(
        0.0, "optimizer", "Keep a moving average of the weights and evaluate on it; 0: off.", low=0.0, high=1.0
    )

    # --- loop and hooks ------------------------------------------------------------------------------------------
    steps_per_loop: int = _option(
        0, "loop", "Steps per call of the compiled loop; 0: chosen by measurement.", low=0, high=1_000_000
    )
    log_every: int = _option(100, "loop", "Steps between records of training metrics; 0: only at the end.", low=0)
    eval_every: int = _option(0, "loop", "Steps between evaluations; 0: only at the end.", low=0)
    eval_batch_size: int = _option(
        0, "loop", "Examples per evaluation batch, over all replicas; 0: as in training.", low=0
    )
    eval_patience: float = _option(
        3600.0, "loop", "continuous_eval: seconds without a new checkpoint of a run that has not ended.", low=0.0
    )
    checkpoint_every: int = _option(0, "loop", "Steps between checkpoints; 0: only at the end.", low=0)
    keep_checkpoints: int = _option(5, "loop", "Newest checkpoints kept.", low=1)
    keep_every: int = _option(
        0, "loop", "Keep besides, for good, the checkpoints whose step is a multiple of this; 0: none.", low=0
    )
    keep_best: str = _option(
        "", "loop", "Keep besides the checkpoint best by this evaluation metric, e.g. accuracy:max or loss:min."
    )
    checkpoint_in_background: bool = _option(True, "loop", "Write checkpoint files while training goes on.")
    stop_when: str = _option("", "loop", "Stop early when this holds at an evaluation, e.g. loss<0.1.")
    tensorboard: bool = _option(True, "loop", "Write TensorBoard event files to run_dir/tensorboard.")
    progress: str = _option(
        "auto", "loop", "Console: a bar on a terminal, plain lines elsewhere.", choices=("auto", "bar", "lines", "off")
    )

    # --- export --------------------------------------------------------------------------------------------------
    export_dir: str = _option("", "export", "mode=export: where to write; empty: RUN_DIR/export/step-NNNNNNNN.")
    export_formats: str = _option(
        "saved_model", "export", "mode=export: what to write, comma separated: saved_model, keras, tflite."
    )

    # --- data ----------------------------------------------------------------------------------------------------
    shard_by: str = _option(
        "data",
        "data",
        "How a tf.data.Dataset is split over workers: data (each takes its share of the elements of all files) or file "
        "(of the files; at least one for each worker). A pipeline needs neither: each worker reads its own positions.",
        choices=("data", "file"),
    )
    data_service: str = _option(
        "", "data", "host:port of a tf.data service dispatcher that runs the task's tf.data.Dataset; see docs."
    )
    input_threads: int = _option(0, "data", "Threads of the input alone; 0: it shares TensorFlow's.", low=0)
    input_ram_budget_mb: int = _option(0, "data", "Memory that the input may buffer; 0: TensorFlow's choice.", low=0)

    # --- checks --------------------------------------------------------------------------------------------------
    on_nonfinite: str = _option(
        "stop",
        "checks",
        "What happens at a step whose loss or gradients are not finite; the update is never made.",
        choices=("stop", "skip", "rollback"),
    )
    nonfinite_budget: int = _option(
        10, "checks", "skip, rollback: so many non-finite steps are borne; one more stops the run.", low=0
    )
    hang_limit: float = _option(
        0.0,
        "checks",
        "Seconds without progress after which the run ends with code 4; ten times as many for the start and the first "
        "evaluation. 0: learned from the run's own steps; -1: never.",
        low=-1.0,
    )
    check_replicas_every: int = _option(
        1000,
        "checks",
        "Steps between comparisons of all replicas' variables, bit for bit; also at a run's start and end. 0: never.",
        low=0,
    )
    straggler_every: int = _option(
        1000,
        "checks",
        "Steps between looks at each replica's time to the all-reduce and in it; who holds the others up is named. 0: "
        "not measured.",
        low=0,
    )
    gradient_outliers: bool = _option(
        True,
        "checks",
        "Compare the replicas' own gradient norms, before the all-reduce; tell if one differs from the others for good "
        "or leaps.",
    )
    device_metrics_every: float = _option(
        10.0,
        "checks",
        "Seconds between looks at the machine (GPUs, cores, memory, disk, network), by a thread of its own, written to "
        "run_dir/device_metrics. 0: none.",
        low=0.0,
        high=3600.0,
    )
    profile: str = _option(
        "",
        "checks",
        "START:STOP: a TensorBoard profile of these steps, both included, to run_dir/tensorboard/profile, on all "
        "workers. Later: touch run_dir/profile_now, or send SIGUSR2.",
    )
    peak_tflops: float = _option(
        0.0,
        "checks",
        "Most TFLOP/s of one replica's device, for mfu; 0: from a table of GPUs. python -m framework.monitor.peaks "
        "measures it.",
        low=0.0,
    )

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field, hints[field.name], getattr(self, field.name)))
        check_pairs(self, DECAYING)

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with some fields changed, checked like a new one."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Fields as plain values that ``json`` can write."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Fields as indented JSON with a final newline."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


def _checked(field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """Returns ``value`` in the field's type, or raises ConfigError."""
    name, meta = field.name, field.metadata
    optional = isinstance(hint, types.UnionType)
    kinds = typing.get_args(hint) if optional else (hint,)
    if value is None:
        if optional:
            return None
        raise ConfigError(f"{name}=None but it must be a {kinds[0].__name__}; leave it out for {field.default!r}")
    kind = kinds[0]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    whole = isinstance(value, int) or (kind is int and is_number and math.isfinite(value))
    if whole and abs(value) >= 2**63:
        raise ConfigError(f"{name} is 2**63 or beyond but it must be below; for example {name}={field.default!r}")
    if kind is float and is_number:
        value = float(value)
    if kind is int and is_number and float(value).is_integer():
        value = int(value)
    if kind is str and hasattr(value, "__fspath__"):
        value = value.__fspath__()
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name}={value!r} but it must be a {kind.__name__}; for example {name}={field.default!r}")
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(f"{name}={value!r} but it must be one of {', '.join(meta['choices'])}")
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} but it must be finite; for example {name}={field.default!r}")
    low, high = meta["low"], meta["high"]
    if low is not None and value < low:
        raise ConfigError(f"{name}={value} but it must be at least {low}; for example {name}={field.default!r}")
    if high is not None and value > high:
        raise ConfigError(f"{name}={value} but it must be at most {high}; for example {name}={field.default!r}")
    return value
