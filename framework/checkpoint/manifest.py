"""The manifest of a checkpoint: size and checksum of each file, shape and dtype of each variable.

Nothing here needs TensorFlow, so a checkpoint can be looked at and checked where there is none.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import xxhash

from framework.errors import LockstepError

MANIFEST = "manifest.json"
FORMAT = 1
# XXH3-128: it is bound by memory, not by the processor, and its binding lets go of Python's lock
# meanwhile, so a checksum in the background does not stop the training loop. It finds accidents, not forgeries.
_ALGORITHM = "xxh3_128"
_BLOCK = 4 << 20  # bytes read at once: small enough to stay in the processor's cache between reading and hashing
# The manifest checks itself: its last entry is the checksum of every byte before.
_SEAL = b',\n "checksum": "'
_END = b'"\n}\n'


class Damaged(LockstepError):
    """A checkpoint is not whole; the message names the file and what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class File:
    """One file of a checkpoint: its size in bytes and its XXH3-128 checksum, 32 hexadecimal digits."""

    size: int
    checksum: str


@dataclasses.dataclass(frozen=True)
class Variable:
    """One tensor of a checkpoint: its shape and the name of its dtype, such as ``float32``."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
      step: steps done.
      run: id of the run that wrote it; empty for a store that was given none.
      time: Unix seconds at which it was written.
      figures: finite evaluation figures of this step.
      files: by name.
      variables: by name.
      checksum: of the manifest's own bytes; two checkpoints with the same one are the same.
    """

    step: int
    run: str
    time: float
    figures: Mapping[str, float]
    files: Mapping[str, File]
    variables: Mapping[str, Variable]
    checksum: str

    @property
    def size(self) -> int:
        """Bytes of all files together, without the manifest."""
        return sum(file.size for file in self.files.values())


def checksum(path: str) -> File:
    """Size in bytes and checksum of a file, which is read once, in blocks.

    Raises:
      OSError: it cannot be read.
    """
    digest, size, block = xxhash.xxh3_128(), 0, memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
    return File(size, digest.hexdigest())


def write(folder: str, *, step: int, run: str, figures: Mapping[str, float], variables: Mapping[str, Variable]) -> None:
    """Writes the manifest of the files that are in ``folder`` now; figures that are not finite are left out."""
    files = {name: checksum(os.path.join(folder, name)) for name in sorted(os.listdir(folder))}
    value = {
        "format": FORMAT,
        "step": step,
        "run": run,
        "time": round(time.time(), 3),
        "figures": {k: float(v) for k, v in figures.items() if math.isfinite(v)},
        "files": {name: {"size": file.size, _ALGORITHM: file.checksum} for name, file in files.items()},
        "variables": {n: {"shape": list(v.shape), "dtype": v.dtype} for n, v in sorted(variables.items())},
    }
    body = json.dumps(value, indent=1, allow_nan=False).removesuffix("\n}").encode()
    with open(os.path.join(folder, MANIFEST), "wb") as file:
        file.write(body + _SEAL + _seal(body) + _END)


def read(folder: str) -> Manifest:
    """The manifest of the checkpoint ``folder``, whose own bytes are checked; its files are not looked at.

    Raises:
      Damaged: it is missing, is not what was written, or is of another format.
    """
    try:
        with open(os.path.join(folder, MANIFEST), "rb") as file:
            data = file.read()
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read ({error.strerror})") from error
    body, seal, end = data[:-_TAIL], data[-_TAIL : -len(_END)], data[-len(_END) :]
    if len(data) < _TAIL or seal != _SEAL + _seal(body) or end != _END:
        raise Damaged(f"{MANIFEST} is not what was written")
    return _parsed(json.loads(data))


def check(folder: str, *, content: bool = True) -> Manifest:
    """Checks that a checkpoint is whole and returns its manifest.

    Args:
      folder: ``step-NNNNNNNN``.
      content: read every byte and compare checksums; False: compare the sizes only.

    Raises:
      Damaged: it is not; the message has the first thing that is wrong.
    """
    manifest = read(folder)
    for name, right in manifest.files.items():
        path = os.path.join(folder, name)
        try:
            found = checksum(path) if content else File(os.stat(path).st_size, right.checksum)
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error.strerror})") from error
        if found.size != right.size:
            raise Damaged(f"{name} has {found.size} bytes but {right.size} were written")
        if found != right:
            raise Damaged(f"{name} is not what was written: checksum {found.checksum}, not {right.checksum}")
    return manifest


_TAIL = len(_SEAL) + 32 + len(_END)


def _seal(body: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(body).encode()


def _parsed(value: Any) -> Manifest:
    if value.get("format") != FORMAT:
        raise Damaged(f"{MANIFEST} has format {value.get('format')} but this version knows {FORMAT} only")
    return Manifest(
        step=value["step"],
        run=value["run"],
        time=value["time"],
        figures=value["figures"],
        files={name: File(file["size"], file[_ALGORITHM]) for name, file in value["files"].items()},
        variables={n: Variable(tuple(v["shape"]), v["dtype"]) for n, v in value["variables"].items()},
        checksum=value["checksum"],
    )
