"""`pdllm bench store`: its figures' form, and that it measures what it says."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pdllm_store import KV_DTYPES, ChunkKV

from pdllm_rag.bench import growth
from pdllm_rag.bench.kv_files import FORMATS, raw
from pdllm_rag.bench.machine import take_turns
from pdllm_rag.bench.page_cache import drop, resident_share
from pdllm_rag.bench.section import Side, section
from pdllm_rag.bench.store import StoreShapes, bench_store
from pdllm_rag.cli import bench as cli

TINY = StoreShapes(n_layers=3, n_kv_heads=2, head_dim=8, chunk_len=8, n_chunks=2, threads=2, n_metas=30)
SPREAD = {"median", "q1", "q3"}
SIDE = {"what", "ms", "gb_per_s", "of_limit", "resident"}
GROWTH_SIDE = {"what", "ms", "ms_smaller", "peak_bytes_per_chunk", "own_bytes_per_chunk"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def figures(folder: Path) -> dict[str, Any]:
    patch = pytest.MonkeyPatch()
    patch.setattr("pdllm_rag.bench.store.HEAD_START_S", 0.01)
    patch.setattr(growth, "REPEAT", 1)
    try:
        return bench_store(TINY, folder=folder, repeat=2)
    finally:
        patch.undo()


def random_kv(n: int) -> list[ChunkKV]:
    return [ChunkKV(*torch.randn(2, 3, 5, 2, 4).bfloat16()) for _ in range(n)]


def test_figures_have_the_stable_form(figures: dict[str, Any]) -> None:
    assert list(figures) == ["machine", "repeat", "shapes", "write", "warm", "cold", "tables", "codec"]
    assert figures["shapes"]["batch_bytes"] == 2 * 2 * 3 * 8 * 2 * 8 * 2
    files = {"torch", "safetensors", "plain"}
    assert set(figures["write"]["sides"]) == {"store", "whole chunks", *files}
    assert set(figures["warm"]["sides"]) == {"store", "unchecked", "whole chunks", "copy", *files}
    assert set(figures["cold"]["sides"]) == {"store", "prefetch", "prefetched", "whole chunks", "plain"}
    assert (figures["warm"]["target"], figures["cold"]["target"]) == (0.6, 0.5)
    assert set(figures["codec"]) == set(KV_DTYPES)
    assert {dtype: part["bytes_per_1k_tokens"] for dtype, part in figures["codec"].items()} == {
        "float32": 1000 * 2 * 3 * 2 * 8 * 4,
        "bfloat16": 1000 * 2 * 3 * 2 * 8 * 2,
        "int8": 1000 * 2 * 3 * 2 * (8 + 4),
    }
    sections = [figures[name] for name in ("write", "warm", "cold")] + list(figures["codec"].values())
    for one in sections:
        assert {"measures", "n_bytes", "limit", "sides"} <= set(one)
        for name, side in one["sides"].items():
            assert set(side) == SIDE
            assert side["what"]
            assert all(set(side[key]) == SPREAD for key in ("ms", "gb_per_s", "of_limit"))
            assert (name != one["limit"]) or set(side["of_limit"].values()) == {1}
    json.dumps(figures)


def test_figures_tell_how_much_was_in_the_page_cache(figures: dict[str, Any]) -> None:
    assert all(set(side["resident"]) == SPREAD for side in figures["cold"]["sides"].values())
    assert all(side["resident"] is None for side in figures["warm"]["sides"].values())


def test_growth_is_told_for_each_chunk(figures: dict[str, Any]) -> None:
    tables = figures["tables"]
    assert tables["n_chunks"] == [3, 30]
    assert tables["file_bytes_per_chunk"] > 4 * 8
    assert list(tables["sides"]) == ["open", "stats", "rows", "iter_meta", "refs", "documents"]
    for side in tables["sides"].values():
        assert set(side) == GROWTH_SIDE
        assert side["ms"]["median"] > 0


def test_nothing_is_left_behind(figures: dict[str, Any], folder: Path) -> None:
    assert figures
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("sizes", [{"n_chunks": 0}, {"threads": -1}, {"n_metas": 9}, {"head_dim": 0}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        StoreShapes(**sizes)


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ValueError, match="1000 bytes free"):
        bench_store(TINY, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_brings_back_what_it_wrote(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kvs, out = random_kv(3), random_kv(3)
    FORMATS[name].write(tmp_path, kvs)
    if name == "torch":  # it makes new tensors
        loaded: list[dict[str, torch.Tensor]] = []
        load = torch.load
        monkeypatch.setattr(torch, "load", lambda *a, **k: loaded.append(load(*a, **k)))
        FORMATS[name].read(tmp_path, out)
        out = [ChunkKV(**kv) for kv in loaded]
    else:
        FORMATS[name].read(tmp_path, out)
    for kv, found in zip(kvs, out, strict=True):
        assert torch.equal(kv.k, found.k)
        assert torch.equal(kv.v, found.v)


def test_raw_bytes_are_shared_with_the_tensor() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    raw(tensor)[:] = 255
    assert raw(tensor).size == 12
    assert torch.isnan(tensor).all()


def test_the_page_cache_forgets_a_dropped_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(0).bytes(1 << 20))
    assert resident_share(path) == 1
    drop(path)
    if resident_share(path) == 1:
        pytest.skip("a file system that lies in memory")
    path.read_bytes()
    assert resident_share(path) == 1


def test_what_prepares_a_run_is_not_timed() -> None:
    order: list[str] = []
    ms = take_turns(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")},
        1,
        device=torch.device("cpu"),
        prepare={"a": lambda: order.append("before a")},
    )
    assert order == ["before a", "a", "b"] * 2
    assert set(ms) == {"a", "b"}


def test_sides_are_held_against_the_limit_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    ms = {"fast": [1.0, 10.0], "slow": [2.0, 40.0]}
    monkeypatch.setattr("pdllm_rag.bench.section.take_turns", lambda *_, **__: ms)
    sides = {name: Side(name, lambda: None) for name in ms}
    found = section("moving", sides, 10**6, 2, limit="fast")["sides"]["slow"]
    assert found["of_limit"]["median"] == (1 / 2 + 1 / 4) / 2
    assert found["gb_per_s"]["median"] == (1 / 2 + 1 / 40) / 2


# -- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def command(figures: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command line; it measures nothing and returns the shapes and the other arguments that it was asked for."""
    asked: list[tuple[StoreShapes, dict[str, Any]]] = []

    def bench(shapes: StoreShapes, **arguments: Any) -> dict[str, Any]:
        asked.append((shapes, arguments))
        return figures

    monkeypatch.setattr("pdllm_rag.bench.store.bench_store", bench)

    def run(*argv: str) -> tuple[StoreShapes, dict[str, Any]]:
        parser = argparse.ArgumentParser()
        cli.add_parser(parser.add_subparsers())
        args = parser.parse_args(["bench", "store", *argv])
        assert args.run(args) == 0
        return asked[-1]

    return run


def test_the_command_asks_for_a_shape_and_prints_one_json_object(
    command: Any, figures: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--json") == (StoreShapes(), {"folder": ".", "repeat": 10})
    assert json.loads(capsys.readouterr().out) == figures
    shapes, arguments = command("--shape", "llada-8b", "--layers", "2", "--kv-dtype", "int8", "--dir", "/x", "--json")
    assert (shapes.n_layers, shapes.n_kv_heads, shapes.head_dim) == (2, 32, 128)
    assert (shapes.kv_dtype, arguments["folder"]) == ("int8", "/x")


def test_the_command_prints_tables_that_name_every_side(
    command: Any, figures: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    command()
    out = capsys.readouterr().out
    sections = [figures[name] for name in ("write", "warm", "cold", "tables")] + list(figures["codec"].values())
    for one in sections:
        assert one["measures"] in out
        assert all(side["what"] in out for side in one["sides"].values())
    for text in ("target 0.6", "the limit", "in the page cache before", "3 layers of 2 x 8", "per 1,000 tokens"):
        assert text in out
