from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
import string
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from absl import flags as absl_flags
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import errors
from framework import flags as lockstep_flags
from framework.config import RunConfig
from framework.errors import ConfigError
from framework.flags import Command, HelpRequested, flagfile_text, parse, run

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIELDS = dataclasses.fields(RunConfig)


class Digits:
    recipe = types.MappingProxyType({"global_batch_size": 64, "train_steps": 300, "weight_decay": 0.01})

    @dataclasses.dataclass(frozen=True)
    class Options:
        width: int = dataclasses.field(default=32, metadata={"help": "Units of the hidden layer.", "low": 1})
        dropout: float = 0.1
        name: str = ""
        bias: bool = True


class Plain:
    pass


TASKS = {"digits": Digits, "plain": Plain}


def parse_plain(*args: str) -> Command:
    return parse(["train.py", "--task=plain", *args], tasks=TASKS)


def parse_digits(*args: str) -> Command:
    return parse(["train.py", "--task=digits", *args], tasks=TASKS)


def refusal(*args: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(["train.py", *args], tasks=TASKS)
    return str(caught.value)


def help_text(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(HelpRequested):
        parse(["train.py", *args], tasks=TASKS)
    return capsys.readouterr().out


# --- what a command line means -------------------------------------------------------------------------------------


def test_without_flags_a_task_runs_with_the_defaults() -> None:
    command = parse_plain()
    assert (command.task, command.task_class, command.mode) == ("plain", Plain, "train_and_eval")
    assert command.config == RunConfig(run_dir="runs/plain")
    assert (command.options, command.debug, command.print_config, command.given) == ({}, False, False, ("task",))


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_every_field_is_a_flag_with_help_and_a_group(field: dataclasses.Field[Any]) -> None:
    assert field.metadata["help"].strip()
    assert field.metadata["group"] in ("run", "cluster", "precision", "optimizer", "loop", "export", "data", "checks")
    # Values that do not go with the defaults are given with their partner.
    values = {
        "workers": ["--workers=a:1,b:2", "--worker_index=1"],
        "worker_index": ["--workers=a:1,b:2", "--worker_index=1"],
        "schedule": ["--schedule=step", "--schedule_boundaries=3"],
        "schedule_boundaries": ["--schedule=step", "--schedule_boundaries=3"],
        "nesterov": ["--nesterov", "--optimizer=sgd"],
        "cluster": ["--cluster=none"],
        "worker_port": ["--worker_port=7000", "--cluster=slurm"],
        "keep_best": ["--keep_best=loss:min"],
        "keep_every": ["--keep_every=6", "--checkpoint_every=3"],
        "init_from": ["--init_from=runs/other"],
        "init_include": ["--init_include=backbone", "--init_from=runs/other"],
        "init_exclude": ["--init_exclude=head", "--init_from=runs/other"],
        "stop_when": ["--stop_when=loss<0.1"],
        "export_formats": ["--export_formats=keras"],
        "run_dir": ["--run_dir=somewhere"],
        "profile": ["--profile=3:4", "--run_dir=somewhere"],
        "train_steps": ["--train_steps=7"],
        "train_epochs": ["--train_epochs=7"],
        "accumulate_steps": ["--accumulate_steps=7"],
        "loss_scale": ["--loss_scale=8", "--precision=mixed_float16"],
        "ema_decay": ["--ema_decay=0.9"],
        "learning_rate_multipliers": ["--learning_rate_multipliers=head=0.1"],
        "muon_exclude": ["--muon_exclude=head", "--optimizer=muon"],
    }
    if field.name in values:
        args = values[field.name]
    elif field.metadata["choices"]:
        args = [f"--{field.name}={next(c for c in field.metadata['choices'] if c not in ('tpu', field.default))}"]
    elif isinstance(field.default, bool):
        args = [f"--no{field.name}" if field.default else f"--{field.name}"]
    else:
        args = [f"--{field.name}={1 if field.default != 1 else 0.5}"]
    if field.name == "clip_value":
        args.append("--clip_global_norm=0")
    if field.name in ("beta_1", "beta_2"):
        args = [f"--{field.name}=0.5"]
    command = parse_plain(*args)
    assert field.name in command.given
    assert getattr(command.config, field.name) != field.default


def test_absl_forms_of_a_flag() -> None:
    config = parse_plain("--train_steps", "-1", "-seed=3", "--nesterov", "--optimizer", "sgd", "--notensorboard").config
    assert (config.train_steps, config.seed, config.nesterov, config.tensorboard) == (-1, 3, True, False)
    assert parse_plain("--tensorboard=false").config.tensorboard is False
    assert parse_plain("--seed=1", "--seed=2").config.seed == 2


def test_an_int_is_a_number_for_a_float_flag() -> None:
    rate = parse_plain("--learning_rate=1").config.learning_rate
    assert rate == 1.0 and type(rate) is float


def test_modes() -> None:
    for mode in ("train", "train_and_eval", "eval"):
        assert parse_plain(f"--mode={mode}").mode == mode


def test_train_steps_and_train_epochs_go_together_and_the_help_names_the_rule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = parse_plain("--train_epochs=10", "--train_steps=7").config
    assert (config.train_epochs, config.train_steps) == (10, 7)
    assert "the smaller wins" in help_text(capsys, "--help")


# --- recipes and options -------------------------------------------------------------------------------------------


def test_a_recipe_gives_way_to_a_flag_even_one_that_repeats_the_default() -> None:
    config = parse_digits("--global_batch_size=128").config
    assert (config.global_batch_size, config.train_steps) == (128, 300)


def test_a_recipe_gives_way_to_a_flagfile(tmp_path: pathlib.Path) -> None:
    (tmp_path / "f").write_text("--task=digits\n--train_steps=5\n")
    command = parse(["train.py", f"--flagfile={tmp_path}/f"], tasks=TASKS)
    assert (command.config.train_steps, command.config.global_batch_size) == (5, 64)
    assert command.given == ("task", "train_steps")


def test_a_refused_value_of_the_recipe_is_said_to_come_from_it() -> None:
    message = refusal("--task=digits", "--optimizer=sgd")
    assert "weight_decay=0.01 with optimizer=sgd" in message
    assert "the recipe of task digits sets weight_decay=0.01" in message


def test_a_recipe_with_an_unknown_field_is_refused() -> None:
    wrong = type("Wrong", (), {"recipe": {"learnin_rate": 1.0}})
    with pytest.raises(ConfigError, match=r"task wrong sets learnin_rate.*did you mean learning_rate"):
        parse(["train.py", "--task=wrong"], tasks={"wrong": wrong})


def test_options_have_their_types_and_defaults() -> None:
    assert parse_digits().options == {"width": 32, "dropout": 0.1, "name": "", "bias": True}
    command = parse_digits("--width=8", "--dropout", "0.5", "--nobias", "--name=x y")
    assert command.options == {"width": 8, "dropout": 0.5, "name": "x y", "bias": False}
    assert command.given == ("task", "width", "dropout", "name", "bias")


def test_options_before_the_task_and_options_of_another_task() -> None:
    assert parse(["train.py", "--width", "8", "--task", "digits"], tasks=TASKS).options["width"] == 8
    assert "--width=8 is not a flag" in refusal("--task=plain", "--width=8")


def test_an_option_out_of_range_is_refused() -> None:
    message = refusal("--task=digits", "--width=0")
    assert message == "--width=0: it must be a whole number, at least 1; for example --width=32"


def test_an_options_class_may_refuse_its_values() -> None:
    @dataclasses.dataclass
    class Options:
        heads: int = 2

        def __post_init__(self) -> None:
            if self.heads % 2:
                raise ValueError(f"heads={self.heads} but it must be even; for example --heads=2")

    task = type("Task", (), {"Options": Options})
    with pytest.raises(ConfigError, match="heads=3 but it must be even"):
        parse(["train.py", "--task=t", "--heads=3"], tasks={"t": task})


@pytest.mark.parametrize(
    ("name", "kind", "default", "flag"),
    [
        ("seed", int, 1, "--seed"),
        ("task", str, "", "--task"),
        ("help", bool, False, "--help"),
        ("notensorboard", int, 1, "--tensorboard"),
        ("undefok", str, "", "--undefok"),
    ],
)
def test_an_option_named_like_a_framework_flag_is_refused(name: str, kind: type, default: Any, flag: str) -> None:
    options = dataclasses.make_dataclass("Options", [(name, kind, default)])
    with pytest.raises(ConfigError, match=rf"Options\.{name} of task t clashes with the flag {flag}; rename"):
        parse(["train.py", "--task=t"], tasks={"t": type("T", (), {"Options": options})})


@pytest.mark.parametrize(
    "field",
    [
        ("sizes", list, dataclasses.field(default_factory=list)),
        ("size", int),
        ("size", int, 1.5),
        ("size", float, float("nan")),
    ],
)
def test_an_option_that_cannot_be_a_flag_is_refused(field: tuple[Any, ...]) -> None:
    options = dataclasses.make_dataclass("Options", [field])
    with pytest.raises(ConfigError, match=r"Options\.size"):
        parse(["train.py", "--task=t"], tasks={"t": type("T", (), {"Options": options})})


def test_options_that_are_no_dataclass_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be a dataclass"):
        parse(["train.py", "--task=t"], tasks={"t": type("T", (), {"Options": dict})})


def test_an_option_may_be_called_like_a_method_of_absl() -> None:
    options = dataclasses.make_dataclass("Options", [("set_default", int, 1)])
    tasks = {"t": type("T", (), {"Options": options})}
    assert parse(["train.py", "--task=t", "--set_default=4"], tasks=tasks).options == {"set_default": 4}


def test_only_the_chosen_task_is_looked_up() -> None:
    class Lazy(dict[str, type]):
        def __getitem__(self, name: str) -> type:
            assert name == "plain"
            return super().__getitem__(name)

    assert parse(["train.py", "--task=plain"], tasks=Lazy(TASKS)).task_class is Plain


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ([], ["--task is missing", "--task=digits, --task=plain"]),
        (["--tsk=digits"], ["--tsk=digits is not a flag", "did you mean --task"]),
        (["--task=digit"], ["--task=digit is not a task", "did you mean --task=digits", "--task=plain"]),
        (["--task"], ["Missing value for flag --task", "write --NAME=VALUE"]),
        (["--task=plain", "--trian_steps=5"], ["--trian_steps=5 is not a flag", "did you mean --train_steps?"]),
        (["--task=plain", "--qqq"], ["--qqq is not a flag", "--help"]),
        (["--task=plain", "--num_rep=2"], ["--num_rep=2 is not a flag"]),  # absl's C++ and argparse take a prefix
        (["--task=plain", "5"], ["'5' is not a flag", "write --NAME=VALUE"]),
        (["--task=plain", "--nesterov", "false"], ["'false' is not a flag", "--noNAME"]),
        (["--task=plain", "--nesterov=maybe"], ["--nesterov=maybe", "true or false", "--nonesterov"]),
        (["--task=plain", "--nonesterov=1"], ["--nonesterov=1 does not take an argument"]),
        (["--task=plain", "--train_steps=many"], ["--train_steps=many", "a whole number", "--train_steps=100"]),
        (["--task=plain", "--train_steps=1.5"], ["--train_steps=1.5", "a whole number"]),
        (["--task=plain", "--train_steps=" + "9" * 5000], ["a whole number"]),
        (["--task=plain", "--train_steps=99999999999999999999"], ["a whole number"]),
        (["--task=plain", "--train_steps=0"], ["train_steps=0", "at least 1"]),
        (["--task=plain", "--learning_rate=nan"], ["--learning_rate=nan", "finite", "--learning_rate=0.001"]),
        (["--task=plain", "--learning_rate=1e999"], ["--learning_rate=1e999", "finite"]),
        (["--task=plain", "--learning_rate=-1"], ["--learning_rate=-1", "at least 0.0"]),
        (["--task=plain", "--momentum=2"], ["--momentum=2", "at most 1.0"]),
        (["--task=plain", "--num_replicas=-1"], ["--num_replicas=-1", "at least 0", "--num_replicas=0"]),
        (["--task=plain", "--strategy=one_device", "--num_replicas=2"], ["one_device", "num_replicas=2", "mirrored"]),
        (["--task=plain", "--strategy=horovod"], ["--strategy=horovod", "one of auto, one_device"]),
        (["--task=plain", "--all_reduce=magic"], ["--all_reduce=magic", "one of auto", "nccl"]),
        (["--task=plain", "--steps_per_loop=-1"], ["--steps_per_loop=-1", "at least 0"]),
        (["--task=plain", "--eval_every=-5"], ["--eval_every=-5", "at least 0"]),
        (["--task=plain", "--mode=serve"], ["--mode=serve", "one of train, train_and_eval, eval"]),
        (["--task=plain", "--run_dir="], ["--run_dir=", "must name a folder", "runs/plain"]),
        (["--task=plain", "--flagfile="], ["--flagfile=", "must name a file"]),
        (["--task=plain", "--flagfile"], ["--flagfile", "FILE"]),
        (["--task=plain", "--flagfile=/no/such/file"], ["/no/such/file", "No such file"]),
        (["--task=plain", "--flagfile=/"], ["directory"]),
        (["--task=plain", "--flagfile=a\0b"], ["null byte"]),
        (["--name", "--task=digits"], ["--task=digits", "value of another flag"]),
    ],
)
def test_a_refusal_is_one_line_with_value_rule_and_cure_and_ends_with_2(
    args: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(lambda command: pytest.fail("started"), ["train.py", *args], tasks=TASKS)
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err


def test_a_flagfile_that_is_not_text_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "f").write_bytes(b"\xff\xfe\x00")
    assert "--flagfile=FILE with a text file" in refusal("--task=plain", f"--flagfile={tmp_path}/f")


def test_a_stray_word_in_a_flagfile_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "f").write_text("train_steps=5\n")
    assert "'train_steps=5' is not a flag" in refusal("--task=plain", f"--flagfile={tmp_path}/f")


def test_no_tasks_at_all() -> None:
    with pytest.raises(ConfigError, match="none is known"):
        parse(["train.py", "--task=x"], tasks={})


# --- help and print_config -----------------------------------------------------------------------------------------


def test_help_lists_every_flag_under_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_text(capsys, "--help")
    for field in FIELDS:
        name = f"--[no]{field.name}" if isinstance(field.default, bool) else f"--{field.name}="
        assert name in text.split(f"\n{field.metadata['group']}:\n")[1]
    assert "digits, plain" in text
    assert "options of task" not in text


def test_help_of_train_steps_says_that_it_is_a_total(capsys: pytest.CaptureFixture[str]) -> None:
    after = help_text(capsys, "-h").split("--train_steps=")[1].split("--")[0]
    assert "Total number of updates, counted from step 0, also after a resume" in " ".join(after.split())


def test_help_of_a_task_shows_its_options_and_its_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_text(capsys, "--task=digits", "--unknown", "stray", "--help")
    assert "options of task digits:" in text
    text = " ".join(text.split())
    assert "Units of the hidden layer. (default: 32)" in text
    assert "(default of this task: 300)" in text


def test_help_fits_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert max(map(len, help_text(capsys, "--help").splitlines())) <= 120


def test_help_ends_with_0_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda command: pytest.fail("started"), ["train.py", "--help"], tasks=TASKS) == 0
    assert capsys.readouterr().err == ""


def test_print_config_prints_json_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train.py", "--task=digits", "--print_config", "--seed=5", "--width=4"]
    assert run(lambda command: pytest.fail("started"), argv, tasks=TASKS) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["task"] == "digits" and shown["mode"] == "train_and_eval" and shown["options"]["width"] == 4
    assert (shown["seed"], shown["train_steps"], shown["run_dir"]) == (5, 300, "runs/digits")
    assert {f.name for f in FIELDS} <= set(shown)


# --- run: outcomes and exit codes ----------------------------------------------------------------------------------


def outcome(main: Callable[[Command], int | None], capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    code = run(main, ["train.py", "--task=plain", *args], tasks=TASKS)
    return code, capsys.readouterr().err


def raising(error: BaseException) -> Callable[[Command], None]:
    def main(command: Command) -> None:
        raise error

    return main


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (6, 6)])
def test_what_main_returns_is_the_exit_code(
    returned: int | None, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome(lambda command: returned, capsys) == (code, "")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.LockstepError("x"), 1),
        (errors.ConfigError("x"), 2),
        (errors.CheckFailed("x"), 3),
        (errors.PeerLost("x"), 4),
        (errors.Preempted("x"), 5),
    ],
)
def test_an_error_raised_on_purpose_ends_with_its_code(
    error: errors.LockstepError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome(raising(error), capsys) == (code, "error: x\n")


def test_an_interrupt_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(raising(KeyboardInterrupt()), capsys) == (128 + signal.SIGINT, "error: interrupted\n")


def test_an_unexpected_error_names_its_type_and_the_way_to_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = outcome(raising(ZeroDivisionError("first\n\nsecond\x1b[31m")), capsys)
    assert code == 1
    assert text == "error: ZeroDivisionError: first second\\x1b[31m (--debug shows the traceback)\n"


def test_debug_shows_the_traceback_after_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = outcome(raising(ZeroDivisionError("oops")), capsys, "--debug")
    assert code == 1
    first, second, *_ = text.splitlines()
    assert (first, second) == ("error: ZeroDivisionError: oops", "Traceback (most recent call last):")
    code, text = outcome(raising(KeyError()), capsys, "--debug", "--bogus")
    assert code == 2 and text.startswith("error: --bogus is not a flag") and "Traceback" in text


def test_a_very_long_message_is_cut_in_the_middle(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = outcome(raising(errors.CheckFailed("a" * 10_000 + "end")), capsys)
    assert len(text) < 2100 and text.endswith("end\n") and " ... " in text


def test_system_exit_passes_through(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        outcome(raising(SystemExit(9)), capsys)
    assert caught.value.code == 9


def test_run_reads_the_arguments_of_the_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--task=plain", "--seed=8"])
    assert run(lambda command: command.config.seed, tasks=TASKS) == 8


# --- no global state -----------------------------------------------------------------------------------------------


def test_a_second_call_uses_its_own_arguments() -> None:
    seen: list[tuple[str, int]] = []

    def main(command: Command) -> None:
        seen.append((command.task, command.config.seed))

    for task, seed in [("digits", 1), ("plain", 2), ("digits", 3)]:
        assert run(main, ["train.py", f"--task={task}", f"--seed={seed}"], tasks=TASKS) == 0
    assert seen == [("digits", 1), ("plain", 2), ("digits", 3)]


def test_two_scripts_with_the_same_option_live_in_one_process() -> None:
    one = dataclasses.make_dataclass("Options", [("width", int, 1)])
    two = dataclasses.make_dataclass("Options", [("width", str, "wide")])
    first = parse(["a.py", "--task=t"], tasks={"t": type("T", (), {"Options": one})})
    second = parse(["b.py", "--task=t"], tasks={"t": type("T", (), {"Options": two})})
    assert (first.options, second.options) == ({"width": 1}, {"width": "wide"})


def test_the_global_flags_are_left_alone() -> None:
    before = set(absl_flags.FLAGS)
    was_parsed = absl_flags.FLAGS.is_parsed()
    parse_digits("--seed=3")
    assert set(absl_flags.FLAGS) == before
    assert absl_flags.FLAGS.is_parsed() == was_parsed
    assert not {f.name for f in FIELDS} & before


def test_the_module_needs_no_tensorflow_and_works_in_a_child_process() -> None:
    # The package is stood in for, so that this is about the module alone, whatever framework/__init__.py imports.
    script = """
import sys, types
package = types.ModuleType("framework")
package.__path__ = ["framework"]
sys.modules["framework"] = package
from framework.flags import run
code = run(lambda c: c.config.seed, ["x", "--task=t", "--seed=7"], tasks={"t": object})
assert not any(name.partition(".")[0] in ("tensorflow", "keras", "numpy") for name in sys.modules)
sys.exit(code)
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60).returncode == 7


# --- the flagfile of a run -----------------------------------------------------------------------------------------


def reread(command: Command, folder: pathlib.Path) -> Command:
    path = folder / "flags.txt"
    path.write_text(flagfile_text(command), encoding="utf-8")
    return parse(["train.py", f"--flagfile={path}"], tasks=TASKS)


def test_a_flagfile_holds_what_differs_or_was_given() -> None:
    command = parse_digits("--seed=0", "--learning_rate=0.1", "--notensorboard", "--mode=train")
    assert flagfile_text(command).splitlines()[1:] == [
        "--task=digits",
        "--mode=train",
        "--run_dir=runs/digits",
        "--train_steps=300",
        "--global_batch_size=64",
        "--seed=0",
        "--learning_rate=0.1",
        "--weight_decay=0.01",
        "--notensorboard",
        "--width=32",
        "--dropout=0.1",
        "--name=",
        "--bias",
    ]


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20).filter(lambda t: t == t.rstrip())


@settings(max_examples=60, deadline=None)
@given(
    run_dir=TEXTS.filter(bool),
    name=TEXTS,
    seed=st.integers(0, 2**31 - 1),
    rate=st.floats(0, 1e30, allow_nan=False),
    dropout=st.floats(allow_nan=False, allow_infinity=False),
    bias=st.booleans(),
    steps=st.one_of(st.none(), st.integers(1, 2**40)),
)
def test_a_run_can_be_repeated_from_its_flagfile(
    tmp_path_factory: pytest.TempPathFactory,
    run_dir: str,
    name: str,
    seed: int,
    rate: float,
    dropout: float,
    bias: bool,
    steps: int | None,
) -> None:
    args = [f"--run_dir={run_dir}", f"--name={name}", f"--seed={seed}", f"--learning_rate={rate}"]
    args += [f"--dropout={dropout}", f"--bias={bias}"]
    command = parse_digits(*args, *([] if steps is None else [f"--train_steps={steps}"]))
    assert (command.config.run_dir, command.options["name"], command.config.learning_rate) == (run_dir, name, rate)
    again = reread(command, tmp_path_factory.mktemp("flags"))
    assert (again.task, again.mode, again.config, again.options) == (
        command.task,
        command.mode,
        command.config,
        command.options,
    )


@pytest.mark.parametrize("value", ["-x", "--task=plain", " lead", "a, b", "# no comment", "//", "'q'", "a=b", "é"])
def test_awkward_text_survives_the_flagfile(value: str, tmp_path: pathlib.Path) -> None:
    assert reread(parse_digits(f"--name={value}"), tmp_path).options["name"] == value


@pytest.mark.parametrize("value", ["a\nb", "a\r", "end ", "end\u2003", "\udc80"])
def test_text_a_flagfile_cannot_hold_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"name=.*cannot be written to a flagfile: it must be one line"):
        flagfile_text(parse_digits(f"--name={value}"))


def test_none_over_a_recipe_cannot_be_written() -> None:
    command = parse_digits()
    changed = dataclasses.replace(command, config=command.config.replace(train_steps=None))
    with pytest.raises(ConfigError, match="train_steps=None cannot be written"):
        flagfile_text(changed)


def test_a_value_set_back_to_the_default_over_a_recipe_is_kept(tmp_path: pathlib.Path) -> None:
    command = parse_digits()
    changed = dataclasses.replace(command, config=command.config.replace(global_batch_size=128))
    assert reread(changed, tmp_path).config.global_batch_size == 128


# --- junk ----------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from([*(f.name for f in FIELDS), "task", "mode", "help", "flagfile", "width", "undefok", "nope"])
VALUES = st.one_of(
    st.sampled_from(["digits", "plain", "0", "-1", "1e400", "nan", "true", "", "a:1,b:2", "loss<1", "3,2", "9" * 400]),
    st.text(max_size=8),
)
ARGS = st.one_of(
    st.text(max_size=12),
    st.builds("{}{}={}".format, st.sampled_from(["--", "-", "--no"]), NAMES, VALUES),
    st.builds("{}{}".format, st.sampled_from(["--", "-", "--no"]), NAMES),
    st.sampled_from(["--", "-", "--task=digits", "--task=plain"]),
    st.text(string.punctuation, max_size=4),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(ARGS, max_size=8))
def test_no_command_line_ends_in_a_traceback(args: list[str]) -> None:
    reached = []
    code = run(lambda command: reached.append(command), ["train.py", *args], tasks=TASKS)
    assert code in (0, 2)
    assert not (reached and code)


def test_the_modes_are_the_choices_of_the_flag() -> None:
    assert lockstep_flags.MODES == ("train", "train_and_eval", "eval", "continuous_eval", "export")
