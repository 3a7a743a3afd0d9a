"""`pdllm eval anchors`: how much of the answer's attention the BOS of each chunk takes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli.bench_values import count, list_of
from pdllm_rag.cli.console import progress, report, table
from pdllm_rag.cli.eval_report import where
from pdllm_rag.cli.opening import adapters, add_model
from pdllm_rag.cli.options import PLACEMENTS, add_counts
from pdllm_rag.cli.values import positive_int, seed

if TYPE_CHECKING:
    from rich.table import Table

LABELS = {"each": "a BOS in each chunk", "none": "no BOS", "first": "one dense text, one BOS"}


def add_parser(measures: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the measure."""
    parser = measures.add_parser(
        "anchors",
        help="attention on the BOS of each chunk",
        description="Measure which share of their attention the answer's rows put on the first row of each chunk, in "
        "the first denoising step: with a BOS in each chunk, without any, and over one dense text behind one BOS.",
    )
    add_model(parser)
    parser.add_argument(
        "--lengths", type=list_of(count), default="1k", metavar="A,B,...", help="tokens of contexts (default: 1k)"
    )
    parser.add_argument(
        "--chunk-len", type=positive_int, metavar="N", help="tokens of a chunk (default: the model family's)"
    )
    add_counts(parser, ("questions", 4, "of each context"))
    parser.add_argument("--placement", choices=PLACEMENTS, default="sequential", help="(default: sequential)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of contexts and questions (default: 0)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the masses over the context (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and no progress")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure the masses and report."""
    from pdllm_rag.bench.machine import describe
    from pdllm_rag.bench.plots import check_plot
    from pdllm_rag.evaluation.anchors import ANCHORS, measure_anchors
    from pdllm_rag.evaluation.plots import plot_anchors
    from pdllm_rag.models import load_model

    check_plot(args.plot)
    model = load_model(args.model, device=args.device, **adapters(args))
    chunk_len = args.chunk_len or model.spec.family.chunk_len
    with progress(args, "Measuring", len(args.lengths) * len(ANCHORS) * args.questions) as advance:
        masses = measure_anchors(
            model,
            lengths=args.lengths,
            chunk_len=chunk_len,
            questions=args.questions,
            placement=args.placement,
            seed=args.seed,
            on_question=advance,
        )
    figures = {
        "masses": masses,
        "settings": {
            "model": model.spec.name,
            "weights": model.weights_digest,
            "chunk_len": chunk_len,
            "questions": args.questions,
            "placement": args.placement,
            "seed": args.seed,
        },
        "machine": describe(model)._asdict(),
    }
    if args.plot:
        plot_anchors(figures, args.plot)
    closing = f"Shares of the attention of the answer's rows, in %. {where(figures)}"
    return report(args, figures, [_table(masses)], closing)


def _table(masses: list[dict[str, Any]]) -> Table:
    headers = ("context", "tokens", "first row of chunks 1, 2, ...", "together", "largest/mean", "other rows", "canvas")
    filled = table(*headers, right=("tokens", "together", "largest/mean", "other rows", "canvas"))
    for one in masses:
        filled.add_row(
            LABELS[one["anchors"]],
            str(one["length"]),
            " ".join(f"{100 * mass:.2f}" for mass in one["head"]),
            f"{100 * one['heads_in_all']:.1f}",
            f"{one['largest_head_by_mean']:.1f}",
            f"{100 * sum(one['rest']):.1f}",
            f"{100 * one['canvas']:.1f}",
        )
    return filled
