"""`pdllm eval`: how good the answers over a store are."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli import eval_anchors, eval_long_context, eval_needle, eval_retrieval, eval_reuse
from pdllm_rag.cli.console import progress, report, table
from pdllm_rag.cli.eval_report import estimate, settings
from pdllm_rag.cli.opening import add_model, add_store, is_store_given, open_engine
from pdllm_rag.cli.options import add_asking, add_min_support, asking_options
from pdllm_rag.cli.values import positive_int

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from pdllm_rag.config import AskOptions
    from pdllm_rag.engine import RagEngine
    from pdllm_rag.evaluation import Outcome, Question
    from pdllm_rag.evaluation.kept import KeptRows

ANSWERABLE_ROWS = (
    ("accuracy", "accurate (exact or contained)"),
    ("accuracy_without_abstaining", "accurate with abstaining off"),
    ("exact", "exact"),
    ("f1", "token F1"),
    ("false_refusals", "refused"),
    ("recall_at_1", "recall@1"),
    ("recall_at_4", "recall@4"),
    ("mrr", "reciprocal rank (first 4)"),
    ("bm25_recall_at_1", "recall@1, BM25 alone"),
    ("bm25_recall_at_4", "recall@4, BM25 alone"),
)
DETAILS = "keep each outcome there, one JSON object per line; questions that it holds are not asked again"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its subcommands."""
    parser = commands.add_parser("eval", help="measure answers and retrieval", description="Measure quality.")
    measures = parser.add_subparsers(metavar="MEASURE", dest="measure", required=True)
    qa = measures.add_parser(
        "qa",
        help="ask a file of questions with known answers",
        description="Ask every question of a file over a store. Answers are compared with the accepted ones, "
        "retrieved chunks with the documents that hold the answer, refusals with the questions that have "
        "none. A line is a JSON object: question, answers, doc_ids, kind (answerable, unrelated, near_miss).",
    )
    qa.add_argument("--data", required=True, metavar="FILE", help="questions, one JSON object per line")
    about = "folder or URL of the store; not needed if every row has a context"
    add_store(qa, help=about, required=False, may_read_only=True)
    add_model(qa)
    add_asking(qa)
    add_min_support(qa)
    qa.add_argument("--plot", metavar="FILE.png", help="draw refusals along --min-support there (needs matplotlib)")
    qa.add_argument("--limit", type=positive_int, metavar="N", help="ask only the first N questions")
    qa.add_argument("--details", metavar="FILE", help=DETAILS)
    qa.add_argument("--json", action="store_true", help="print one JSON object and no progress")
    qa.set_defaults(run=run_qa)
    eval_needle.add_parser(measures)
    eval_anchors.add_parser(measures)
    eval_retrieval.add_parser(measures)
    eval_reuse.add_parser(measures)
    eval_long_context.add_parser(measures)


def run_qa(args: argparse.Namespace) -> int:
    """Ask the questions and report."""
    from pdllm_store import MemoryStore

    from pdllm_rag.bench.machine import describe
    from pdllm_rag.bench.plots import check_plot
    from pdllm_rag.engine import RagEngine
    from pdllm_rag.evaluation import read_questions, summary
    from pdllm_rag.evaluation.kept import KeptRows
    from pdllm_rag.evaluation.plots import plot_refusals
    from pdllm_rag.evaluation.qa import by_min_support

    check_plot(args.plot)
    questions = read_questions(args.data, limit=args.limit)
    if args.plot is not None and len({question.kind == "answerable" for question in questions}) < 2:
        raise ValueError(
            f"--plot draws refusals of unanswerable questions against those of answerable ones; {args.data} has only "
            "one of the two"
        )
    options = asking_options(args, min_support=args.min_support)
    has_store = is_store_given(args)
    if not has_store and any(question.context is None for question in questions):
        raise ValueError("--store is missing and not every question brings its context; expected a store's folder")
    with ExitStack() as stack:
        opened = open_engine(args) if has_store else RagEngine.open(MemoryStore(), args.model, device=args.device)
        engine = stack.enter_context(opened)
        asked = {**settings(engine.model, options), "kv_dtype": engine.fingerprint.kv_dtype}
        kept = KeptRows(args.details, {**asked, "generation": engine.store.generation if has_store else None})
        outcomes = _ask(args, engine, questions, options, kept)
        figures = {
            "data": args.data,
            **summary(outcomes),
            "by_min_support": by_min_support(outcomes),
            "settings": {**asked, "store": Path(engine.store.path).name},
            "machine": describe(engine.model)._asdict(),
        }
    if args.plot is not None:
        plot_refusals(figures, args.plot)
    return report(args, figures, _tables(figures))


def _ask(
    args: argparse.Namespace, engine: RagEngine, questions: Sequence[Question], options: AskOptions, kept: KeptRows
) -> list[Outcome]:
    """The outcomes of all questions, those that are kept without asking them again."""
    from pdllm_rag.evaluation import Outcome, ask_all

    left = [question for question in questions if (question.id, question.text) not in kept]
    with progress(args, "Asking", len(left)) as advance:
        for outcome in ask_all(engine, left, options):
            kept.add(outcome.as_dict())
            advance()
    return [Outcome.of_row(question, kept[question.id, question.text]) for question in questions]


def _tables(figures: dict[str, Any]) -> list[Table]:
    headers = ("questions", "measure", "value", "95 % interval", "n")
    quality = table(*headers, right=headers[2:])
    answerable = figures["answerable"]
    for key, label in ANSWERABLE_ROWS:
        n = answerable["n_retrieval" if "recall" in key or key == "mrr" else "n"]
        quality.add_row("answerable", label, *estimate(answerable[key]), str(n))
    for kind in ("unrelated", "near_miss"):
        part = figures[kind]
        quality.add_row(kind.replace("_", " "), "refused", *estimate(part["refused"]), str(part["n"]))
    cost = table("cost", "median", "90th percentile", right=("median", "90th percentile"))
    for key, label in (("nfe", "forward passes"), ("ms", "total ms")):
        cost.add_row(label, f"{figures[key]['median']:.0f}", f"{figures[key]['p90']:.0f}")
    for phase, median in figures["ms"]["phases"].items():
        cost.add_row(f"{phase.replace('_', ' ')} ms", f"{median:.1f}", "")
    kinds = [kind for kind in ("answerable", "unrelated", "near_miss") if figures[kind]["n"]]
    refusals = table("refused with --min-support", *(kind.replace("_", " ") for kind in kinds), "accuracy")
    for row in figures["by_min_support"]:
        cells = ["{} ({})".format(*estimate(row[key])) for key in (*kinds, "accuracy")]
        refusals.add_row(f"{row['min_support']:g}", *cells)
    return [quality, refusals, cost]
