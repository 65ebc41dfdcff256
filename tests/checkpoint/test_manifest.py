"""A checkpoint is one only if every byte of it is what was written; whatever is not is named with the reason."""

from __future__ import annotations

import pathlib
import random
import shutil
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.checkpoint import find, manifest
from framework.checkpoint.manifest import MANIFEST, Damaged
from framework.checkpoint.store import CheckpointStore

OLD = {"model/w": np.float32([1.5, -2.0]), "run/step": np.int64(4)}
NEW = {"model/w": np.float32([2.5, 3.0]), "model/text": np.array([b"a", b"bc"]), "run/step": np.int64(9)}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the checkpoints of steps 4 and 9."""
    folder = tmp_path_factory.mktemp("intact")
    made = CheckpointStore(folder=str(folder), background=False)
    made.save(4, OLD)
    made.save(9, NEW, {"loss": 0.5})
    return folder


@pytest.fixture
def folder(intact: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of it."""
    return pathlib.Path(shutil.copytree(intact, tmp_path / "copy"))


def files(folder: pathlib.Path) -> list[pathlib.Path]:
    found = sorted((folder / "step-00000009").iterdir())
    assert [p.name for p in found] == ["data.data-00000-of-00001", "data.index", MANIFEST]
    return found


def reason(folder: pathlib.Path) -> str:
    """Why step 9 was passed over; step 4 must have been taken in its place."""
    found = find.newest(str(folder))
    assert found.manifest is not None and found.manifest.step == 4
    assert list(found.passed_over) == [9]
    return found.passed_over[9]


def test_an_intact_checkpoint_is_taken_and_nothing_passed_over(folder: pathlib.Path) -> None:
    found = find.newest(str(folder))
    assert found.manifest is not None and (found.manifest.step, found.passed_over) == (9, {})
    assert found.manifest.figures == {"loss": 0.5}
    assert {n: (v.shape, v.dtype) for n, v in found.manifest.variables.items()} == {
        "model/w": ((2,), "float32"),
        "model/text": ((2,), "string"),
        "run/step": ((), "int64"),
    }
    assert found.manifest.size == sum(p.stat().st_size for p in files(folder)[:2])


def test_every_byte_of_every_file_flipped_in_turn_is_found(folder: pathlib.Path) -> None:
    generator, tried, size = random.Random(0), 0, sum(p.stat().st_size for p in files(folder))
    for path in files(folder):
        data = path.read_bytes()
        for offset in range(len(data)):
            flipped = bytearray(data)
            flipped[offset] ^= 1 << generator.randrange(8)
            path.write_bytes(flipped)
            assert path.name in reason(folder), f"byte {offset} of {path.name}"
            tried += 1
        path.write_bytes(data)
    assert tried == size > 700 and find.newest(str(folder)).passed_over == {}


def test_every_file_cut_at_every_length_is_found(folder: pathlib.Path) -> None:
    for path in files(folder):
        data = path.read_bytes()
        for length in range(len(data)):
            path.write_bytes(data[:length])
            assert path.name in reason(folder), f"{path.name} cut to {length}"
        path.write_bytes(data)


def test_every_file_deleted_in_turn_is_found(folder: pathlib.Path) -> None:
    for path in files(folder):
        data = path.read_bytes()
        path.unlink()
        assert reason(folder) == f"{path.name} cannot be read (No such file or directory)"
        path.write_bytes(data)


@settings(max_examples=60, deadline=None, database=None)
@given(data=st.data())
def test_any_change_of_any_range_is_found(intact: pathlib.Path, data: Any) -> None:
    """Ranges overwritten, removed, doubled or added, also at the end; the checksum decides, not the parser."""
    with_copy = intact.parent / "range"
    shutil.rmtree(with_copy, ignore_errors=True)
    shutil.copytree(intact, with_copy)
    path = data.draw(st.sampled_from(files(with_copy)))
    old = path.read_bytes()
    start = data.draw(st.integers(0, len(old)))
    end = data.draw(st.integers(start, min(len(old), start + 64)))
    new = old[:start] + data.draw(st.binary(max_size=64)) + old[end:]
    path.write_bytes(new)
    if new == old:
        assert find.newest(str(with_copy)).passed_over == {}
    else:
        assert path.name in reason(with_copy)


def test_sizes_alone_do_not_tell_what_contents_do(folder: pathlib.Path) -> None:
    """``steps`` is for a look at what is there, ``newest`` for what is loaded."""
    path = files(folder)[0]
    path.write_bytes(bytes(len(path.read_bytes())))
    made = CheckpointStore(folder=str(folder))
    assert made.steps() == [4, 9]
    assert made.newest().passed_over.keys() == {9}
    assert made.steps() == [4]  # it is known now


def test_a_checkpoint_under_the_name_of_another_step_is_found(folder: pathlib.Path) -> None:
    (folder / "step-00000009").rename(folder / "step-00000012")
    found = find.newest(str(folder))
    assert found.manifest is not None and found.manifest.step == 4
    assert found.passed_over == {12: "it is named step-00000012 but manifest.json says step 9"}


def test_the_files_of_one_checkpoint_in_another_are_found(folder: pathlib.Path) -> None:
    for name in ("data.index", "data.data-00000-of-00001"):
        shutil.copy(folder / "step-00000004" / name, folder / "step-00000009" / name)
    assert "data.data-00000-of-00001 has 16 bytes but 25 were written" in reason(folder)


def test_a_format_of_a_later_version_is_refused_and_said(folder: pathlib.Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(manifest, "FORMAT", 2)
    assert find.newest(str(folder)).passed_over[9] == "manifest.json has format 1 but this version knows 2 only"


def test_a_file_of_many_blocks_has_the_checksum_of_its_whole(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    import xxhash

    monkeypatch.setattr(manifest, "_BLOCK", 1000)
    for size in (0, 1, 999, 1000, 1001, 12_345):
        data = random.Random(size).randbytes(size)
        (tmp_path / "f").write_bytes(data)
        found = manifest.checksum(str(tmp_path / "f"))
        assert (found.size, found.checksum) == (size, xxhash.xxh3_128_hexdigest(data))


def test_what_a_path_means(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    folder.rename(run / "checkpoints")
    for path, step in ((run, 9), (run / "checkpoints", 9), (run / "checkpoints" / "step-00000004", 4)):
        where, found, passed_over = find.one_of(str(path))
        assert (pathlib.Path(where).name, found.step, passed_over) == (f"step-{step:08d}", step, {})
    files(run / "checkpoints")[1].unlink()
    where, found, passed_over = find.one_of(str(run))
    assert found.step == 4 and passed_over == {9: "data.index cannot be read (No such file or directory)"}


def test_nothing_needs_tensorflow_to_be_checked(intact: pathlib.Path) -> None:
    import subprocess
    import sys

    code = f"import sys\nfrom framework.checkpoint.__main__ import main\ncode = main(['verify', {str(intact)!r}])\n"
    code += "sys.exit(code or ('tensorflow' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.count("whole")) == (0, 2), done.stderr


def test_damage_is_an_error_of_the_framework(folder: pathlib.Path) -> None:
    files(folder)[2].unlink()
    with pytest.raises(Damaged, match=r"manifest\.json cannot be read"):
        manifest.check(str(folder / "step-00000009"))
