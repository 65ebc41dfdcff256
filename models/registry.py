"""Tasks by name, for the command line."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from framework.errors import ConfigError

if TYPE_CHECKING:
    from framework import Trainer

# Tasks of the package: name -> (module, class). They are imported when they are asked for.
_BUILT_IN = {
    "cifar10": ("models.cifar_task", "Cifar10"),
    "dcgan": ("models.dcgan_task", "Dcgan"),
    "digits": ("models.digits_task", "Digits"),
    "imagenet": ("models.imagenet_task", "ImageNet"),
    "language": ("models.language_task", "Language"),
    "masked_language": ("models.masked_language_task", "MaskedLanguage"),
    "ranking": ("models.ranking_task", "Ranking"),
    "simclr": ("models.simclr_task", "SimClr"),
    "synthetic": ("models.synthetic_task", "Synthetic"),
    "vit": ("models.vit_task", "Vit"),
}
_registered: dict[str, type[Trainer]] = {}


def register(name: str) -> Any:
    """Class decorator: makes a ``Trainer`` subclass a task that ``--task=NAME`` finds.

    Raises:
      ConfigError: the name is taken; the message names both places.
    """

    def add(task: type[Trainer]) -> type[Trainer]:
        where = f"{task.__module__}.{task.__qualname__}"
        if name in _BUILT_IN and _BUILT_IN[name] != (task.__module__, task.__qualname__):
            raise ConfigError(f"task {name!r} is registered by {where} and by {'.'.join(_BUILT_IN[name])}; rename one")
        other = _registered.get(name)
        # The same place again is a script or a notebook cell that was run again.
        if other is not None and (other.__module__, other.__qualname__) != (task.__module__, task.__qualname__):
            raise ConfigError(
                f"task {name!r} is registered by {where} and by {other.__module__}.{other.__qualname__}; rename one"
            )
        _registered[name] = task
        return task

    return add


class Tasks(Mapping[str, Any]):
    """All tasks by name; a task's module is imported at its first look-up."""

    def __getitem__(self, name: str) -> type[Trainer]:
        if name not in _registered:
            module, attribute = _BUILT_IN[name]
            return getattr(importlib.import_module(module), attribute)
        return _registered[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*_BUILT_IN, *_registered}))

    def __len__(self) -> int:
        return len({*_BUILT_IN, *_registered})
