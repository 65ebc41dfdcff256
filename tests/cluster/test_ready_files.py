"""The ready files for Slurm and Kubernetes: their syntax, and that they fit the code and each other."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import stat
import subprocess
import sys
import types
from typing import Any

import pytest

from framework import RunConfig, flags
from framework.cluster.cluster import resolve
from models.registry import Tasks
from tests.conftest import ROOT

SBATCH = ROOT / "examples" / "cluster" / "slurm.sbatch"
JOBSET = ROOT / "examples" / "cluster" / "jobset.yaml"


def config_of(words: list[str]) -> RunConfig:
    return flags.parse(["train.py", *words], tasks=Tasks()).config


def program(folder: pathlib.Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_bash_understands_the_batch_script() -> None:
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)


@pytest.mark.parametrize(
    ("codes", "count", "code", "requeued"),
    [
        ("0 0", 0, 0, False),
        ("4 137", 0, 4, True),
        ("5 5", 3, 5, True),
        ("5 5", 20, 5, False),
        ("2 143", 0, 2, False),
        ("3 3", 0, 3, False),
        ("1 143", 0, 1, False),
    ],
)
def test_codes_4_and_5_go_back_into_the_queue(
    codes: str, count: int, code: int, requeued: bool, tmp_path: pathlib.Path
) -> None:
    """Stand-ins: srun runs one task after the other, as many as there are codes, and returns the highest code."""
    program(
        tmp_path,
        "srun",
        f'shift; worst=0; for c in {codes}; do CODE=$c "$@"; r=$?; ((r > worst)) && worst=$r; done; exit $worst',
    )
    program(tmp_path, "python", 'echo "$@" >> calls; exit "$CODE"')
    program(tmp_path, "scontrol", 'echo "$@" >> requeues')
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(count)}
    done = subprocess.run(["bash", str(SBATCH)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=20)
    assert done.returncode == code, done.stderr
    requeues = tmp_path / "requeues"
    assert (requeues.read_text() if requeues.exists() else "") == ("requeue 17\n" if requeued else "")
    assert not list(tmp_path.glob("*.code"))
    first, *_ = (tmp_path / "calls").read_text().splitlines()
    config = config_of(first.split()[1:])
    assert (config.cluster, config.run_dir) == ("slurm", str(tmp_path / "runs" / "digits"))


def field(text: str, key: str) -> str:
    """The value of a key that stands once in the file."""
    (value,) = re.findall(rf"^ *(?:- )?{key}: *(\S.*)$", text, re.MULTILINE)
    return value


def test_the_jobset_fits_the_exit_codes_and_its_own_workers() -> None:
    text = JOBSET.read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert "\t" not in text
    for line in lines:  # what YAML allows here: keys, items of lists, two spaces a level
        assert re.fullmatch(r"(  )*(- )?(([\w./-]+:( \S.*)?)|(--\S+)|\w+)", line), line
        assert (len(line) - len(line.lstrip())) % 2 == 0
    assert (field(text, "apiVersion"), field(text, "kind")) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert (field(text, "completionMode"), field(text, "backoffLimit")) == ("Indexed", "0")
    # Codes that must not be tried again fail the Job by its pod failure policy, which fails the JobSet; all others,
    # 4 and 5 among them, fail the Job by its limit of 0, and JobSet starts all workers again.
    assert (field(text, "restartPolicy"), field(text, "operator"), field(text, "values")) == (
        "Never",
        "In",
        "[2, 3, 6]",
    )
    assert re.findall(r"- action: (\w+)", text) == ["FailJobSet", "FailJob"]
    assert "- PodFailurePolicy" in text
    assert field(text, "containerName") in re.findall(r"- name: (\w+)", text)
    config = config_of(re.findall(r"^ *- (--\S+)$", text, re.MULTILINE))
    workers = int(field(text, "completions"))
    assert int(field(text, "parallelism")) == workers
    cluster = resolve(config, {"JOB_COMPLETION_INDEX": str(workers - 1)})
    assert (cluster.num_workers, cluster.index) == (workers, workers - 1)
    # Pod I of the only Job of the replicated job "workers" of the JobSet "digits", in the JobSet's own service.
    assert cluster.workers[1] == f"digits-workers-0-1.digits:{field(text, 'containerPort')}"
    assert re.search(r"metadata:\n  name: digits\n", text) and re.search(
        r"replicatedJobs:\n    - name: workers\n", text
    )


# --- Ray Train -------------------------------------------------------------------------------------------------------


def test_ray_train_gives_each_worker_the_flags_and_hears_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for Ray: its trainer calls the function that it is given, and keeps how it was asked."""
    asked: dict[str, Any] = {}

    class Trainer:
        def __init__(self, work: Any, **settings: Any):
            self.work = work
            asked.update(settings)

        def fit(self) -> None:
            self.work(asked["train_loop_config"])

    def keep(**settings: Any) -> dict[str, Any]:
        return settings

    ray = types.ModuleType("ray.train")
    ray.FailureConfig = ray.RunConfig = ray.ScalingConfig = keep  # type: ignore[attr-defined]
    tensorflow = types.ModuleType("ray.train.tensorflow")
    tensorflow.TensorflowTrainer = Trainer  # type: ignore[attr-defined]
    for name, module in {"ray": types.ModuleType("ray"), "ray.train": ray, "ray.train.tensorflow": tensorflow}.items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("ray_train", ROOT / "examples" / "cluster" / "ray_train.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    codes = iter([0, 5])
    flags: list[list[str]] = []
    monkeypatch.setattr(example.train, "main", lambda argv: flags.append(argv) or next(codes))
    argv = ["--workers=3", "--max_restarts=2", "--", "--task=digits", "--seed=4"]
    example.main(argv)
    assert flags == [["train.py", "--task=digits", "--seed=4"]]
    assert asked["scaling_config"] == {"num_workers": 3, "use_gpu": False}
    assert asked["run_config"] == {"failure_config": {"max_failures": 2}}
    with pytest.raises(SystemExit, match="code 5"):
        example.main(argv)
