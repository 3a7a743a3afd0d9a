"""`pdllm bench attention|prefill` on shapes of random weights, here at tiny sizes on the CPU.

Triton's kernels run in its interpreter, which `conftest` turns on.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pdllm_rag.attention.split_choice import Tiles
from pdllm_rag.bench import attention as attention_bench
from pdllm_rag.bench import contenders, device_clock, plots, shapes
from pdllm_rag.bench.attention import AttentionGrid, bench_attention, wrong_sides
from pdllm_rag.bench.attention_tuning import tune
from pdllm_rag.bench.ceilings import Ceilings, measure_ceilings
from pdllm_rag.bench.device_clock import graphed, idle_ms, queued_ms
from pdllm_rag.bench.prefill_limits import bench_prefill_limits, flops_per_token
from pdllm_rag.bench.shapes import SHAPES, random_model
from pdllm_rag.bench.workload import AttentionShape, Workload, packed, padded, relative_error, unpacked, unpadded
from pdllm_rag.cli import bench as cli
from pdllm_rag.cli import bench_attention as attention_cli
from pdllm_rag.cli import bench_prefill as prefill_cli
from pdllm_rag.models import LoadedModel

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here, for the GPU only")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SPREAD = {"median", "q1", "q3"}
SHAPE = AttentionShape(6, 2, 16, 4, 32, (16,), torch.float32)
GRID = AttentionGrid(((6, 2),), (4,), (32,), (16,), head_dim=16, dtype=torch.float32)


def is_spread(value: dict[str, float]) -> bool:
    return set(value) == SPREAD and 0 < value["q1"] <= value["median"] <= value["q3"]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return random_model("tiny", CPU, torch.float32)


# -- random shapes -------------------------------------------------------------------------------------------


def test_a_shape_is_a_whole_model_without_files(model: LoadedModel) -> None:
    spec = model.spec
    assert (spec.family.name, spec.n_layers, spec.n_tokens, spec.vocab_size) == ("dream", 3, 280, 280)
    assert model.tokenizer.decode(model.tokenizer.encode("any text: 7 µg")) == "any text: 7 µg"
    weights = dict(model.backbone.model.named_parameters())
    assert all(bool((w == 1).all()) for name, w in weights.items() if "norm" in name)
    assert float(weights["model.embed_tokens.weight"].std()) == pytest.approx(0.02, rel=0.1)
    assert model.fingerprint("bfloat16").digest


def test_the_same_seed_gives_the_same_weights_and_layers_can_be_fewer(model: LoadedModel) -> None:
    again, other = (random_model("tiny", CPU, torch.float32, layers=1, seed=seed) for seed in (0, 1))
    head = model.backbone.model.model.embed_tokens.weight
    assert torch.equal(again.backbone.model.model.embed_tokens.weight, head)
    assert not torch.equal(other.backbone.model.model.embed_tokens.weight, head)
    assert again.spec.n_layers == 1
    assert len({m.weights_digest for m in (model, again, other)}) == 3


def test_the_real_shapes_are_those_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_fill", lambda *_: None)
    for name, (family, heads) in {"llada-8b": ("llada", (32, 32)), "sdar-8b": ("sdar", (32, 8))}.items():
        spec = random_model(name, CPU, torch.bfloat16, layers=1).spec
        assert (spec.family.name, (spec.n_heads, spec.n_kv_heads), spec.head_dim) == (family, heads, 128)
    config = SHAPES["dream-7b"].config
    assert [config[key] for key in ("num_attention_heads", "num_key_value_heads", "hidden_size")] == [28, 4, 3584]


def test_unknown_shapes_and_no_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one of dream-7b"):
        random_model("dream-70b", CPU, torch.float32)
    with pytest.raises(ValueError, match="layers is 0"):
        random_model("tiny", CPU, torch.float32, layers=0)


# -- the clock and the ceilings ------------------------------------------------------------------------------


def test_runs_take_turns_and_stop_when_their_time_is_over() -> None:
    order: list[str] = []
    runs = {name: partial(order.append, name) for name in "ab"}
    ms = queued_ms(runs, 2, device=CPU, max_s=1)
    assert order == ["a", "b"] * 3
    assert {name: len(values) for name, values in ms.items()} == {"a": 2, "b": 2}
    assert len(idle_ms(runs, 50, device=CPU, max_s=0)["a"]) == 3
    with pytest.raises(ValueError, match="repeat is 0"):
        queued_ms(runs, 0, device=CPU, max_s=1)
    assert graphed(runs["a"], CPU) is runs["a"]


class FakeCuda:
    """torch.cuda as far as the clock needs it: recording an event takes a millisecond."""

    def __init__(self) -> None:
        self.now = 0
        self.captured: list[str] = []
        self.replays = 0

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        event = argparse.Namespace(at=0, elapsed_time=lambda other: other.at - event.at)

        def record() -> None:
            self.now += 1
            event.at = self.now

        event.record = record
        return event

    def CUDAGraph(self) -> Any:
        def replay() -> None:
            self.replays += 1
            self.now += 5

        return argparse.Namespace(replay=replay)

    def Stream(self) -> Any:
        return argparse.Namespace(wait_stream=lambda _: None)

    current_stream = Stream

    @contextmanager
    def stream(self, _: Any) -> Iterator[None]:
        self.captured.append("beside")
        yield
        self.captured.append("warm")

    @contextmanager
    def graph(self, _: Any) -> Iterator[None]:
        yield
        self.captured.append("graph")

    def synchronize(self, device: torch.device) -> None:
        assert device.type == "cuda"


def test_a_graph_is_warmed_up_captured_and_then_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, gpu = FakeCuda(), torch.device("cuda")
    monkeypatch.setattr(device_clock, "_cuda", cuda)
    run = graphed(lambda: cuda.captured.append("run"), gpu)
    assert cuda.captured == ["beside", "run", "run", "warm", "run", "graph"]
    assert queued_ms({"graph": run}, 4, device=gpu, max_s=1) == {"graph": [6.0] * 4}
    assert cuda.replays == 5
    assert idle_ms({"graph": run}, 2, device=gpu, max_s=1) == {"graph": [6.0] * 2}
    assert len(cuda.captured) == 6


def test_a_floor_is_the_larger_of_both_times() -> None:
    ceilings = Ceilings(copy_bytes_per_s=100.0, flops_per_s=1000.0)
    assert (ceilings.floor_s(50, 100), ceilings.bound(50, 100)) == (0.5, "memory")
    assert (ceilings.floor_s(50, 2000), ceilings.bound(50, 2000)) == (2.0, "compute")
    measured = measure_ceilings(CPU, torch.float32)
    assert min(measured) > 1e6


# -- the kernel ----------------------------------------------------------------------------------------------


def test_a_shape_counts_its_bytes_and_operations() -> None:
    shape = AttentionShape(28, 4, 128, 32, 8192, (256, 1024), torch.bfloat16)
    assert shape.kv_bytes == 2 * 8192 * 4 * 128 * 2
    assert shape.flops == 4 * 32 * 28 * 128 * 8192
    assert shape.n_sets == 28
    small = AttentionShape(28, 4, 128, 32, 1024, (256,), torch.bfloat16)
    assert small.n_sets * small.kv_bytes >= 200_000_000
    with pytest.raises(ValueError, match="in chunks of 24"):
        AttentionShape(2, 2, 16, 4, 32, (24,), torch.float32)
    with pytest.raises(ValueError, match="a multiple"):
        AttentionShape(3, 2, 16, 4, 32, (16,), torch.float32)


def test_scattered_chunks_are_no_neighbours() -> None:
    workload = Workload(AttentionShape(2, 2, 16, 4, 128, (16,), torch.float32), CPU, n_sets=1)
    table = workload.scattered(16)
    assert sorted(table.starts) == [32 * number for number in range(8)] != list(table.starts)
    assert table.coalesced() == table
    placed = workload.placed(16)
    assert placed.starts == table.starts
    assert placed.offsets == tuple(range(0, 128, 16))
    assert workload.k[0].shape == (256, 2, 16)


def test_packed_and_padded_heads_come_back() -> None:
    q = torch.randn(5, 6, 4)
    assert packed(q, 2).shape == (15, 2, 4)
    assert torch.equal(unpacked(packed(q, 2), 3), q)
    wide = padded(q, 2, 4)
    assert wide.shape == (5, 8, 4)
    assert not wide[:, 3].any()
    assert torch.equal(unpadded(wide, 2, 3), q)


def test_nothing_but_a_finite_result_has_a_finite_error() -> None:
    truth = torch.ones(2, dtype=torch.float64)
    assert relative_error(torch.tensor([1.0, math.nan]), truth) == math.inf
    assert relative_error(torch.tensor([1.0, 2.0]), truth) == pytest.approx(1 / math.sqrt(2))


@pytest.fixture(scope="module")
def attention_figures() -> dict[str, Any]:
    if torch.cuda.is_available():
        pytest.skip("Triton compiles here, for the GPU only")
    return bench_attention(GRID, device=CPU, repeat=2)


def test_every_contender_is_measured_or_says_why_not(attention_figures: dict[str, Any]) -> None:
    (row,) = attention_figures["rows"]
    ours = {"ours, in order", "ours, scattered 16", "ours, placed 16"}
    assert set(row["sides"]) == ours | {"sdpa, packed rows", "sdpa, enable_gqa"}
    for name, side in row["sides"].items():
        assert is_spread(side["us"]), name
        assert side["error"] < 1e-5
        assert side["over_floor"] == pytest.approx(side["us"]["median"] / row["floor"]["us"])
    assert row["sides"]["ours, scattered 16"]["n_splits"] >= 1
    named = set(row["sides"]) | set(row["skipped"])
    assert {name.split(",")[0] for name in named} == {"ours", "sdpa", "flex", "varlen", "flashinfer"}
    assert "flex, padded to 8/2" in row["skipped"]
    assert "not installed" in row["skipped"]["flashinfer, in order"] or "flashinfer, in order" in row["sides"]
    assert wrong_sides(attention_figures) == []
    json.dumps(attention_figures)


def test_ratios_are_baselines_over_ours(attention_figures: dict[str, Any]) -> None:
    (row,) = attention_figures["rows"]
    assert set(row["ratios"]) == {"ours, in order", "ours, scattered 16", "ours, placed 16"}
    for mine, ratios in row["ratios"].items():
        assert set(ratios) == {"sdpa, packed rows", "sdpa, enable_gqa"}
        for name, ratio in ratios.items():
            parts = row["sides"][name]["us"]["median"] / row["sides"][mine]["us"]["median"]
            assert ratio["q1"] * 0.3 < parts < ratio["q3"] * 3
    assert row["fastest"]["sdpa"] in ("sdpa, packed rows", "sdpa, enable_gqa")


def test_a_floor_stands_on_the_ceilings_of_the_same_run(attention_figures: dict[str, Any]) -> None:
    (row,) = attention_figures["rows"]
    ceilings, floor = attention_figures["ceilings"], row["floor"]
    times = floor["kv_bytes"] / ceilings["copy_bytes_per_s"], floor["flops"] / ceilings["flops_per_s"]
    assert floor["us"] == pytest.approx(max(times) * 1e6)
    assert floor["bound"] == ("memory" if times[0] >= times[1] else "compute")


@interpreted
def test_a_wrong_result_is_reported_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    true_ones = attention_bench.contenders

    def with_a_wrong_one(workload: Workload, families: tuple[str, ...]) -> Any:
        makers = true_ones(workload, families)
        table = workload.in_order()
        makers["sdpa, wrong"] = lambda: contenders.Contender("sdpa", table, lambda index: workload.q[index])
        return makers

    monkeypatch.setattr(attention_bench, "contenders", with_a_wrong_one)
    figures = bench_attention(AttentionGrid(**{**vars(GRID), "families": ()}), device=CPU, repeat=1)
    (row,) = figures["rows"]
    assert "sdpa, wrong" not in row["sides"]
    (line,) = wrong_sides(figures)
    assert line.startswith("sdpa, wrong (6/2, 4 rows, 32): wrong: relative error")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("ratio", [3, 4])
def test_flex_attention_agrees_in_order_and_after_a_gather(ratio: int) -> None:
    workload = Workload(SHAPE, CPU, n_sets=2)
    flex = contenders._Flex(workload, ratio, compiler=lambda function: function)
    for contender in (flex.in_order(), flex.gathering(16)):
        assert relative_error(contender.unpack(contender.call(0)), workload.truth(contender.table)) < 1e-5
        assert contender.notes == {"kernel": "unknown"}


def test_varlen_attention_is_asked_for_pages_and_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(SHAPE, CPU, n_sets=1)
    workload.device = torch.device("cuda")  # what it would be given there
    asked: list[Any] = []
    real = torch.tensor

    def tensor(*arguments: Any, device: Any = None, **options: Any) -> torch.Tensor:
        del device
        return real(*arguments, **options)

    def varlen_attn(
        q: Any, k: Any, *others: Any, seqused_k: Any = None, block_table: Any = None, num_splits: int | None = None
    ) -> torch.Tensor:
        _, ends_q, ends_k, most_q, most_k = others
        assert (ends_q.tolist(), ends_k.tolist()) == ([0, most_q], [0, most_k])
        asked.append((k.shape, most_q, most_k, seqused_k, block_table, num_splits))
        return torch.zeros_like(q)

    monkeypatch.setattr(contenders.torch, "tensor", tensor)
    monkeypatch.setattr(contenders, "import_module", lambda _: argparse.Namespace(varlen_attn=varlen_attn))
    contender = contenders._varlen(workload, 16, 4, packs=True)
    assert contender.unpack(contender.call(0)).shape == (4, 6, 16)
    ((shape, most_q, most_k, seqused, table, splits),) = asked
    assert (shape, most_q, most_k, seqused.tolist(), splits) == ((4, 16, 2, 16), 12, 32, [32], 4)
    assert [16 * slot for slot in table[0].tolist()] == list(contender.table.starts)
    with pytest.raises(contenders.Unavailable, match="has no enable_gqa"):
        contenders._varlen(workload, None, None, packs=False)


@interpreted
def test_tuning_tries_tiles_and_splits_within_its_time() -> None:
    workload = Workload(SHAPE, CPU, n_sets=1)
    tiles = (Tiles(16, 16, 4, 2), Tiles(16, 32, 4, 2), Tiles(64, 64, 4, 3))
    found = tune(workload, {"ours, scattered 16": {"us": {"median": 5.0}}}, tiles=tiles)
    assert found["tried"] == found["of"] == len(found["best"]) == 2
    assert [entry["us"] for entry in found["best"]] == sorted(entry["us"] for entry in found["best"])
    assert {entry["tiles"]["block_m"] for entry in found["best"]} == {16}
    assert [entry[:5] for entry in found["all"]] == [
        [*entry["tiles"].values(), entry["n_splits"]] for entry in found["best"]
    ]
    assert (found["own_us"], found["over"], found["failed"]) == (5.0, "scattered 16", {})
    assert tune(workload, {}, max_s=0)["tried"] == 0


@pytest.mark.gpu
@on_gpu
def test_kernels_are_timed_in_graphs_on_a_gpu() -> None:
    grid = AttentionGrid(((6, 2),), (32,), (2048,), (256,), head_dim=64, tunes=True, tune_s=2)
    figures = bench_attention(grid, device=torch.device("cuda"), repeat=5)
    (row,) = figures["rows"]
    assert {"ours, scattered 256", "sdpa, packed rows", "flex, in order", "flex, gathers 256"} <= set(row["sides"])
    assert all(is_spread(side["eager_us"]) for side in row["sides"].values())
    assert row["sides"]["flex, in order"]["kernel"] == "main"
    assert row["tuning"]["tried"] > 0
    assert wrong_sides(figures) == []


def test_a_grid_with_an_unknown_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match="'cudnn' is unknown"):
        AttentionGrid(families=("cudnn",))


def test_our_kernel_must_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="the device is cpu"):
        bench_attention(GRID, device=CPU, repeat=1)


# -- prefill -------------------------------------------------------------------------------------------------


def test_prefill_says_what_it_is_held_up_by(model: LoadedModel, tmp_path: Path) -> None:
    found = bench_prefill_limits(model, batch=2, chunk_len=8, batches=2, repeat=2, folder=str(tmp_path))
    assert found["shapes"] == {"batch": 2, "batches": 2, "chunk_len": 8, "tokens": 32}
    assert all(is_spread(found[part]["tokens_per_s"]) for part in ("compute", "host", "store"))
    rates = found["limit"]["tokens_per_s"]
    assert set(rates) == {"compute", "copy", "disk"}
    assert rates[found["limit"]["is"]] == min(rates.values())
    share = found["compute"]["flops_per_token"] * rates["compute"] / found["matmul_flops_per_s"]
    assert found["compute"]["matmul_share"] == pytest.approx(share)
    assert rates["disk"] == pytest.approx(found["disk"]["bytes_per_s"]["median"] / found["kv_bytes_per_token"])
    assert not list(tmp_path.iterdir())
    json.dumps(found)
    with pytest.raises(ValueError, match="chunk_len 1"):
        bench_prefill_limits(model, chunk_len=1)


def test_what_the_last_layer_is_spared_is_not_counted(model: LoadedModel) -> None:
    # 64 wide, 4 heads and 2 key/value heads of 16, 96 inner; biases of q, k and v
    attention, output, mlp = 64 * (64 + 2 * 32) + 64 + 2 * 32, 64 * 64, 3 * 64 * 96
    norms = 2 * 64
    weights = 3 * (attention + norms) + 2 * (output + mlp)
    assert flops_per_token(model, 10) == 2 * weights + 4 * 10 * 4 * 16 * 3


def test_too_small_a_disk_is_refused(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = argparse.Namespace(free=100)
    monkeypatch.setattr("pdllm_rag.bench.prefill_limits.shutil.disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match="100 bytes free"):
        bench_prefill_limits(model, batch=2, chunk_len=8, batches=2, repeat=1)


# -- the commands --------------------------------------------------------------------------------------------


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs `pdllm bench ...` and gives its status and stdout."""

    def run(*argv: str) -> tuple[int, str]:
        parser = argparse.ArgumentParser()
        cli.add_parser(parser.add_subparsers())
        args = parser.parse_args(["bench", *argv])
        status: int = args.run(args)
        return status, capsys.readouterr().out

    return run


ATTENTION = ("attention", "--device", "cpu", "--heads", "6/2", "--rows", "4", "--context", "32", "--chunk", "16")
ATTENTION += ("--head-dim", "16", "--dtype", "float32", "--repeat", "1")


@interpreted
def test_attention_prints_json_writes_it_and_draws(command: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, out = tmp_path / "a.png", tmp_path / "a.json"
    status, text = command(*ATTENTION, "--against", "sdpa", "--plot", str(picture), "--out", str(out), "--json")
    assert status == 0
    assert json.loads(out.read_text()) == json.loads(text)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_attention_prints_tables(
    command: Any, attention_figures: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = {"over": "scattered 16", "own_us": 3.0, "tried": 1, "of": 2, "failed": {"1/1/1/1": "no room"}}
    tuning["best"] = [{"tiles": {"block_m": 16, "block_n": 64}, "n_splits": 2, "us": 1.5}]
    (row,) = attention_figures["rows"]
    wrong = {**row, "tuning": tuning, "skipped": {**row["skipped"], "sdpa, x": "wrong: relative error 1"}}
    figures = {**attention_figures, "rows": [wrong]}
    monkeypatch.setattr(attention_bench, "bench_attention", lambda *_, **__: figures)
    status, text = command(*ATTENTION)
    assert status == 1
    for part in ("6/2 heads, 4 rows over 32: floor", "ours, placed 16", "/ ours, scattered 16", "not measured"):
        assert part in text
    for part in ("16/64", "1 of 2 tried", "own choice", "1/1/1/1 cannot run", "TFLOP/s"):
        assert part in text


def test_prefill_takes_a_shape(command: Any, tmp_path: Path) -> None:
    sizes = ("--batch", "1", "--batches", "2", "--chunk-len", "8", "--repeat", "1", "--dir", str(tmp_path))
    shape = ("--shape", "tiny", "--layers", "1", "--device", "cpu", "--dtype", "float32")
    status, text = command("prefill", *shape, *sizes, "--json")
    figures = json.loads(text)
    assert (status, figures["model"], figures["limits"]["shapes"]["batches"]) == (0, "tiny", 2)
    assert "the limit" in command("prefill", *shape, *sizes)[1]
    with pytest.raises(ValueError, match="without --shape"):
        command("prefill", "--layers", "1")


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for bench in (ATTENTION, ("decode", "--shape", "tiny")):
        with pytest.raises(ValueError, match="run pip install matplotlib"):
            command(*bench, "--plot", "x.png")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(command: Any) -> None:
    with pytest.raises(ValueError, match="sees no GPU"):
        command("attention", "--device", "cuda")


@pytest.mark.parametrize("argv", [("--heads", "28"), ("--heads", "7/2"), ("--context", "8kb"), ("--rows", "0")])
def test_sizes_that_are_none_are_refused(command: Any, argv: tuple[str, str]) -> None:
    with pytest.raises(SystemExit):
        command("attention", *argv)


@pytest.mark.parametrize(("given", "asked"), [((), "auto"), (("--device", "cpu"), "cpu")])
def test_a_checkpoint_runs_where_the_help_says(
    monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], asked: str
) -> None:
    seen: list[str] = []

    def choose(name: str | None) -> torch.device:
        seen.append(name or "auto")
        return torch.device("meta")

    monkeypatch.setattr(prefill_cli, "chosen_device", choose)
    monkeypatch.setattr("pdllm_rag.models.load_model", lambda name, *, device, **_: (name, device))
    parser = argparse.ArgumentParser()
    prefill_cli.add_model(parser)
    assert prefill_cli.chosen_model(parser.parse_args(given)) == ("demo", "meta")
    assert seen == [asked]


def test_the_command_lines_name_what_there_is() -> None:
    assert tuple(SHAPES) == prefill_cli.SHAPE_NAMES
    assert attention_cli.BASELINES == contenders.FAMILIES


def test_plots_have_a_line_for_the_fastest_of_each_family(attention_figures: dict[str, Any]) -> None:
    lines = plots._lines(attention_figures["rows"])
    assert [name for name, _ in lines.values()] == [
        "ours, in order",
        "ours, scattered 16",
        "ours, placed 16",
        "sdpa",
    ]
