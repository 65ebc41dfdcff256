"""Small file systems for tests: full ones and read-only ones are real where mounting is allowed."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def mounted(folder: pathlib.Path, *, size: str = "1m", read_only: bool = False) -> Iterator[pathlib.Path]:
    """Mounts a tmpfs on ``folder``, which is made; the test is skipped where that is not allowed."""
    folder.mkdir(parents=True)
    options = f"size={size}" + (",ro" if read_only else "")
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)
