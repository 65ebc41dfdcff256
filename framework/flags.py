"""The command line: flags made from the fields of ``RunConfig``, parsed into a ``Command``.

Each parse uses a ``FlagValues`` of its own, never absl's global ``FLAGS``: two scripts imported into one process, or a
``main`` called twice, define nothing twice and see only their own arguments.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from absl import flags as absl_flags

from framework.config import RunConfig
from framework.errors import ConfigError, LockstepError

MODES = ("train", "train_and_eval", "eval", "continuous_eval", "export")

_INTERRUPTED = 130  # 128 + SIGINT, what a shell reports for Ctrl-C
_LONGEST_LINE = 2000  # a message of TensorFlow can be pages long
_FORM = "write --NAME=VALUE, or --NAME and --noNAME for a switch"
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class HelpRequested(Exception):
    """``--help`` was given and the help has been printed; a program ends with 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """What a command line asks for. ``options`` are the task's own; ``given`` names the flags not left to defaults."""

    task: str
    task_class: type
    mode: str
    config: RunConfig
    options: dict[str, Any]
    debug: bool
    print_config: bool
    given: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Spec:
    """One flag."""

    name: str
    kind: type
    group: str
    help: str
    default: Any = None
    choices: tuple[str, ...] | None = None
    low: float | None = None
    high: float | None = None

    def convert(self, value: Any) -> Any:
        """The flag's value from its text, or a typed default; ValueError says the rule and an example."""
        try:
            if isinstance(value, str) and self.kind is not str:
                value = absl_flags.BooleanParser().parse(value) if self.kind is bool else self.kind(value)
            elif self.kind is float and type(value) is int:
                value = float(value)
            legal = type(value) is self.kind
        except (ValueError, OverflowError):
            legal = False
        if legal and self.kind is float:
            legal = math.isfinite(value)
        if legal and self.kind is int:
            legal = -(2**63) <= value < 2**63  # what an int64 of the graph holds
        if legal and self.choices:
            legal = value in self.choices
        if legal and self.low is not None:
            legal = value >= self.low
        if legal and self.high is not None:
            legal = value <= self.high
        if not legal:
            raise ValueError(f"it must be {self._rule()}; for example {self.assignment(self._example())}")
        return value

    def assignment(self, value: Any) -> str:
        """``--name=value`` in the form that parses back to ``value``."""
        if self.kind is bool:
            return f"--{self.name}" if value else f"--no{self.name}"
        return f"--{self.name}={value!r}" if self.kind is float else f"--{self.name}={value}"

    def usage(self) -> str:
        if self.kind is bool:
            return f"--[no]{self.name}"
        return f"--{self.name}={'|'.join(self.choices) if self.choices else self.kind.__name__.upper()}"

    def _rule(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        bounds = [f"at least {self.low}"] * (self.low is not None) + [f"at most {self.high}"] * (self.high is not None)
        kind = "a finite number" if self.kind is float else _KINDS[self.kind]
        return f"{kind}, {' and '.join(bounds)}" if bounds else kind

    def _example(self) -> Any:
        if self.default not in (None, ""):
            return self.default
        return self.choices[0] if self.choices else {int: 100, float: 0.1, bool: True, str: "text"}[self.kind]


class _Parser(absl_flags.ArgumentParser[Any]):
    def __init__(self, spec: _Spec) -> None:
        self._spec = spec

    def parse(self, argument: Any) -> Any:
        return self._spec.convert(argument)


def _field_specs(cls: type, group: str | None = None) -> list[_Spec]:
    """Flags of a dataclass; ``metadata`` of a field may hold group, help, choices, low and high.

    Raises:
      ConfigError: a field's type is not int, float, str or bool (or one of them or None), or its default is missing
        or not legal.
    """
    hints = typing.get_type_hints(cls)
    specs = []
    for field in dataclasses.fields(cls):
        kinds = [k for k in _members(hints[field.name]) if k is not types.NoneType]
        if len(kinds) != 1 or kinds[0] not in _KINDS or field.default is dataclasses.MISSING:
            raise ConfigError(
                f"{cls.__qualname__}.{field.name} cannot be a flag: it must be an int, float, str or bool with a "
                "default value; for example width: int = 64"
            )
        meta = field.metadata
        spec = _Spec(
            name=field.name,
            kind=kinds[0],
            group=group or meta["group"],
            help=meta.get("help", ""),
            default=field.default,
            choices=tuple(meta["choices"]) if meta.get("choices") else None,
            low=meta.get("low"),
            high=meta.get("high"),
        )
        if field.default is not None:
            try:
                spec.convert(field.default)
            except ValueError as error:
                raise ConfigError(f"{cls.__qualname__}.{field.name}: default {field.default!r}: {error}") from error
        specs.append(spec)
    return specs


def _members(hint: Any) -> tuple[Any, ...]:
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if union else (hint,)


def _command_specs(tasks: Iterable[str]) -> list[_Spec]:
    """The flags besides those of ``RunConfig``."""
    group = "command"
    names = ", ".join(tasks) or "no task is known"
    return [
        _Spec(name="task", kind=str, group=group, help=f"What to train: {names}."),
        _Spec(name="mode", kind=str, group=group, help="What to do.", default="train_and_eval", choices=MODES),
        _Spec(name="flagfile", kind=str, group=group, help="File with one flag a line, read in this place."),
        _Spec(name="print_config", kind=bool, group=group, help="Print the configuration and end.", default=False),
        _Spec(name="debug", kind=bool, group=group, help="Show the traceback of an error.", default=False),
        _Spec(name="help", kind=bool, group=group, help="Show this and end; also -h.", default=False),
    ]


def _option_specs(task: str, task_class: type, taken: Sequence[_Spec]) -> list[_Spec]:
    """Flags of the task's ``Options`` dataclass, if it has one; ConfigError if a name is taken."""
    options = getattr(task_class, "Options", None)
    if options is None:
        return []
    if not dataclasses.is_dataclass(options) or not isinstance(options, type):
        raise ConfigError(f"{task_class.__qualname__}.Options must be a dataclass; put @dataclasses.dataclass on it")
    specs = _field_specs(options, f"options of task {task}")
    names = {"undefok": "--undefok", "h": "--help"}
    for spec in [*taken, *specs]:
        for name in [spec.name, f"no{spec.name}"] if spec.kind is bool else [spec.name]:
            if name in names:
                raise ConfigError(
                    f"{options.__qualname__}.{spec.name} of task {task} clashes with the flag {names[name]}; "
                    f"rename it, for example {task}_{spec.name}"
                )
            names[name] = f"--{spec.name}"
    return specs


def _flag_values(specs: Iterable[_Spec]) -> absl_flags.FlagValues:
    values = absl_flags.FlagValues()
    values.set_gnu_getopt(True)  # flags after a stray argument are still read, so --help works anywhere
    for spec in specs:
        # All defaults are None here: whether a flag was given decides between the command line and the recipe.
        flag: absl_flags.Flag[Any] = absl_flags.Flag(
            _Parser(spec),
            None,
            spec.name,
            None,
            spec.help or None,
            short_name="h" if spec.name == "help" else None,
            boolean=spec.kind is bool,
            allow_using_method_names=True,
        )
        absl_flags.DEFINE_flag(flag, values, module_name=spec.group)
    return values


def _parse_with(values: absl_flags.FlagValues, argv: Sequence[str], *, known_only: bool) -> list[str]:
    """Positional arguments left over, and with ``known_only`` the unknown flags too; ConfigError for the rest."""
    try:
        return values(argv, known_only=known_only)[1:]
    except absl_flags.UnrecognizedFlagError as error:
        raise ConfigError(
            f"{error.flagvalue} is not a flag{_did_you_mean(error.flagname, values)}; --help lists the flags"
        ) from error
    except (absl_flags.Error, ValueError) as error:
        message = str(error).removeprefix("flag ")
        raise ConfigError(message if "for example" in message else f"{message}; {_FORM}") from error


def _did_you_mean(name: str, values: absl_flags.FlagValues) -> str:
    close = difflib.get_close_matches(name.removeprefix("no"), list(values), n=1)
    return f"; did you mean --{close[0]}?" if close else ""


def parse(argv: Sequence[str], *, tasks: Mapping[str, type]) -> Command:
    """The command a command line asks for. Only the chosen task is looked up in ``tasks``.

    A task class may have ``recipe``, a mapping of ``RunConfig`` fields to the values they have when their flag is not
    given, and ``Options``, a dataclass whose fields become flags besides the framework's.

    Args:
      argv: The program's name and its arguments, as in ``sys.argv``.
      tasks: Names of tasks and their classes.

    Raises:
      ConfigError: an unknown flag or task, a value of the wrong type or out of range, a stray argument, two values
        that do not go together, a flagfile that cannot be read, or a task whose recipe or options are not legal.
      HelpRequested: ``--help`` was given; the help has been printed to stdout.
    """
    program = argv[0] if argv else "train.py"
    specs = _command_specs(tasks) + _field_specs(RunConfig)
    values = _flag_values(specs)
    for arg in argv[1:]:
        if arg in ("--flagfile=", "-flagfile="):  # absl takes it for "no file" without a word
            raise ConfigError(f"{arg} but it must name a file; for example --flagfile=flags.txt")
    try:
        # Flagfiles are read here, once, so that the two parses below see the same arguments.
        args = values.read_flags_from_files(list(argv[1:]))
    except (absl_flags.Error, ValueError, OSError) as error:
        raise ConfigError(f"{str(error).removeprefix('ERROR:: ')}; pass --flagfile=FILE with a text file") from error

    # The first parse finds the task; only then are the task's own flags known.
    rest = _parse_with(values, [program, *args], known_only=True)
    task: Any = values["task"].value
    known = task in tasks
    task_class = tasks[task] if known else object
    options = _option_specs(task, task_class, specs)
    recipe = _recipe(task, task_class)
    if values["help"].value:
        print(_help_text(program, [*specs, *options], recipe))
        raise HelpRequested
    if not known:
        raise ConfigError(_no_task(task, tasks, rest))
    values = _flag_values([*specs, *options])
    rest = _parse_with(values, [program, *args], known_only=False)
    if values["task"].value != task:
        raise ConfigError(f"--task={task} was read as the value of another flag; write that flag as --NAME=VALUE")
    if rest:
        raise ConfigError(f"{rest[0]!r} is not a flag; {_FORM}")

    given: dict[str, Any] = {
        spec.name: values[spec.name].value for spec in [*specs, *options] if values[spec.name].present
    }
    return Command(
        task=task,
        task_class=task_class,
        mode=given.get("mode", "train_and_eval"),
        config=_config(task, recipe, given),
        options=_options(task_class, options, given),
        debug=given.get("debug", False),
        print_config=given.get("print_config", False),
        given=tuple(given),
    )


def _no_task(task: str | None, tasks: Iterable[str], rest: Sequence[str]) -> str:
    choice = f"pass one of {', '.join(f'--task={name}' for name in tasks) or 'no tasks: none is known'}"
    if task is not None:
        close = difflib.get_close_matches(task, list(tasks), n=1)
        return f"--task={task} is not a task{f'; did you mean --task={close[0]}?' if close else ''}; {choice}"
    for arg in rest:
        if arg.startswith("-") and difflib.get_close_matches(arg.strip("-").split("=")[0], ["task"]):
            return f"--task is missing and {arg} is not a flag; did you mean --task? {choice}"
    return f"--task is missing; {choice}"


def _recipe(task: str, task_class: type) -> dict[str, Any]:
    recipe = dict(getattr(task_class, "recipe", {}))
    fields = [field.name for field in dataclasses.fields(RunConfig)]
    for name in recipe:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            raise ConfigError(
                f"the recipe of task {task} sets {name}, which is no field of RunConfig"
                f"{f'; did you mean {close[0]}?' if close else '; take it out'}"
            )
    return recipe


def _config(task: str, recipe: Mapping[str, Any], given: Mapping[str, Any]) -> RunConfig:
    if given.get("run_dir") == "":
        raise ConfigError(f"--run_dir= is empty but it must name a folder; for example --run_dir=runs/{task}")
    fields = {field.name for field in dataclasses.fields(RunConfig)}
    values = {"run_dir": f"runs/{task}", **recipe, **{n: v for n, v in given.items() if n in fields}}
    try:
        return RunConfig(**values)
    except ConfigError as error:
        # A value the user never typed needs its origin, or the message names a stranger.
        named = [n for n in recipe if n not in given and re.search(rf"\b{n}\b", str(error))]
        if not named:
            raise
        origin = ", ".join(f"{n}={recipe[n]}" for n in named)
        raise ConfigError(f"{error} (the recipe of task {task} sets {origin})") from error


def _options(task_class: type, specs: Iterable[_Spec], given: Mapping[str, Any]) -> dict[str, Any]:
    """The task's options, after the ``Options`` class has had its chance to refuse them."""
    names = [spec.name for spec in specs]
    if not names:
        return {}
    try:
        checked = task_class.Options(**{n: given[n] for n in names if n in given})  # type: ignore[attr-defined]
    except LockstepError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return {name: getattr(checked, name) for name in names}


def _help_text(program: str, specs: Sequence[_Spec], recipe: Mapping[str, Any]) -> str:
    lines = [f"usage: {os.path.basename(program)} --task=TASK [--flag=VALUE ...]"]
    for group in dict.fromkeys(spec.group for spec in specs):
        lines += ["", f"{group}:"]
        for spec in specs:
            if spec.group != group:
                continue
            default = "runs/TASK" if spec.name == "run_dir" else spec.default
            note = f" (default: {default})" if default not in (None, "") else ""
            if spec.name in recipe:
                note = f" (default of this task: {recipe[spec.name]})"
            lines.append(f"  {spec.usage()}")
            lines += textwrap.wrap((spec.help + note).strip(), 112, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def flagfile_text(command: Command) -> str:
    """A flagfile that repeats the run: its task, mode, options and each setting that was given or is not the default.

    Raises:
      ConfigError: a value cannot be written in a line of a flagfile (a line break, white space at the end, bytes that
        are not text).
    """
    recipe = _recipe(command.task, command.task_class)
    commands = _command_specs([])
    fields = _field_specs(RunConfig)
    options = _option_specs(command.task, command.task_class, [*commands, *fields])
    lines = ["# Repeats this run: pass --flagfile=THIS_FILE"]
    for spec in commands:
        if spec.name in ("task", "mode"):
            lines.append(_flagfile_line(spec, getattr(command, spec.name)))
    for spec in fields:
        value = getattr(command.config, spec.name)
        if value is None and recipe.get(spec.name) is not None:
            raise ConfigError(
                f"{spec.name}=None cannot be written to a flagfile: the recipe of task {command.task} "
                f"sets {spec.name}={recipe[spec.name]}; give {spec.name} a value"
            )
        changed = value != spec.default or value != recipe.get(spec.name, value)
        if value is not None and (changed or spec.name in command.given):
            lines.append(_flagfile_line(spec, value))
    for spec in options:
        value = command.options[spec.name]
        if value is not None:
            lines.append(_flagfile_line(spec, value))
    return "\n".join(lines) + "\n"


def _flagfile_line(spec: _Spec, value: Any) -> str:
    line = spec.assignment(value)
    broken = "\n" in line or "\r" in line or line != line.strip()
    if broken or any("\ud800" <= c <= "\udfff" for c in line):
        raise ConfigError(
            f"{spec.name}={value!r} cannot be written to a flagfile: it must be one line of text with no white space "
            f"at its end; for example {spec.assignment(spec._example())}"
        )
    return line


def run(main: Callable[[Command], int | None], argv: Sequence[str] | None = None, *, tasks: Mapping[str, type]) -> int:
    """Parses ``argv`` (``sys.argv`` if None), calls ``main`` and returns the exit code of the process.

    An error is one line on stderr; with ``--debug`` its traceback follows. 0 done, 1 unexpected error, 2 configuration
    refused, 3 to 6 as the error raised says, 130 interrupted. ``SystemExit`` passes through.
    """
    arguments = list(sys.argv if argv is None else argv)
    debug = "--debug" in arguments[1:]  # also holds for an error of the parse itself
    try:
        command = parse(arguments, tasks=tasks)
        debug = command.debug
        if command.print_config:
            shown = {"task": command.task, "mode": command.mode, "options": command.options}
            print(json.dumps(shown | command.config.to_dict(), indent=2))
            return 0
        return main(command) or 0
    except HelpRequested:
        return 0
    except KeyboardInterrupt:
        return _report("interrupted", debug, _INTERRUPTED)
    except LockstepError as error:
        return _report(str(error), debug, error.exit_code)
    except Exception as error:
        hint = "" if debug else " (--debug shows the traceback)"
        return _report(f"{type(error).__name__}: {_one_line(str(error))}{hint}", debug, 1)


def _report(message: str, debug: bool, code: int) -> int:
    print(f"error: {_one_line(message)}", file=sys.stderr, flush=True)
    if debug:
        traceback.print_exc()
    return code


def _one_line(text: str) -> str:
    """``text`` on one line, with control characters escaped and the middle of a very long text left out."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))
    if len(line) > _LONGEST_LINE:
        line = f"{line[: _LONGEST_LINE * 2 // 3]} ... {line[-_LONGEST_LINE // 3 :]}"
    return line
