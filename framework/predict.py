"""Runs an exported model over a file: ``python -m framework.predict EXPORT INPUT [--signature=NAME]``.

INPUT is ``.npy`` (one array), ``.npz`` (arrays by the signature's input names), ``.jsonl`` (an object of input names,
or a bare value, a line) or ``-`` for JSON lines from standard input. One JSON object a row goes to standard output, in
the order of the input. Nothing is unpickled. A SavedModel is a program in TensorFlow's ops: run only those you trust.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np

from framework.errors import ConfigError, LockstepError


def rows(path: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of an input file, by input name.

    Args:
      path: see the module's text.
      names: input names of the signature.

    Raises:
      ConfigError: the file cannot be read, or lacks an input.
    """
    try:
        if path.endswith((".npy", ".npz")):
            loaded = np.load(path, allow_pickle=False)
            arrays = {names[0]: loaded} if path.endswith(".npy") else {n: loaded[n] for n in names if n in loaded}
            _all_there(path, arrays, names)
            lengths = {len(a) for a in arrays.values()}
            if len(lengths) != 1:
                raise ConfigError(
                    f"{path} has arrays of lengths {sorted(lengths)} but all need the same first dimension"
                )
            for i in range(lengths.pop()):
                yield {n: arrays[n][i] for n in names}
            return
        with sys.stdin if path == "-" else open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"{path}, line {number}: not JSON ({error})") from error
                row = value if isinstance(value, dict) else {names[0]: value}
                _all_there(f"{path}, line {number}", row, names)
                yield row
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give a .npy, .npz or .jsonl file") from error


def _all_there(where: str, found: Any, names: Sequence[str]) -> None:
    missing = [n for n in names if n not in found]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}; the signature's inputs are {', '.join(names)}")


def predict(directory: str, path: str, *, signature: str = "", batch_size: int = 64) -> Iterator[dict[str, Any]]:
    """Outputs of an export for each row of an input file, as plain Python values by output name.

    Args:
      directory: an export with a SavedModel.
      path: the input file.
      signature: its name; empty: ``serving_default``, or the only one.
      batch_size: rows in a call.

    Raises:
      ConfigError: the export, the signature or the input is not usable.
    """
    import tensorflow as tf

    from framework.export import read_about

    about = read_about(directory)
    folder = os.path.join(directory, "saved_model")
    if not os.path.isdir(folder):
        raise ConfigError(f"{directory} has no SavedModel but {about.get('formats')}; export with saved_model")
    known = list(about["signatures"])
    chosen = signature or ("serving_default" if "serving_default" in known else known[0])
    if chosen not in known:
        raise ConfigError(f"signature={chosen} but the export has {', '.join(known)}")
    function = tf.saved_model.load(folder).signatures[chosen]
    specs = function.structured_input_signature[1]
    names = list(specs)
    found = rows(path, names)
    while batch := list(itertools.islice(found, batch_size)):
        try:
            inputs = {n: tf.constant(_array([row[n] for row in batch]), specs[n].dtype) for n in names}
            outputs = {n: t.numpy() for n, t in function(**inputs).items()}
        except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
            wanted = about["signatures"][chosen]
            raise ConfigError(
                f"{path} does not fit the signature {chosen} ({wanted}): {str(error).splitlines()[0]}"
            ) from error
        for i in range(len(batch)):
            yield {n: _plain(t[i]) for n, t in outputs.items()}


def _array(values: list[Any]) -> Any:
    return np.stack(values) if isinstance(values[0], np.ndarray) else values


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m framework.predict", description="Runs an exported model.")
    parser.add_argument("export", help="directory of an export")
    parser.add_argument("input", help=".npy, .npz, .jsonl, or - for JSON lines from standard input")
    parser.add_argument("--signature", default="", help="name of the signature")
    parser.add_argument("--batch_size", type=int, default=64, help="rows in a call")
    args = parser.parse_args(argv)
    if args.batch_size < 1:
        parser.error(f"--batch_size={args.batch_size} but it must be at least 1")
    try:
        for row in predict(args.export, args.input, signature=args.signature, batch_size=args.batch_size):
            print(json.dumps(row), flush=True)
    except LockstepError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # whoever read has enough
        sys.stderr.close()
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
