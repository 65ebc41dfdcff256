"""Trains a task from flags: ``python train.py --task=digits --num_replicas=4``; ``--help`` lists every flag."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported: its greeting hides ours

from framework import flags
from framework.errors import ConfigError
from framework.parse import parse_formats
from models.registry import Tasks


def train(command: flags.Command) -> int:
    """Runs one parsed command and returns the exit code."""
    from framework.cluster import devices

    config = command.config
    trainer = command.task_class(config, **command.options)
    trainer.task_name = command.task
    trainer.count_from_process_start()
    chatty = config.progress != "off" and trainer.cluster.is_chief
    if chatty:
        print(devices.discover().table(), flush=True)
    if command.mode == "eval":
        if config.run_dir and trainer.latest_checkpoint is None and not config.init_from:
            raise ConfigError(f"mode=eval but run_dir={config.run_dir} has no checkpoint; train first, or pass another")
        results = {f"eval/{name}": value for name, value in trainer.evaluate().items()}
    elif command.mode == "continuous_eval":
        results = {f"eval/{name}": value for name, value in trainer.evaluate_continuously().items()}
    elif command.mode == "export":
        print(f"exported to {trainer.export(config.export_dir, parse_formats(config.export_formats))}", flush=True)
        return 0
    else:
        trainer.run_files["flags.txt"] = flags.flagfile_text(command)
        results = trainer.train(evaluate=command.mode == "train_and_eval")
    if chatty and results:
        print("  ".join(f"{name} {value:.4g}" for name, value in results.items()))
        if config.run_dir:
            print(
                f"run folder: {config.run_dir}; curves: tensorboard --logdir {config.run_dir}/tensorboard; "
                f"figures: {config.run_dir}/metrics.jsonl"
            )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``lockstep-train``."""
    return flags.run(train, argv, tasks=Tasks())


if __name__ == "__main__":
    sys.exit(main())
