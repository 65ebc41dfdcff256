"""Several workers on this machine: ``python -m framework.launch --workers=4 -- train.py --task=digits``.

Each worker is a process with ``TF_CONFIG`` set. One that fails ends all; with ``--max_restarts`` all are then started
again, and go on from the newest checkpoint. Nothing here loads TensorFlow.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from framework.checkpoint import find
from framework.checkpoint.manifest import Damaged
from framework.cluster.roll_call import taken_mark
from framework.cluster.tf_config import to_tf_config
from framework.errors import ConfigError, LockstepError
from framework.launcher.gang import Gang, Outcome, Signals
from framework.launcher.keeper import Keeper
from framework.launcher.ports import HeldPorts
from framework.launcher.supervisor import supervise

_SAMPLE = "python -m framework.launch --workers=2 -- train.py --task=digits"


def _number(kind: Callable[[str], Any], low: float) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        value = kind(text)
        if not (math.isfinite(value) and value >= low):
            raise ValueError
        return value

    convert.__name__ = f"{'whole ' if kind is int else ''}number from {low:g} on:"
    return convert


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m framework.launch",
        usage="%(prog)s --workers=N [--max_restarts=K] [--log_dir=DIR] -- train.py ...",
        description="Starts N workers on this machine, ends all when one fails, and starts them again if asked to.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workers", type=_number(int, 1), required=True, help="number of worker processes")
    add("--max_restarts", type=_number(int, 0), default=0, help="restarts after a failure; default 0")
    add("--log_dir", default="", help="folder for worker-0.log, worker-1.log, ...; a restart appends")
    add("--grace", type=_number(float, 0), default=10.0, help="seconds from SIGTERM to SIGKILL; default 10")
    add("--backoff", type=_number(float, 0), default=1.0, help="seconds before the first restart; default 1")
    add("--run_dir", default="", help="where checkpoints show progress; default: what the command's own flags say")
    add(
        "--gpus_per_worker",
        type=_number(int, 0),
        default=0,
        help="gives each worker its own so many GPUs, through CUDA_VISIBLE_DEVICES; default 0: as it is",
    )
    return parser


def environment(base: Mapping[str, str], addresses: list[str], index: int, gpus_per_worker: int = 0) -> dict[str, str]:
    """The environment of one worker.

    Args:
      base: that of the launcher.
      addresses: of all workers.
      index: of this one.
      gpus_per_worker: 0: all see the same GPUs.

    Raises:
      ConfigError: ``CUDA_VISIBLE_DEVICES`` is set and has too few.
    """
    env = {**base, "TF_CONFIG": to_tf_config(addresses, index)}
    env.setdefault("PYTHONUNBUFFERED", "1")  # a line is shown when it is written
    if gpus_per_worker:
        first, end = index * gpus_per_worker, (index + 1) * gpus_per_worker
        visible = base.get("CUDA_VISIBLE_DEVICES")
        names = (
            [str(i) for i in range(end)] if visible is None else [v.strip() for v in visible.split(",") if v.strip()]
        )
        if len(names) < end:
            raise ConfigError(
                f"gpus_per_worker={gpus_per_worker} for {len(addresses)} workers but CUDA_VISIBLE_DEVICES={visible} "
                f"has {len(names)}; for example --gpus_per_worker={len(names) // len(addresses)}, or fewer workers"
            )
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names[first:end])
    return env


def run_dir_of(arguments: Sequence[str]) -> str:
    """The run folder that the flags of a training command name; empty: it cannot be told from them.

    Args:
      arguments: ``--run_dir=DIR``, or ``--task=T`` for ``runs/T``; those in flag files count in their place.
    """
    found: dict[str, str] = {}
    words = list(arguments)
    for _ in range(10_000):  # files that name each other have no end
        if not words:
            break
        word = words.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or name not in ("run_dir", "task", "flagfile"):
            continue
        if not equals:
            value = words.pop(0) if words else ""
        if name == "flagfile":
            with contextlib.suppress(OSError, ValueError), open(value, encoding="utf-8") as file:
                lines = [line.strip() for line in file]
                words = [line for line in lines if line.startswith("-")] + words
        else:
            found[name] = value
    return found.get("run_dir") or (f"runs/{found['task']}" if found.get("task") else "")


def newest_step(run_dir: str) -> int | None:
    """Step of the newest checkpoint of a run whose files have their sizes; -1: none; None: no ``run_dir``."""
    if not run_dir:
        return None
    folder = os.path.join(run_dir, find.CHECKPOINTS)
    for step in reversed(find.steps_in(folder)):
        try:
            find.check(folder, step, content=False)
        except Damaged:
            continue
        return step
    return -1


def program(command: Sequence[str]) -> list[str]:
    """A command with Python before it where it starts with a script or with ``-m``."""
    script = command[0].endswith(".py") or command[0].startswith("-")
    return [sys.executable, *command] if script else list(command)


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"launch: {line}", file=sys.stderr, flush=True)


def _open_logs(stack: contextlib.ExitStack, folder: str, count: int) -> list[BinaryIO]:
    if not folder:
        return []
    try:
        os.makedirs(folder, exist_ok=True)
        return [stack.enter_context(open(os.path.join(folder, f"worker-{i}.log"), "ab")) for i in range(count)]
    except OSError as error:
        raise ConfigError(f"log_dir={folder} may not be written ({error.strerror}); pass another --log_dir") from error


def _launch(options: argparse.Namespace, command: Sequence[str]) -> int:
    run_dir = options.run_dir or run_dir_of(command)
    with contextlib.ExitStack() as stack:
        keeper = Keeper()  # first: it forks, and should hold nothing that comes later
        stack.callback(keeper.close)
        signals = stack.enter_context(Signals())
        logs = _open_logs(stack, options.log_dir, options.workers)
        number = 0

        def attempt() -> Outcome:
            nonlocal number
            number += 1
            ports = HeldPorts(options.workers)
            try:
                commands = [
                    (program(command), environment(os.environ, ports.addresses, i, options.gpus_per_worker))
                    for i in range(options.workers)
                ]
            finally:
                ports.close()  # the workers start now and need them
            for log in logs:
                log.write(f"--- start {number}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            return Gang(
                commands=commands,
                keeper=keeper,
                signals=signals,
                logs=logs,
                grace=options.grace,
                marks=[taken_mark(address) for address in ports.addresses],
            ).run()

        def pause(seconds: float) -> None:
            end = time.monotonic() + seconds
            while not signals.got and (left := end - time.monotonic()) > 0:
                time.sleep(min(left, 0.1))

        if options.max_restarts and not run_dir:
            _say("no run_dir is known, so progress is not looked at between restarts; pass --run_dir=DIR before the --")
        return supervise(
            attempt,
            max_restarts=options.max_restarts,
            newest_step=lambda: newest_step(run_dir),
            backoff=options.backoff,
            pause=pause,
            stopped=lambda: bool(signals.got),
            say=_say,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the workers that the arguments ask for, and returns the exit code: see ``supervise``; 2: refused."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    own, command = arguments, []
    if "--" in arguments:
        place = arguments.index("--")
        own, command = arguments[:place], arguments[place + 1 :]
    options = _parser().parse_args(own)
    try:
        if not command:
            raise ConfigError(f"no command follows the --; for example {_SAMPLE}")
        return _launch(options, command)
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
