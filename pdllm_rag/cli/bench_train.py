"""`pdllm bench train`: how fast an adapter is trained."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli.bench_prefill import add_model, chosen_model
from pdllm_rag.cli.bench_report import add_output, model_subject, quartiles, report, waiting
from pdllm_rag.cli.bench_values import count
from pdllm_rag.cli.console import byte_size, table
from pdllm_rag.cli.options import add_counts

if TYPE_CHECKING:
    from rich.table import Table


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = benches.add_parser(
        "train",
        help="steps of training an adapter, against the matrix rate",
        description="Whole steps of `pdllm train chunk-lora` over random tokens, against the rate of a large matrix "
        "product measured in the same run.",
    )
    add_model(parser)
    add_counts(parser, ("rows", 4, "rows of a batch"))
    parser.add_argument("--context-len", type=count, default="2k", metavar="N", help="of a row (default: 2k)")
    parser.add_argument("--canvas-len", type=count, default="512", metavar="N", help="of a row (default: 512)")
    add_counts(parser, ("rank", 32, "of the adapter"), ("repeat", 5, "steps timed"))
    add_output(parser)
    parser.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Measure steps and report."""
    from pdllm_rag.bench.training import bench_training
    from pdllm_rag.training.adapters import LoraShape
    from pdllm_rag.training.items import Shape

    with waiting(args):
        shape = Shape(context_len=args.context_len, canvas_len=args.canvas_len)
        lora = LoraShape(args.rank, args.rank)
        figures = bench_training(chosen_model(args), n_rows=args.rows, shape=shape, lora=lora, steps=args.repeat)
    return report(args, figures, [_table(figures)], model_subject(figures))


def _table(figures: dict[str, Any]) -> Table:
    found = table("step of an adapter's training", "", right=("",))
    found.add_row("positions", f"{figures['positions']:,}")
    found.add_row("seconds (quartiles)", quartiles(figures["step_s"], 2))
    found.add_row("positions a second", f"{figures['positions_per_s']:,.0f}")
    found.add_row("share of the matrix rate", f"{figures['share_of_matmul_rate']:.2f}")
    if figures["peak_bytes"]:
        found.add_row("most memory", byte_size(figures["peak_bytes"]))
    return found
