"""Looks at checkpoints: ``python -m framework.checkpoint ls|verify|show|diff PATH``.

PATH is a run folder, its folder of checkpoints, or one checkpoint. Ends with 0 when all is well (``diff``: equal), with
1 when something is damaged (``diff``: different), and with 2 when there is nothing to look at.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from framework.checkpoint import disk, find, manifest
from framework.checkpoint.manifest import Damaged, Manifest
from framework.errors import LockstepError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m framework.checkpoint",
        description="Looks at checkpoints. PATH: a run folder, its folder of checkpoints, or one checkpoint.",
        epilog="Ends with 0: all is well (diff: equal); 1: damaged (diff: different); 2: nothing to look at.",
    )
    commands = p.add_subparsers(dest="command", required=True)
    one = commands.add_parser("ls", help="list checkpoints: step, time, size, variables, figures; sizes are compared")
    one.add_argument("path", metavar="PATH")
    one = commands.add_parser("verify", help="read every byte of every checkpoint and compare the checksums")
    one.add_argument("path", metavar="PATH")
    one = commands.add_parser("show", help="the variables of one checkpoint (of a folder: the newest whole one)")
    one.add_argument("path", metavar="PATH")
    one = commands.add_parser("diff", help="compare two checkpoints: names, shapes, dtypes, values")
    one.add_argument("path", metavar="PATH")
    one.add_argument("other", metavar="OTHER", help="the one to compare with")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parser().parse_args(argv)
    commands: dict[str, Callable[[argparse.Namespace], int]]
    commands = {"ls": _ls, "verify": _verify, "show": _show, "diff": _diff}
    try:
        return commands[args.command](args)
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


def _checkpoints(path: str, *, content: bool) -> Iterator[tuple[str, Manifest | str]]:
    """Name and manifest, or what is wrong, of the checkpoint ``path`` or of each one in it, by rising step."""
    if os.path.exists(os.path.join(path, manifest.MANIFEST)):
        folder, names = os.path.dirname(os.path.abspath(path)), [os.path.basename(os.path.abspath(path))]
    else:
        folder = find.folder_of(path)
        names = [find.name_of(step) for step in find.steps_in(folder)]
    for name in names:
        try:
            yield name, manifest.check(os.path.join(folder, name), content=content)
        except Damaged as error:
            yield name, str(error)


def _ls(args: argparse.Namespace) -> int:
    damaged = 0
    for name, found in _checkpoints(args.path, content=False):
        if isinstance(found, str):
            damaged += 1
            print(f"{name}  damaged: {found}")
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.time))
        figures = "  ".join(f"{key} {value:.6g}" for key, value in found.figures.items())
        line = f"{name}  {when}  {disk.megabytes(found.size)}  {len(found.variables)} variables  {figures}"
        print(line.rstrip())
    return 1 if damaged else 0


def _verify(args: argparse.Namespace) -> int:
    damaged = 0
    for name, found in _checkpoints(args.path, content=True):
        damaged += isinstance(found, str)
        if isinstance(found, str):
            print(f"{name}  damaged: {found}")
        else:
            print(f"{name}  whole: {len(found.files)} files, {disk.megabytes(found.size)}")
    return 1 if damaged else 0


def _show(args: argparse.Namespace) -> int:
    folder, found, passed_over = find.one_of(args.path)
    for step, reason in passed_over.items():
        print(f"passed over {find.name_of(step)}: {reason}")
    print(f"{folder}: step {found.step}, {disk.megabytes(found.size)}, written by run {found.run or '(no id)'}")
    width = max((len(name) for name in found.variables), default=0)
    for name, variable in found.variables.items():
        print(f"{name:{width}}  {variable.dtype}  {list(variable.shape)}")
    return 0


def _diff(args: argparse.Namespace) -> int:
    (one, left, _), (other, right, _) = find.one_of(args.path), find.one_of(args.other)
    if left.checksum == right.checksum:
        print(f"{one} and {other} are the same")
        return 0
    lines = [f"only in {one}: {name}" for name in left.variables if name not in right.variables]
    lines += [f"only in {other}: {name}" for name in right.variables if name not in left.variables]
    common = [name for name in left.variables if name in right.variables]
    alike = [name for name in common if left.variables[name] == right.variables[name]]
    for name in common:
        if name not in alike:
            a, b = left.variables[name], right.variables[name]
            lines.append(f"{name}: {a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}")
    lines += _values(one, other, alike)
    for line in lines:
        print(line)
    print(f"{len(common)} common variables, {len(lines)} differences")
    return 1 if lines else 0


def _values(one: str, other: str, names: Sequence[str]) -> list[str]:
    """A line for each variable whose values differ: how many, and the largest difference."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import numpy as np

    from framework.checkpoint import restore

    left, right, lines = restore.read(one), restore.read(other), []
    for name in names:
        a, b = left[name], right[name]
        if a.tobytes() == b.tobytes():
            continue
        if a.dtype.kind in "OSU":
            lines.append(f"{name}: the texts differ")
            continue
        with np.errstate(invalid="ignore"):
            largest = np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)))
        lines.append(f"{name}: {np.count_nonzero(a != b)} of {a.size} values differ, by at most {largest:.6g}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
