"""`pdllm bench prefill`: how fast chunks are encoded, and what it is held up by."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli.bench_report import (
    DTYPES,
    add_device,
    add_output,
    chosen_device,
    model_subject,
    quartiles,
    report,
    waiting,
)
from pdllm_rag.cli.console import table
from pdllm_rag.cli.opening import adapters, add_adapters
from pdllm_rag.cli.options import add_counts
from pdllm_rag.cli.values import positive_int

if TYPE_CHECKING:
    from rich.table import Table

    from pdllm_rag.models import LoadedModel

SHAPE_NAMES = ("dream-7b", "llada-8b", "sdar-8b", "tiny")


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = benches.add_parser(
        "prefill",
        help="encoding chunks, against transformers' forward",
        description="Tokens per second of encoding chunks, against transformers' own forward of the same "
        "weights and batch, and of encoding and writing them to a store. With --limits or --shape also what prefill "
        "is held up by: computing (against a large matrix product), copying KV to the host, or the disk.",
    )
    add_model(parser)
    add_counts(
        parser, ("batch", 4, "chunks a batch"), ("chunk-len", 256, "tokens of a chunk"), ("repeat", 10, "repetitions")
    )
    parser.add_argument("--limits", action="store_true", help="measure the parts of a prefill too (--shape: always)")
    add_counts(parser, ("batches", 4, "batches of one round of the parts"))
    parser.add_argument("--dir", metavar="DIR", help="write under this folder (default: the system's temporary one)")
    add_output(parser)
    parser.set_defaults(run=run_prefill)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add what says which model: `--model`, or `--shape` of a random one, and where it runs."""
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--model", default="demo", help="bundled model or checkpoint folder (default: demo)")
    models.add_argument("--shape", choices=SHAPE_NAMES, help="random weights of this shape instead of a model")
    add_device(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="compute dtype (default: of a shape bfloat16, else the faster)")
    parser.add_argument("--layers", type=positive_int, metavar="N", help="fewer layers of a shape, to try things out")
    add_adapters(parser)


def chosen_model(args: argparse.Namespace) -> LoadedModel:
    """The model of a command line.

    Raises:
        ValueError: `--layers` without `--shape`; else as `load_model` and `random_model`.
    """
    import torch

    from pdllm_rag import models
    from pdllm_rag.bench.shapes import random_model

    dtype = getattr(torch, args.dtype) if args.dtype else None
    if args.shape:
        return random_model(args.shape, chosen_device(args.device), dtype or torch.bfloat16, layers=args.layers)
    if args.layers:
        raise ValueError("--layers was given without --shape; a checkpoint has the layers that it has")
    return models.load_model(args.model, device=str(chosen_device(args.device)), dtype=dtype, **adapters(args))


def run_prefill(args: argparse.Namespace) -> int:
    """Measure the encoding of chunks and report."""
    from pdllm_rag.bench.prefill import bench_prefill
    from pdllm_rag.bench.prefill_limits import bench_prefill_limits

    with waiting(args):
        model = chosen_model(args)
        sizes = {"batch": args.batch, "chunk_len": args.chunk_len, "repeat": args.repeat}
        figures = bench_prefill(model, **sizes, folder=args.dir)
        tables = [_prefill_table(figures)]
        if args.limits or args.shape:
            figures["limits"] = bench_prefill_limits(model, **sizes, batches=args.batches, folder=args.dir)
            tables.append(_limits_table(figures["limits"]))
    return report(args, figures, tables, model_subject(figures))


def _prefill_table(figures: dict[str, Any]) -> Table:
    shapes, encode, write = figures["shapes"], figures["encode"], figures["write"]
    size = f"{shapes['batch']} chunks of {shapes['chunk_len']} tokens"
    headers = (size, "tokens/s", "quartiles", "ratio", "quartiles")
    rows = table(*headers, right=headers[1:])
    theirs, ours = encode["dividend"]["tokens_per_s"], encode["divisor"]["tokens_per_s"]
    rows.add_row("transformers' forward", f"{theirs['median']:.0f}", quartiles(theirs, 0), "", "")
    ratio = f"{encode['ratio']['median']:.2f}", quartiles(encode["ratio"], 2)
    rows.add_row("ours, KV captured", f"{ours['median']:.0f}", quartiles(ours, 0), *ratio)
    speed = write["tokens_per_s"]
    label = f"ours, written to disk ({write['mib_per_s']['median']:.1f} MiB/s)"
    rows.add_row(label, f"{speed['median']:.0f}", quartiles(speed, 0), "", "")
    return rows


def _limits_table(limits: dict[str, Any]) -> Table:
    shapes, limit = limits["shapes"], limits["limit"]
    title = f"{shapes['batches']} batches of {shapes['batch']} chunks of {shapes['chunk_len']} tokens"
    rows = table(title, "tokens/s", "quartiles", "", right=("tokens/s", "quartiles"))
    share = f"{limits['compute']['matmul_share']:.0%} of {limits['matmul_flops_per_s'] / 1e12:.2f} TFLOP/s"
    remarks = {
        "compute": share,
        "host": f"{limit['host_share']:.0%} of the slower of computing and copying",
        "store": f"{limits['store']['bytes_per_s']['median'] / 1e9:.2f} GB/s, {limit['store_share']:.0%} of the limit",
    }
    for name, remark in remarks.items():
        speed = limits[name]["tokens_per_s"]
        rows.add_row(limits[name]["what"], f"{speed['median']:.0f}", quartiles(speed, 0), remark)
    copies = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in limits["host"]["copy_bytes_per_s"].items())
    disk = f"{limits['disk']['bytes_per_s']['median'] / 1e9:.2f} GB/s"
    for name, label, remark in (("copy", "copies to the host alone", copies), ("disk", limits["disk"]["what"], disk)):
        marked = f"{remark}, the limit" if limit["is"] == name else remark
        rows.add_row(label, f"{limit['tokens_per_s'][name]:.0f}", "", marked)
    return rows
