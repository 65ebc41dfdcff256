"""Workers placed by Ray Train: ``python examples/cluster/ray_train.py --workers=2 -- --task=digits --run_dir=/shared/run``.

Ray (``pip install "ray[train]"``) places the processes, sets ``TF_CONFIG`` in each and starts all again after a failure;
they then go on from the newest checkpoint in ``--run_dir``, which all machines have to share. Each process runs what
``train.py`` runs; its exit code becomes a failure that Ray sees.
"""

from __future__ import annotations

import argparse
import sys

import train


def work(config: dict[str, list[str]]) -> None:
    """One worker; Ray calls it with TF_CONFIG set."""
    code = train.main(["train.py", *config["flags"]])
    if code:
        raise SystemExit(f"train.py ended with code {code}")


def main(argv: list[str]) -> None:
    """Runs the workers to their end; raises what Ray raises."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    parser.add_argument("--max_restarts", type=int, default=0)
    args = parser.parse_args(argv[:split])
    TensorflowTrainer(
        work,
        train_loop_config={"flags": argv[split + 1 :]},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=args.max_restarts)),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1:])
