"""The folder of a run: may it be one, is it free, is it still there."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import time
from collections.abc import Iterator
from typing import Any

from framework.checkpoint import find
from framework.errors import ConfigError, LockstepError

LOCK = ".lock"
# What a run writes besides checkpoints.
_FILES = (
    "config.json",
    "flags.txt",
    "metrics.jsonl",
    "summary.json",
    "tensorboard",
    "export",
    "replica_check",
    "attempts.jsonl",
)


class RunFolder:
    """A run's folder, for the one process of the run that writes to it.

    Args:
      path: the folder; it may not be there yet.

    Raises:
      ConfigError: it, or a folder it would be in, is a file; or it may not be written. Nothing is made.
    """

    def __init__(self, path: str):
        self.path = path
        self._open: int | None = None  # descriptor of the folder while it is claimed
        _check_place(path)

    @contextlib.contextmanager
    def claim(self, *, required: bool = True) -> Iterator[bool]:
        """Makes the folder and keeps other runs out of it inside the block; the system frees it if the process dies.

        Folders that were made and are empty at the end are removed again. Where the file system has no locks, a warning
        is printed and the run goes on without one.

        Args:
          required: False: where another run has the folder, or it may not be written, give False and go on.

        Raises:
          ConfigError: another run is going on in it, or it may not be written.
        """
        if self._open is not None:  # a call inside a call: an evaluation from a hook
            yield True
            return
        made: list[str] = []
        lock: int | None = None
        try:
            try:
                made = _make(self.path)
                lock = self._lock()
            except OSError as error:
                if required:
                    raise ConfigError(
                        f"run_dir={self.path} may not be written ({error.strerror}); pass another --run_dir"
                    ) from error
            except ConfigError:
                if required:
                    raise
            if lock is None:
                yield False
                return
            self._open = os.open(self.path, os.O_RDONLY)
            yield True
        finally:
            if self._open is not None:
                if not self._is_there():
                    made = []  # what is at its place now is another's
                os.close(self._open)
                self._open = None
            if lock is not None:
                _unlock(lock, os.path.join(self.path, LOCK))
            for folder in reversed(made):
                with contextlib.suppress(OSError):  # it is not empty: then it is a run's
                    os.rmdir(folder)

    def check_there(self) -> None:
        """Raises LockstepError if the folder that was claimed is not at its place any more; nothing is written then."""
        if self._open is None or self._is_there():
            return
        raise LockstepError(
            f"run_dir={self.path} is gone: it was deleted, moved or replaced while the run wrote to it; nothing more "
            "is written. Start again with another --run_dir"
        )

    def _is_there(self) -> bool:
        assert self._open is not None
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._open))
        except OSError:
            return False

    def settings(self) -> dict[str, Any]:
        """The ``config.json`` of the run in this folder; empty: there is none.

        Raises:
          ConfigError: there is something else in its place, or in that of the checkpoints.
        """
        checkpoints = os.path.join(self.path, find.CHECKPOINTS)
        strangers = [n for n in _names(checkpoints) if not n.startswith((".", "step-"))]
        if strangers and not find.steps_in(checkpoints):
            raise ConfigError(
                f"run_dir={self.path} has checkpoints that are not of this framework ({', '.join(strangers[:3])}); "
                "pass another --run_dir"
            )
        path = os.path.join(self.path, "config.json")
        try:
            with open(path, encoding="utf-8") as file:
                value = json.load(file)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            value = None
        if not isinstance(value, dict) or not isinstance(value.get("config"), dict):
            raise ConfigError(f"run_dir={self.path}: config.json is not one of a run; move it away, or pass another")
        return value

    def contents(self) -> list[str]:
        """Names of a run's files and folders that are here; empty: no run was started here."""
        there = [name for name in _FILES if os.path.exists(os.path.join(self.path, name))]
        return there + [find.CHECKPOINTS] * bool(_names(os.path.join(self.path, find.CHECKPOINTS)))

    def _lock(self) -> int:
        """A descriptor of the lock file that holds the lock; OSError: it cannot be made."""
        path = os.path.join(self.path, LOCK)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if not _flock(descriptor):
                    raise ConfigError(
                        f"run_dir={self.path} is in use by another run{_owner(descriptor)}; wait for it, stop it, or "
                        "pass another --run_dir"
                    )
                # The run before may have removed the file between opening and locking it.
                if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(descriptor)):
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        owner = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        return descriptor


def _flock(descriptor: int) -> bool:
    """Takes the lock; False: another has it. Where there are no locks: a warning, and True."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (OSError, ImportError) as error:
        if getattr(error, "errno", None) == errno.EACCES:  # what some network file systems say for "held"
            return False
        print(
            f"warning: the file system of run_dir has no locks ({error}): nothing keeps a second run out of it",
            flush=True,
        )
    return True


def _unlock(descriptor: int, path: str) -> None:
    """Removes the lock file, then frees the lock: in this order nobody removes the file of another."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            os.unlink(path)
    os.close(descriptor)


def _owner(descriptor: int) -> str:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f" (process {owner['pid']} on {owner['host']}, since {owner['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _make(path: str) -> list[str]:
    """Makes a folder with those it is in; returns the ones that were not there, from the outermost."""
    missing, there = [], os.path.abspath(path)
    while not os.path.lexists(there):
        missing.append(there)
        there = os.path.dirname(there)
    os.makedirs(path, exist_ok=True)
    return missing[::-1]


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _check_place(path: str) -> None:
    if "://" in path:
        raise ConfigError(
            f"run_dir={path} but it must be a folder of this machine or of a mounted file system: a run needs locks, "
            "and renames, which object stores do not have; mount the store, or copy the folder there afterwards"
        )
    there = os.path.abspath(path)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise ConfigError(f"run_dir={path} but {there} is not a folder; pass another --run_dir")
    if not os.access(there, os.W_OK | os.X_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        reason = "Read-only file system" if read_only else "Permission denied"
        raise ConfigError(f"run_dir={path} but {there} may not be written ({reason}); pass another --run_dir")
