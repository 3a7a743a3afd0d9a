"""`pdllm eval reuse`: what reading reused KV costs, against other ways to read the same chunks."""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli.bench_values import list_of
from pdllm_rag.cli.console import byte_size, progress, report, say, table
from pdllm_rag.cli.eval_report import estimate, estimated_difference, settings, where
from pdllm_rag.cli.opening import adapters, add_model
from pdllm_rag.cli.options import PLACEMENTS, POLICIES, add_counts
from pdllm_rag.cli.values import positive_int, seed

if TYPE_CHECKING:
    from rich.table import Table

    from pdllm_rag.config import AskOptions
    from pdllm_rag.evaluation import Question
    from pdllm_rag.evaluation.reuse import Item, Way
    from pdllm_rag.models import LoadedModel

# Spelled out, so that `--help` needs no model code; a test keeps them equal to the evaluation's.
FACTORS = ("policy", "kv_dtype", "placement", "order", "bos")
GENERATED = ("twohop", "onehop", "together")
DOCUMENTS, QUESTIONS = "examples/handbook", "examples/handbook_questions.jsonl"
N_GENERATED = 50


def add_parser(measures: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the measure."""
    parser = measures.add_parser(
        "reuse",
        help="compare stored KV with chunks encoded together: policies, stored dtypes, placements",
        description="Choose chunks for every question once, and answer it over just these in several ways: from stored "
        "KV (in float32, one after another, in document order, behind a BOS each), and with one factor changed. A line "
        "of --data is a JSON object as for qa; a context may be a list of texts, which are all read, the best first.",
    )
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--data", default=QUESTIONS, metavar="FILE", help=f"questions (default: {QUESTIONS})")
    data.add_argument(
        "--generated",
        type=list_of(str),
        default=[],
        metavar="A,B,...",
        help=f"instead, questions of our making: {', '.join(GENERATED)} (answers to be joined from two documents; "
        "stated in one; to be joined within one)",
    )
    parser.add_argument(
        "--documents",
        nargs="+",
        default=[DOCUMENTS],
        metavar="PATH",
        help=f"for questions without a context: where chunks are retrieved from (default: {DOCUMENTS})",
    )
    add_model(parser)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="compute dtype; in bfloat16 a bfloat16 store has nothing to lose (default: float32)",
    )
    parser.add_argument(
        "--vary",
        type=list_of(str),
        default="policy,kv_dtype",
        metavar="A,B,...",
        help=f"of {', '.join(FACTORS)} (default: policy,kv_dtype)",
    )
    parser.add_argument("--policy", choices=POLICIES, default="independent", help="of the base (default: independent)")
    parser.add_argument("--placement", choices=PLACEMENTS, default="sequential", help="likewise (default: sequential)")
    add_counts(parser, ("k", 4, "chunks retrieved and read"))
    parser.add_argument("--chunk-len", type=positive_int, metavar="N", help="(default: the model family's)")
    parser.add_argument(
        "--limit",
        type=positive_int,
        metavar="N",
        help=f"ask only the first N questions; how many are generated of each kind (default: all; {N_GENERATED})",
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of generated questions (default: 0)")
    parser.add_argument("--details", metavar="FILE", help="write each answer there, one JSON object per line")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the differences in F1 (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and no progress")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer in every way and report."""
    import torch

    from pdllm_rag.bench.machine import describe
    from pdllm_rag.bench.plots import check_plot
    from pdllm_rag.config import AskOptions
    from pdllm_rag.evaluation.plots import plot_reuse
    from pdllm_rag.evaluation.reuse import Outcome, Reader, Way, compare, summary
    from pdllm_rag.models import load_model

    check_plot(args.plot)
    ways = Way(policy=args.policy, placement=args.placement).variations(args.vary)
    sets = _questions(args)
    options = AskOptions(k=args.k, policy=args.policy, placement=args.placement, abstain=False)
    model = load_model(args.model, device=args.device, dtype=getattr(torch, args.dtype), **adapters(args))
    ways = _meaningful(ways, model)
    chunk_len = args.chunk_len or model.spec.family.chunk_len
    reader = Reader(model, options, chunk_len=chunk_len)
    figures: dict[str, Any] = {"data": args.generated or Path(args.data).name, "sets": {}}
    with ExitStack() as stack:
        details = stack.enter_context(open(args.details, "w", encoding="utf-8")) if args.details else None
        advance = stack.enter_context(progress(args, "Asking", len(ways) * sum(map(len, sets.values()))))

        def told(outcome: Outcome) -> None:
            advance()
            if details is not None:
                print(json.dumps(outcome.as_dict()), file=details, flush=True)

        for name, questions in sets.items():
            items = _items(args, model, options, questions, chunk_len)
            figures["sets"][name] = summary(compare(reader, items, ways, on_outcome=told))
    figures |= {
        "stored": {
            dtype: {
                "kv_bytes_per_1k_tokens": 1000 * model.fingerprint(dtype).bytes_per_token,
                "relative_l2_error": dict(zip("kv", (errors / norms).sqrt().tolist(), strict=True)),
            }
            for dtype, (errors, norms) in reader.rounding.items()
        },
        "settings": {**settings(model, options), "seed": args.seed},
        "machine": describe(model)._asdict(),
    }
    if args.plot:
        plot_reuse(figures, args.plot)
    tables = [_table(name, part) for name, part in figures["sets"].items()]
    if figures["stored"]:
        tables.append(_stored(figures["stored"]))
    return report(args, figures, tables, where(figures))


def _questions(args: argparse.Namespace) -> dict[str, list[Question]]:
    """Questions that have answers, by the name of their set."""
    from pdllm_rag.evaluation import read_questions
    from pdllm_rag.evaluation.twohop import make_question

    numbers = range(args.limit or N_GENERATED)
    if args.generated:
        return {kind: [make_question(kind, number, seed=args.seed) for number in numbers] for kind in args.generated}
    questions = [question for question in read_questions(args.data) if question.answers][: args.limit]
    if not questions:
        raise ValueError(f"no question of {args.data} has answers; expected some to compare")
    return {Path(args.data).name: questions}


def _meaningful(ways: list[Way], model: LoadedModel) -> list[Way]:
    """The ways that mean something for a model; without the base nothing does."""
    from pdllm_rag.policies import check_policy

    check_policy(ways[0].policy, model.spec)
    found = []
    for way in ways:
        try:
            check_policy(way.policy, model.spec)
            found.append(way)
        except ValueError as error:
            say("note", f"left out: {error}")
    return found


def _items(
    args: argparse.Namespace, model: LoadedModel, options: AskOptions, questions: list[Question], chunk_len: int
) -> list[Item]:
    from pdllm_rag.engine import RagEngine
    from pdllm_rag.evaluation.reuse import select

    with (
        tempfile.TemporaryDirectory(prefix="pdllm-reuse-") as folder,
        RagEngine.open(folder, model, kv_dtype="float32", options=options, chunk_len=chunk_len) as engine,
    ):
        if any(question.context is None for question in questions):
            prefilled = engine.prefill(args.documents)
            if prefilled.failed or not prefilled.added:
                why = "{}: {}".format(*prefilled.failed[0]) if prefilled.failed else "there is none"
                raise ValueError(f"not every document of {args.documents} went in; {why}")
        return list(select(engine, questions, args.k, chunk_len=chunk_len))


def _table(name: str, part: dict[str, Any]) -> Table:
    right = ("exact", "F1", "F1 against the base", "same text")
    filled = table(f"{name} (n = {part['n']})", "exact", "F1", "95 % interval", *right[2:], right=right)
    for way in part["ways"]:
        against = way["difference"]
        filled.add_row(
            way["name"],
            f"{way['exact']['value']:.3f}",
            *estimate(way["f1"]),
            estimated_difference(against["f1"]) if against else "-",
            f"{way['agreement']['value']:.3f}" if against else "-",
        )
    return filled


def _stored(figures: dict[str, Any]) -> Table:
    right = ("KV of 1,000 tokens", "L2 error of keys", "of values")
    filled = table("stored as", *right, right=right)
    for dtype, row in figures.items():
        error = row["relative_l2_error"]
        size = byte_size(round(row["kv_bytes_per_1k_tokens"]))
        filled.add_row(dtype, size, f"{error['k']:.2e}", f"{error['v']:.2e}")
    return filled
