"""Which settings of a run go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from framework.errors import ConfigError
from framework.parse import (
    parse_best,
    parse_boundaries,
    parse_condition,
    parse_formats,
    parse_multipliers,
    parse_patterns,
    parse_profile,
)

if TYPE_CHECKING:
    from framework.config import RunConfig


def check_pairs(c: RunConfig, decaying: Sequence[str]) -> None:
    """Raises ConfigError for values that do not go together; ``decaying`` are the optimizers that decay weights."""
    if c.train_steps == 0:
        raise ConfigError("train_steps=0 but a run needs at least 1 update; leave it out, or pass -1 for all data")
    if c.strategy == "one_device" and c.num_replicas > 1:
        raise ConfigError(
            f"strategy=one_device with num_replicas={c.num_replicas}: one device is one replica; "
            "pass --strategy=mirrored or --num_replicas=1"
        )
    if c.strategy == "tpu" and c.device not in ("auto", "tpu"):
        raise ConfigError(f"strategy=tpu with device={c.device}: pass --device=tpu or another strategy")
    if c.device == "tpu" and c.strategy not in ("auto", "tpu"):
        raise ConfigError(f"device=tpu with strategy={c.strategy}: pass --strategy=tpu or another device")
    if c.weight_decay and c.optimizer not in decaying:
        raise ConfigError(
            f"weight_decay={c.weight_decay} with optimizer={c.optimizer}: only {', '.join(decaying)} decay weights; "
            "pass --optimizer=adamw, or return the penalty from compute_loss"
        )
    if c.decay_exclude and c.optimizer not in decaying:
        raise ConfigError(
            f"decay_exclude={c.decay_exclude} with optimizer={c.optimizer}, which decays no weights; leave it out, or "
            "pass --optimizer=adamw"
        )
    if c.muon_exclude and c.optimizer != "muon":
        raise ConfigError(f"muon_exclude={c.muon_exclude} with optimizer={c.optimizer}: pass --optimizer=muon")
    parse_patterns("decay_exclude", c.decay_exclude)
    parse_patterns("muon_exclude", c.muon_exclude)
    parse_multipliers(c.learning_rate_multipliers)
    if c.nesterov and c.optimizer != "sgd":
        raise ConfigError(f"nesterov=True with optimizer={c.optimizer}: pass --optimizer=sgd")
    if c.nesterov and c.momentum == 0.0:
        raise ConfigError("nesterov=True with momentum=0.0: Nesterov needs a momentum; pass --momentum=0.9")
    clips = [f"{n}={getattr(c, n)}" for n in ("clip_global_norm", "clip_norm", "clip_value") if getattr(c, n)]
    if len(clips) > 1:
        raise ConfigError(f"{' with '.join(clips)}: clip in one way; leave the others out")
    if c.loss_scale and c.precision != "mixed_float16":
        raise ConfigError(f"loss_scale={c.loss_scale} with precision={c.precision}: only mixed_float16 scales the loss")
    if c.ema_decay >= 1.0:
        raise ConfigError(f"ema_decay={c.ema_decay} but it must be below 1; for example ema_decay=0.999")
    if c.accumulate_steps > c.global_batch_size:
        raise ConfigError(
            f"accumulate_steps={c.accumulate_steps} with global_batch_size={c.global_batch_size}: a micro-batch needs "
            "at least 1 example; accumulate_steps splits the global batch, it does not multiply it"
        )
    if c.on_nonfinite == "rollback" and not c.run_dir:
        raise ConfigError("on_nonfinite=rollback without run_dir: there is no checkpoint to go back to; pass --run_dir")
    for beta in ("beta_1", "beta_2"):
        if (getattr(c, beta) or 0.0) >= 1.0:
            raise ConfigError(f"{beta}={getattr(c, beta)} but it must be below 1; for example {beta}=0.9")
    boundaries = parse_boundaries(c.schedule_boundaries)
    if (c.schedule == "step") != bool(boundaries):
        raise ConfigError(
            f"schedule={c.schedule} with schedule_boundaries={c.schedule_boundaries!r}: the step schedule, and only "
            "it, needs boundaries; for example --schedule=step --schedule_boundaries=3000,6000"
        )
    if (c.worker_index is None) != (not c.workers or c.cluster == "kubernetes"):
        raise ConfigError(
            f"workers={c.workers!r} with worker_index={c.worker_index}: give both, for example "
            "--workers=a:2222,b:2222 --worker_index=0; --cluster=kubernetes takes no index"
        )
    if c.cluster == "flags" and not c.workers:
        raise ConfigError("cluster=flags without workers: pass --workers=a:2222,b:2222 --worker_index=0")
    if c.workers and c.cluster not in ("auto", "flags", "kubernetes"):
        raise ConfigError(f"cluster={c.cluster} with workers={c.workers!r}: pass --cluster=flags or leave it out")
    if c.worker_port and c.cluster not in ("auto", "slurm"):
        raise ConfigError(f"worker_port={c.worker_port} with cluster={c.cluster}: pass --cluster=slurm or leave it out")
    profiled = parse_profile(c.profile)
    if profiled is not None and not c.run_dir:
        raise ConfigError(f"profile={c.profile} without run_dir: there is nowhere to write it; pass --run_dir")
    if profiled is not None and c.train_steps is not None and profiled.stop > c.train_steps + 1 > 0:
        raise ConfigError(
            f"profile={c.profile} with train_steps={c.train_steps}: the run ends before; profile earlier steps"
        )
    parse_formats(c.export_formats)
    parse_best(c.keep_best)
    parse_condition(c.stop_when)
    if c.keep_every and (not c.checkpoint_every or c.keep_every % c.checkpoint_every):
        raise ConfigError(
            f"keep_every={c.keep_every} with checkpoint_every={c.checkpoint_every}: it must be a multiple of the steps "
            "at which there is a checkpoint; for example --checkpoint_every=500 --keep_every=5000"
        )
    for name in ("init_include", "init_exclude"):
        parse_patterns(name, getattr(c, name))
        if getattr(c, name) and not c.init_from:
            raise ConfigError(f"{name}={getattr(c, name)} without init_from: nothing is loaded; pass --init_from=PATH")
