"""`pdllm bench attention`: the Split-S kernel against other attentions and the device's limits."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli.bench_report import (
    DTYPES,
    add_device,
    add_output,
    check_files,
    chosen_device,
    quartiles,
    report,
    save,
    waiting,
)
from pdllm_rag.cli.bench_values import count, heads, list_of
from pdllm_rag.cli.console import say, table
from pdllm_rag.cli.values import positive_int

if TYPE_CHECKING:
    from rich.table import Table

BASELINES = ("sdpa", "flex", "varlen", "flashinfer")


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = benches.add_parser(
        "attention",
        help="the Split-S kernel, against torch's attentions and the GPU's limits",
        description="Time of one layer's attention: our kernel over keys in order, in scattered chunks, and in "
        "scattered chunks that still have to be placed (rope), against SDPA, FlexAttention, varlen_attn and "
        "FlashInfer, and against the copy and matrix-product rates of this device.",
    )
    add_device(parser)
    parser.add_argument(
        "--heads",
        type=list_of(heads),
        default="28/4,32/8,32/32",
        metavar="H/G,...",
        help="query and key/value heads (default: 28/4,32/8,32/32)",
    )
    for name, value, what in (
        ("rows", "32,128", "query rows"),
        ("context", "4096,8192,16384,32768", "rows of keys"),
        ("chunk", "256,1024", "rows of a chunk"),
    ):
        parser.add_argument(
            f"--{name}", type=list_of(count), default=value, metavar="N,...", help=f"{what} (default: {value})"
        )
    parser.add_argument("--head-dim", type=positive_int, default=128, metavar="N", help="elements of a head (128)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of queries and keys (default: bfloat16)")
    parser.add_argument("--repeat", type=positive_int, default=30, metavar="N", help="most rounds of a row (30)")
    parser.add_argument(
        "--against",
        type=list_of(str),
        default=",".join(BASELINES),
        metavar="NAME,...",
        help=f"baselines (default: {','.join(BASELINES)})",
    )
    parser.add_argument("--tune", action="store_true", help="also try other tiles and splits, and list the best")
    parser.add_argument(
        "--tune-seconds", type=positive_int, default=25, metavar="N", help="most seconds of a row's --tune (25)"
    )
    parser.add_argument("--out", metavar="FILE", help="write the JSON object to a file too, after every row")
    add_output(parser, plots="a layer's time over context length")
    parser.set_defaults(run=run_attention)


def run_attention(args: argparse.Namespace) -> int:
    """Measure and report; exit status 1 if a contender's result was wrong."""
    import torch

    from pdllm_rag.bench.attention import AttentionGrid, bench_attention, wrong_sides
    from pdllm_rag.bench.plots import plot_attention

    check_files(args)
    grid = AttentionGrid(
        heads=args.heads,
        n_rows=args.rows,
        contexts=args.context,
        chunk_lens=args.chunk,
        head_dim=args.head_dim,
        dtype=getattr(torch, args.dtype),
        families=args.against,
        tunes=args.tune,
        tune_s=args.tune_seconds,
    )
    with waiting(args):
        figures = bench_attention(
            grid,
            device=chosen_device(args.device),
            repeat=args.repeat,
            on_row=lambda so_far: save(args.out, so_far),
        )
    if args.plot:
        plot_attention(figures, args.plot)
    ceilings, machine = figures["ceilings"], figures["machine"]
    subject = (
        f"{figures['measures']}, {figures['dtype']}, head dim {figures['head_dim']}, on {machine['device']}: copies "
        f"{ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, matrix products {ceilings['flops_per_s'] / 1e12:.1f} TFLOP/s"
    )
    tables = [part for row in figures["rows"] for part in _tables(row)]
    report(args, figures, tables, subject)
    wrong = wrong_sides(figures)
    for line in wrong:
        say("error", line)
    return 1 if wrong else 0


def _tables(row: dict[str, Any]) -> list[Table]:
    floor, yardstick = row["floor"], _yardstick(row)
    title = f"{row['heads']} heads, {row['n_rows']} rows over {row['context']}"
    title += f": floor {floor['us']:.1f} us ({floor['bound']})"
    headers = (title, "us", "quartiles", "x floor", "eager us", f"/ {yardstick}")
    filled = table(*headers, right=headers[1:])
    ratios = row["ratios"][yardstick]
    for name, side in row["sides"].items():
        label = f"{name} ({side['kernel']} kernel)" if "kernel" in side else name
        eager = f"{side['eager_us']['median']:.1f}" if side["eager_us"] else ""
        ratio = f"{ratios[name]['median']:.2f}" if name in ratios else ""
        us = f"{side['us']['median']:.1f}"
        filled.add_row(label, us, quartiles(side["us"], 1), f"{side['over_floor']:.2f}", eager, ratio)
    tables = [filled]
    if row["skipped"]:
        reasons = table("not measured", "why")
        for name, reason in row["skipped"].items():
            reasons.add_row(name, reason[:100])
        tables.append(reasons)
    if "tuning" in row:
        tables.append(_tuning_table(row["tuning"]))
    return tables


def _tuning_table(tuning: dict[str, Any]) -> Table:
    title = f"tiles over {tuning['over']}, {tuning['tried']} of {tuning['of']} tried"
    filled = table(title, "splits", "us", right=("splits", "us"))
    for entry in tuning["best"]:
        filled.add_row("/".join(map(str, entry["tiles"].values())), str(entry["n_splits"]), f"{entry['us']:.1f}")
    if tuning["own_us"] is not None:
        filled.add_row("own choice", "", f"{tuning['own_us']:.1f}")
    for name, reason in tuning["failed"].items():
        filled.add_row(f"{name} cannot run: {reason[:60]}", "", "")
    return filled


def _yardstick(row: dict[str, Any]) -> str:
    """The variant of ours that a table's ratios are to: scattered chunks, the longest, else what there is."""
    names: list[str] = list(row["ratios"])
    return next((name for name in reversed(names) if "scattered" in name), names[-1])
