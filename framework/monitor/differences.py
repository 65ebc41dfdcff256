"""Where the replicas' copies of variables differ, found on the host after a fingerprint said that they do."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

_BLOCK = 4096  # numbers; blocks that differ are told by their digests, a few of them cross the replicas
_BLOCKS = 4  # of a variable that are looked at
_ELEMENTS = 16  # of a variable that are listed
DETAILED = 8  # variables that are looked at

# One int64 array of each local replica -> ``[replicas, ...]``.
Gather = Callable[[Sequence[np.ndarray]], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """One variable whose copies differ.

    Attributes:
      name: the variable's.
      dtype: the variable's, by name.
      shape: the variable's.
      size: its elements.
      odd: replicas that differ from what more than half of the replicas hold; empty if there is no such majority.
      elements: the first differing elements: ``index`` (list), ``values`` (a text for each replica) and ``bits``
        (hexadecimal, likewise).
      count: elements found to differ.
      all_counted: whether the whole variable was looked at; if not there may be more.
    """

    name: str
    dtype: str
    shape: list[int]
    size: int
    odd: list[int]
    elements: list[dict[str, Any]]
    count: int
    all_counted: bool

    def describe(self, who: Callable[[int], str]) -> str:
        """One sentence: the first differing element and its value on each replica, which ``who`` names."""
        at_least = "" if self.all_counted else "at least "
        first = self.elements[0]
        place = f" at {first['index']}" if self.shape else ""
        values, codes = first["values"], first["bits"]
        if len(set(values)) < len(set(codes)):  # NaNs that differ, or what prints alike
            values = [f"{value} (0x{code})" for value, code in zip(values, codes, strict=True)]
        each = ", ".join(f"{who(replica)}: {value}" for replica, value in enumerate(values))
        counted = f"; {at_least}{self.count} of {self.size} elements differ" if self.size > 1 else ""
        return f"{self.name} ({self.dtype} {self.shape}){place}: {each}{counted}"


def find(copies: Sequence[Mapping[str, np.ndarray]], gather: Gather) -> tuple[list[str], list[Difference]]:
    """Names of all variables whose copies differ, and details of the first ``DETAILED`` of them.

    All workers have to call it with the same variables in the same order; they get the same answer.

    Args:
      copies: name -> value on each local replica.
      gather: brings the arrays of all replicas together.
    """
    names = list(copies[0])
    table = gather([np.array([_digest(one[name].tobytes()) for name in names], np.int64) for one in copies])
    differing = [name for i, name in enumerate(names) if (table[:, i] != table[0, i]).any()]
    columns = {name: table[:, names.index(name)] for name in differing}
    return differing, [
        _look([one[name] for one in copies], name, columns[name], gather) for name in differing[:DETAILED]
    ]


def majority(values: Sequence[int]) -> list[int]:
    """Places whose value is not the one that more than half have; empty if there is none, or all are equal."""
    value, count = collections.Counter(int(v) for v in values).most_common(1)[0]
    return [i for i, v in enumerate(values) if v != value] if 2 * count > len(values) else []


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _look(values: Sequence[np.ndarray], name: str, digests: np.ndarray, gather: Gather) -> Difference:
    """Details of one variable, from this worker's copies and what the others send."""
    numbers = [_numbers(value) for value in values]
    count = -(-len(numbers[0]) // _BLOCK)
    table = gather(
        [np.array([_digest(n[i * _BLOCK : (i + 1) * _BLOCK].tobytes()) for i in range(count)]) for n in numbers]
    )
    blocks = np.flatnonzero((table != table[0]).any(0))
    looked = blocks[:_BLOCKS]
    padded = [np.pad(n, (0, count * _BLOCK - len(n))).reshape(count, _BLOCK)[looked] for n in numbers]
    pieces = gather(padded)  # [replicas, blocks, _BLOCK]
    found = np.argwhere((pieces != pieces[0]).any(0))
    per_element = len(numbers[0]) // max(values[0].size, 1)
    places = [(int(looked[block]) * _BLOCK + int(column), block, column) for block, column in found]
    elements = []
    for flat, block, column in places[:_ELEMENTS]:
        own = pieces[:, block, column]
        texts = [_text(value, values[0].dtype) for value in own]
        size = values[0].dtype.itemsize // per_element
        codes = [f"{int(value) % 2 ** (8 * size):0{2 * size}x}" for value in own]
        index = [int(i) for i in np.unravel_index(flat // per_element, values[0].shape)]
        elements.append({"index": index, "values": texts, "bits": codes})
    return Difference(
        name=name,
        dtype=values[0].dtype.name,
        shape=list(values[0].shape),
        size=int(values[0].size),
        odd=majority(list(digests)),
        elements=elements,
        count=len({flat // per_element for flat, _, _ in places}),
        all_counted=len(looked) == len(blocks),
    )


def _numbers(value: np.ndarray) -> np.ndarray:
    """The bits as int64 ``[numbers]``, one for each element, or two for a complex one."""
    flat = np.ascontiguousarray(value).reshape(-1)
    if flat.dtype == np.bool_:
        return flat.astype(np.int64)
    if np.iscomplexobj(flat):
        flat = flat.view(flat.real.dtype)
    return flat.view(f"i{flat.dtype.itemsize}").astype(np.int64)


def _text(number: int, dtype: np.dtype[Any]) -> str:
    """A number of ``_numbers`` as the value it stands for, to as many digits as tell it from its neighbours."""
    if dtype == np.bool_:
        return str(bool(number))
    if np.issubdtype(dtype, np.complexfloating):
        dtype = np.empty(0, dtype).real.dtype
    return str(np.array([number]).astype(f"i{dtype.itemsize}").view(dtype)[0])
