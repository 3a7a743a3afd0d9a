"""What a corpus costs: from figures that were measured, by formulas that are checked against counting."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Pdllm, one_object

from pdllm_rag.bench.shapes import SHAPES
from pdllm_rag.cli import plan as command
from pdllm_rag.models.loader import read_fingerprint, read_spec
from pdllm_rag.planning import MODELS, make_plan, unit_costs

NUMBERS = Path(__file__).parent.parent / "docs" / "numbers"


def measured(node: Any, name: str = "") -> Iterator[tuple[str, float, str]]:
    """Name, value and source of every cost that names a source."""
    if isinstance(node, dict):
        if "source" in node:
            yield name, node["value"], node["source"]
        for key, value in node.items():
            yield from measured(value, f"{name}/{key}")


@pytest.mark.parametrize(("name", "value", "source"), list(measured(unit_costs())))
def test_each_cost_is_the_figure_that_it_names(name: str, value: float, source: str) -> None:
    file, _, path = source.partition("#")
    figure = json.loads((NUMBERS / file).read_text())
    for key in path.split("/"):
        figure = figure[int(key)] if isinstance(figure, list) else figure[key]
    assert math.isclose(value, figure, rel_tol=1e-3), name


def test_the_shapes_are_those_of_the_models() -> None:
    demo = read_fingerprint("demo", "bfloat16")
    shapes = {name: costs["shape"] for name, costs in unit_costs()["models"].items()}
    assert shapes["demo"] == {name: getattr(demo, name) for name in ("n_layers", "n_kv_heads", "head_dim")}
    assert unit_costs()["models"]["demo"]["chunk_len"] == read_spec("demo")[0].family.chunk_len
    dream, llada = SHAPES["dream-7b"].config, SHAPES["llada-8b"].config
    head_dim = dream["hidden_size"] // dream["num_attention_heads"]
    assert list(shapes["dream"].values()) == [dream["num_hidden_layers"], dream["num_key_value_heads"], head_dim]
    assert list(shapes["llada"].values()) == [
        llada["n_layers"],
        llada["n_kv_heads"],
        llada["d_model"] // llada["n_heads"],
    ]
    assert tuple(shapes) == MODELS == command.MODELS


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float32"])
@pytest.mark.parametrize("keep", [None, 32, 5000])
@pytest.mark.parametrize("n_tokens", [1, 158, 159, 160, 1000])
def test_bytes_are_those_of_every_row_counted_one_by_one(kv_dtype: Any, keep: int | None, n_tokens: int) -> None:
    plan = make_plan(3, n_tokens, "demo", kv_dtype=kv_dtype, keep=keep)
    lens = [min(159, n_tokens - start) + 1 for start in range(0, n_tokens, 159)]  # 159 tokens and BOS
    assert plan.chunks == 3 * len(lens)
    assert plan.tokens == 3 * sum(lens)
    bytes_of_vector = {"bfloat16": 2 * 64, "int8": 64 + 4, "float32": 4 * 64}[kv_dtype]
    even = [sum(lens) / len(lens)] * len(lens)  # the plan cuts a document into chunks of one length
    rows = sum(min(length, keep or length) for length in even)
    assert plan.bytes == pytest.approx(3 * rows * 24 * 2 * 3 * bytes_of_vector, rel=0.01)


def test_more_accelerators_help_until_the_writer_is_the_limit() -> None:
    plan = make_plan(10**6, 1000, "dream")
    hours = plan.accelerator_seconds / 3600
    rate = unit_costs()["models"]["dream"]["write_gb_per_s"]["value"] * 1e9
    for row in plan.prefill:
        assert row.computing == pytest.approx(hours / row.accelerators)
        assert row.one_store == pytest.approx(max(hours / row.accelerators, plan.bytes / rate / 3600))
        assert row.store_each == pytest.approx(max(hours, plan.bytes / rate / 3600) / row.accelerators)
    assert [row.accelerators for row in make_plan(1, 1, "dream", accelerators=3).prefill] == [3]


def test_the_first_stage_is_sharded_until_it_is_no_longer_than_scoring() -> None:
    plan = make_plan(10**6, 1000, "llada", keep=64)
    assert [query.chunks for query in plan.queries] == [10**6, 10**7, 10**8, 10**9]
    for query in plan.queries:
        assert query.first_stage <= query.score
        assert query.first_stage * query.shards == pytest.approx(query.chunks * 443.2 / 100_000)
        assert query.total == pytest.approx(sum(query[2:7]))
    (nvme,) = [tier for tier in plan.tiers if tier.name == "nvme"]
    assert plan.queries[0].load == nvme.load_ms == pytest.approx(8 * 340.2 * 64 / 1024)


def test_the_command_prints_tables_formulas_and_sources_or_one_object(pdllm: Pdllm) -> None:
    argv = ("plan", "--documents", 1000, "--tokens-per-document", 500, "--model", "demo", "--gpus", 4)
    shown = pdllm(*argv, "--kv-dtype", "int8", "--keep", 64)
    assert shown.status == 0
    for part in (
        "4,000 chunks",
        "at most 64 rows",
        "assumed, not measured",
        "chunks = documents",
        "bench_prefill.json#",
    ):
        assert part in shown.out
    told = one_object(pdllm(*argv, "--json"))
    assert told == json.loads(json.dumps(make_plan(1000, 500, "demo", accelerators=4).as_dict()))
    with pytest.raises(ValueError, match="expected one of demo, dream, llada"):
        make_plan(1, 1, "gpt")
