"""Reading with several models: the same questions over the same chunks, each against the first model, paired.

    python examples/benchmarks/read_with_models.py --data questions.jsonl --out reading.json MODEL MODEL[:ADAPTER] ...

A line of --data is a JSON object: question, answers, context (a text or several; all their chunks are read).
Exact match and token F1 are SQuAD's; intervals are paired bootstraps.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pdllm_store import MemoryStore

from pdllm_rag.bench.machine import describe
from pdllm_rag.config import AskOptions
from pdllm_rag.engine import RagEngine
from pdllm_rag.evaluation import Question, read_questions
from pdllm_rag.evaluation.retrieval import differences, estimates
from pdllm_rag.evaluation.reuse import Reader, Way, compare, select
from pdllm_rag.models import load_model


def measured(name: str, questions: list[Question], policy: str) -> tuple[list[dict[str, float]], list[str], Any]:
    """Exact match and F1 of every question by one model."""
    model_name, _, adapter = name.partition(":")
    model = load_model(model_name, device="auto", adapter=adapter or None)
    options = AskOptions(policy=policy, abstain=False)
    chunk_len = model.spec.family.chunk_len
    with RagEngine.open(MemoryStore(), model) as engine:
        items = list(select(engine, questions, 4, chunk_len=chunk_len))
    outcomes = compare(Reader(model, options, chunk_len=chunk_len), items, [Way(policy=policy)])
    grades = [{"exact": float(one.grade.exact), "f1": one.grade.f1} for one in outcomes]
    return grades, [one.prediction for one in outcomes], describe(model)._asdict()


def main() -> None:
    """Read with each and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--data", required=True)
    parser.add_argument("--policy", default="independent")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    questions = [question for question in read_questions(args.data) if question.answers][: args.limit]
    found: dict[str, Any] = {"data": Path(args.data).name, "policy": args.policy, "n": len(questions), "models": {}}
    first: list[dict[str, float]] = []
    for name in args.models:
        grades, predictions, machine = measured(name, questions, args.policy)
        first = first or grades
        found["machine"] = machine
        found["models"][name] = {
            **estimates(grades),
            "against_first": None if grades is first else differences(grades, first),
            "predictions": predictions,
        }
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(name, {key: value for key, value in found["models"][name].items() if key != "predictions"}, flush=True)


if __name__ == "__main__":
    main()
