"""The packer: text files to a token file, whole or not at all."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np
import pytest

from framework import ConfigError
from input_pipelines import from_tokens
from input_pipelines import pack as pack_module
from input_pipelines.pack import main, write_tokens
from input_pipelines.tokens import open_tokens


@pytest.fixture
def texts(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"ab\n")
    (folder / "b" / "c.txt").write_bytes("é".encode())
    (folder / "b" / "empty.txt").write_bytes(b"")
    (folder / "z.md").write_bytes(b"other")
    return folder


def test_the_command_joins_documents_in_the_order_of_their_paths(
    texts: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.bin"
    assert main([str(texts), str(out), "--pattern=*.txt", "--vocabulary=bytes"]) == 0
    expected = [97, 98, 10, 256, 0xC3, 0xA9, 256]
    assert out.read_bytes() == np.array(expected, "<u2").tobytes()
    file = open_tokens(out)
    assert (file.vocabulary_size, file.end_of_document, file.dtype) == (257, 256, "uint16")
    assert "7 ids of 3 files" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.bin", "out.json", "texts"]
    assert from_tokens(out, length=3).size == 2


def test_files_and_folders_may_be_mixed_and_a_pattern_chosen(texts: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out.bin"
    assert main([str(texts / "z.md"), str(texts / "a.txt"), str(out)]) == 0
    assert bytes(open_tokens(out).ids()[:5].astype(np.uint8)) == b"other"
    assert main([str(texts), str(tmp_path / "md.bin"), "--pattern=*.md"]) == 0
    assert open_tokens(tmp_path / "md.bin").count == 6


def test_the_splits_share_no_file(tmp_path: pathlib.Path) -> None:
    for i in range(45):
        (tmp_path / f"{i:02d}.txt").write_text(f"{i:02d}")
    for split in ("train", "eval"):
        assert main([str(tmp_path), str(tmp_path / f"{split}.bin"), f"--split={split}"]) == 0
    held = open_tokens(tmp_path / "eval.bin").ids().reshape(-1, 3)[:, :2].astype(np.uint8)
    assert [bytes(row) for row in held] == [b"19", b"39"]
    assert open_tokens(tmp_path / "train.bin").count == 43 * 3


@pytest.mark.parametrize("exists", ["out.bin", "out.json"])
def test_nothing_is_overwritten(
    texts: pathlib.Path, tmp_path: pathlib.Path, exists: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / exists).write_text("mine")
    assert main([str(texts), str(tmp_path / "out.bin")]) == 2
    assert f"{exists} exists and is not overwritten" in capsys.readouterr().err
    assert (tmp_path / exists).read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "out.bin"], "nowhere does not exist"),
        (["texts", "out.bin", "--pattern=*.rst"], r"no file that fits '\*.rst'"),
        (["texts", "out.dat"], "does not end in .bin"),
        (["texts", "no/out.bin"], "no is no folder"),
        (["texts/b/empty.txt", "out.bin"], "nothing to write"),
        (["texts/a.txt", "out.bin", "--split=eval"], "cannot be split"),
    ],
)
def test_what_cannot_be_packed_is_refused_and_leaves_nothing(
    texts: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(texts.parent)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)
    assert [p.name for p in texts.parent.iterdir()] == ["texts"]


def test_a_file_that_is_not_text_is_named_and_nothing_is_left(
    texts: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (texts / "b" / "photo.txt").write_bytes(b"\x89PNG\0")
    assert main([str(texts), str(tmp_path / "out.bin")]) == 2
    assert "photo.txt is not text: byte 4 is NUL" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["texts"]


def test_an_interrupted_write_leaves_nothing(tmp_path: pathlib.Path) -> None:
    def documents() -> Iterator[np.ndarray]:
        yield np.arange(5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(documents(), tmp_path / "out.bin", vocabulary_size=10)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: pathlib.Path) -> None:
    def documents() -> Iterator[np.ndarray]:
        yield np.arange(5)
        (tmp_path / "out.bin").write_text("mine")

    with pytest.raises(ConfigError, match="exists"):
        write_tokens(documents(), tmp_path / "out.bin", vocabulary_size=10)
    assert [p.name for p in tmp_path.iterdir()] == ["out.bin"] and (tmp_path / "out.bin").read_text() == "mine"


def test_a_document_longer_than_what_is_converted_at_a_time(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_module, "_CHUNK", 4)
    documents = [np.arange(11, dtype=np.uint8), np.arange(4, dtype=np.uint8)]
    file = write_tokens(documents, tmp_path / "a.bin", vocabulary_size=12, end_of_document=11)
    np.testing.assert_array_equal(file.ids(), [*range(11), 11, *range(4), 11])


def test_large_vocabularies_take_four_bytes_and_ids_outside_are_refused(tmp_path: pathlib.Path) -> None:
    file = write_tokens([np.array([70_000, 1])], tmp_path / "a.bin", vocabulary_size=70_001)
    assert file.dtype == "uint32" and file.path.read_bytes() == np.array([70_000, 1], "<u4").tobytes()
    for ids in ([70_001], [-1]):
        with pytest.raises(ConfigError, match="from 0 to 70000"):
            write_tokens([np.array(ids)], tmp_path / "b.bin", vocabulary_size=70_001)
