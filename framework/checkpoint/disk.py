"""What a save asks of the operating system: room, flushed files, names that change at once."""

from __future__ import annotations

import os
import shutil

from framework.errors import LockstepError


def sync(path: str) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: str) -> None:
    """Flushes the files of a folder, then the folder."""
    for name in sorted(os.listdir(folder)):
        sync(os.path.join(folder, name))
    sync(folder)


def free_bytes(folder: str) -> int | None:
    """Bytes that may still be written where ``folder`` is, or would be made; None: the system does not tell."""
    folder = os.path.abspath(folder)
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def require_room(folder: str, need: int, what: str) -> None:
    """Refuses to start writing what has no room.

    Args:
      folder: where it is to be written.
      need: bytes.
      what: it, for the message.

    Raises:
      LockstepError: fewer bytes are free.
    """
    free = free_bytes(folder)
    if free is not None and free < need:
        raise LockstepError(
            f"no room for {what}: it needs {megabytes(need)} but {megabytes(free)} are free in {folder}; nothing was "
            "written and the earlier ones are as they were. Make room, or lower --keep_checkpoints"
        )


def megabytes(size: int) -> str:
    """A size for people."""
    return f"{size / 1e6:.3g} MB" if size < 1e9 else f"{size / 1e9:.3g} GB"


def remove_tree(folder: str, trash: str) -> None:
    """Removes ``folder`` by renaming it to ``trash`` first: whoever looks sees it whole or not at all."""
    shutil.rmtree(trash, ignore_errors=True)
    os.rename(folder, trash)
    shutil.rmtree(trash)
