"""How commands open their store: key files, read-only, caps; and how sizes and durations are typed."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
from command_line import Pdllm, one_line, one_object
from pdllm_store import LMDBStore, MemoryStore

from pdllm_rag.cli import values
from pdllm_rag.cli.opening import read_key
from pdllm_rag.engine import RagEngine
from pdllm_rag.models import LoadedModel

KEY = bytes(range(32))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write_key(tmp_path / "key", KEY.hex().encode() + b"\n")


def write_key(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o600)
    return path


# -- values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("1073741824", 1 << 30),
        ("500MB", 500_000_000),
        ("2GiB", 2 << 30),
        ("2 GiB", 2 << 30),
        ("1KB", 1000),
        ("1kib", 1024),
        ("1.5GB", 1_500_000_000),
        ("0.5KiB", 512),
        ("1TB", 10**12),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_sizes_are_powers_of_1000_or_of_1024(text: str, n_bytes: int) -> None:
    assert values.size(text) == n_bytes
    assert values.size_or_none(text) == n_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "MB", "0", "0GB", "-1", "-1GB", "12.5", "1e9", "2G", "2 apples", "none", "inf", "nan", "1,000", "٣GB"),
        *("2GiB ", "9223372036854775808", "9999999999TB", "1" * 5000),
    ],
)
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a size such as 500MB"):
        values.size(text)


def test_a_cap_may_be_none() -> None:
    assert values.size_or_none("none") is None
    with pytest.raises(argparse.ArgumentTypeError, match=r"got 'None', .*, or none"):
        values.size_or_none("None")


@pytest.mark.parametrize(
    ("text", "seconds"), [("0s", 0), ("90s", 90), ("15m", 900), ("12h", 43_200), ("30d", 2_592_000)]
)
def test_durations_have_a_unit(text: str, seconds: int) -> None:
    assert values.duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1.5h", "1w", "1D", "1 d", "9999999999d"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a duration such as 90s"):
        values.duration(text)


# -- key files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [KEY, KEY.hex().encode(), KEY.hex().encode() + b"\n", KEY.hex().encode() + b"\r\n", KEY.hex().upper().encode()],
)
def test_a_key_is_32_bytes_or_their_hex_digits(content: bytes, tmp_path: Path) -> None:
    assert read_key(str(write_key(tmp_path / "key", content))) == KEY


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"", "0 bytes"),
        (b"password\n", "9 bytes"),
        (KEY + b"\n", "33 bytes"),
        (KEY.hex().encode() + b"\n\n", "66 bytes, expected"),
        (b"0x" + KEY.hex().encode(), "66 bytes that are not all hex digits"),
        (b"g" * 64, "64 bytes that are not all hex digits"),
        (bytes(1 << 20), "4,096 bytes or more"),
    ],
)
def test_another_key_file_is_refused_and_says_how_to_make_one(
    content: bytes, got: str, pdllm: Pdllm, tmp_path: Path
) -> None:
    path = write_key(tmp_path / "key", content)
    told = one_line(pdllm("store", "list", "--store", tmp_path / "kb", "--key-file", path))
    assert f"{path} holds {got}" in told
    assert told.endswith("make one with: (umask 077; openssl rand -hex 32 > FILE)\n")
    assert "No such file" in one_line(pdllm("store", "list", "--store", "s", "--key-file", tmp_path / "none"))


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_key_that_others_can_read_is_warned_of(
    mode: int, warned: bool, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key_file.chmod(mode)
    assert read_key(str(key_file)) == KEY
    expected = f"pdllm: warning: the key in {key_file} can be read by others: chmod 600 {key_file}\n"
    assert capsys.readouterr().err == (expected if warned else "")


def test_a_keyed_store_is_opened_with_its_key_by_every_command(
    pdllm: Pdllm, folder: Path, tmp_path: Path, key_file: Path, tiny_model_path: Path
) -> None:
    place, key = ("--store", tmp_path / "kb"), ("--key-file", key_file)
    model = ("--model", tiny_model_path)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "How heavy is it?", "answers": ["310"], "kind": "answerable"}\n')
    assert pdllm("prefill", folder, *place, *key, *model).status == 0
    commands: list[tuple[Any, ...]] = [
        ("ask", "How heavy is it?", "--steps", "2", *model),
        ("eval", "qa", "--data", questions, "--steps", "2", *model),
        ("models", "info", tiny_model_path),
        ("store", "stats"),
        ("store", "list"),
        ("store", "verify", "--recompute", "1", *model),
        ("store", "pin", "leave.md"),
        ("store", "unpin", "leave.md"),
        ("store", "limit"),
        ("store", "evict", "--unused-for", "1d"),
        ("store", "compact"),
        ("store", "delete", "leave.md", "--purge"),
    ]
    for command in commands:
        assert "no key was given" in one_line(pdllm(*command, *place)), command
        assert pdllm(*command, *place, *key).status == 0, command


# -- read-only -----------------------------------------------------------------------------------------------


@pytest.fixture
def write_protected(filled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store whose folder may not be written, not even by root."""
    access, opening = os.access, os.open

    def inside(path: Any) -> bool:
        return os.fspath(path).startswith(str(filled))

    def may(path: Any, mode: int, **options: Any) -> bool:
        return not (inside(path) and mode & os.W_OK) and access(path, mode, **options)

    def open_file(path: Any, flags: int, *mode: int, **options: Any) -> int:
        if inside(path) and flags & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(13, "Permission denied", path)
        return opening(path, flags, *mode, **options)

    monkeypatch.setattr(os, "access", may)
    monkeypatch.setattr(os, "open", open_file)
    return filled


def test_a_folder_that_cannot_be_written_is_read_with_read_only(
    pdllm: Pdllm, write_protected: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    place, model = ("--store", write_protected), ("--model", tiny_model_path)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "How heavy is it?", "answers": ["310"], "kind": "answerable"}\n')
    commands: list[tuple[Any, ...]] = [
        ("ask", "How heavy is it?", "--steps", "2", *model),
        ("eval", "qa", "--data", questions, "--steps", "2", *model),
        ("models", "info", tiny_model_path),
        ("store", "stats"),
        ("store", "list"),
        ("store", "verify"),
    ]
    for command in commands:
        refused = one_line(pdllm(*command, *place))
        assert f"{write_protected} cannot be written here; --read-only reads it" in refused, command
        assert pdllm(*command, *place, "--read-only").status == 0, command


def test_a_command_that_must_write_does_not_offer_to_read_only(pdllm: Pdllm, write_protected: Path) -> None:
    assert "read-only" not in one_line(pdllm("store", "pin", "leave.md", "--store", write_protected))


def test_read_only_changes_nothing(pdllm: Pdllm, folder: Path, tmp_path: Path, tiny_model_path: Path) -> None:
    place, model = ("--store", tmp_path / "kb"), ("--model", tiny_model_path)
    assert pdllm("prefill", folder, *place, *model).status == 0
    with LMDBStore.open(tmp_path / "kb") as store:
        store.evict()
    before = (tmp_path / "kb" / "data.mdb").read_bytes()
    ask = ("ask", "How heavy is it?", "--steps", "2", "--no-abstain", "--json", *place, *model)
    read = one_object(pdllm(*ask, "--read-only"))
    assert read["stats"]["chunks"]["recomputed"] > 0
    assert (tmp_path / "kb" / "data.mdb").read_bytes() == before
    assert one_object(pdllm(*ask))["answer"] == read["answer"]
    assert (tmp_path / "kb" / "data.mdb").read_bytes() != before


def test_options_of_a_store_need_a_store(pdllm: Pdllm, tmp_path: Path, key_file: Path, tiny_model_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "q", "answers": ["a"], "kind": "answerable", "context": "a"}\n')
    for command in (("eval", "qa", "--data", questions, "--model"), ("models", "info")):
        assert "--store is missing" in one_line(pdllm(*command, tiny_model_path, "--read-only"))
        assert "--store is missing" in one_line(pdllm(*command, tiny_model_path, "--key-file", key_file))


# -- prefill and the engine ----------------------------------------------------------------------------------


def test_a_prefill_sets_the_cap_and_says_what_it_cost(pdllm: Pdllm, tmp_path: Path, tiny_model_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for number in range(6):
        words = " ".join(f"Sentence {i} of text {number} with words." for i in range(12))
        (tmp_path / "docs" / f"{number}.txt").write_text(words)
    argv = ("--store", tmp_path / "kb", "--model", tiny_model_path, "--kv-dtype", "float32")
    first = pdllm("prefill", tmp_path / "docs", *argv, "--max-bytes", "1MiB")
    assert first.status == 0
    assert "chunks evicted to stay below the cap; computed again when they are needed\n" in first.out
    with LMDBStore.open(tmp_path / "kb") as store:
        assert store.max_bytes == 1 << 20
        assert store.stats().evicted > 0
    again = pdllm("prefill", tmp_path / "docs", *argv)
    assert "6 unchanged" in again.out
    assert "evicted" not in again.out
    with LMDBStore.open(tmp_path / "kb") as store:
        assert store.max_bytes == 1 << 20


def test_a_prefill_of_nothing_makes_no_store(pdllm: Pdllm, tmp_path: Path, tiny_model_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    argv = ("--store", tmp_path / "kb", "--model", tiny_model_path)
    assert pdllm("prefill", tmp_path / "typo", *argv).status == 1
    told = pdllm("prefill", tmp_path / "empty", *argv)
    assert told.status == 0
    assert "no file to read; read are .txt" in " ".join(told.err.split())
    assert one_object(pdllm("prefill", tmp_path / "*.md", *argv, "--json"))["documents"]["failed"] == [
        {"path": str(tmp_path / "*.md"), "reason": "the pattern matches nothing"}
    ]
    assert not (tmp_path / "kb").exists()


def test_a_prefill_of_nothing_still_sees_what_has_vanished(
    pdllm: Pdllm, folder: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    argv = ("--store", tmp_path / "kb", "--model", tiny_model_path, "--json")
    pdllm("prefill", folder, *argv)
    for path in (folder / "leave.md", folder / "buoys" / "gannet.txt"):
        path.unlink()
    assert len(one_object(pdllm("prefill", folder, *argv))["documents"]["missing"]) == 2


def test_the_engine_takes_options_for_a_folder_only(tmp_path: Path, tiny_model: LoadedModel) -> None:
    with RagEngine.open(tmp_path / "kb", tiny_model, store_options={"max_bytes": 1 << 20, "key": KEY}) as engine:
        assert engine.store.max_bytes == 1 << 20
    with RagEngine.open(tmp_path / "kb", tiny_model, store_options={"key": KEY, "read_only": True}) as engine:
        assert engine.documents() == []
    with pytest.raises(ValueError, match="store_options were given beside an open store"):
        RagEngine.open(MemoryStore(), tiny_model, store_options={})
