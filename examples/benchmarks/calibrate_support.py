"""Fit how an answer's support is told for a checkpoint, and draw how well it then says how sure it is.

    python examples/benchmarks/calibrate_support.py --data questions.jsonl --near-misses near.jsonl --out support.json

A line of --data has question and context, the text that answers it; of --near-misses a context that does not. Every
question of --data is asked over its text among the seven that BM25 finds beside it (supported), over these seven alone
("taken out"), and over seven of other questions (unrelated). A logistic regression on the two signs of `Support` is
fitted on every second question, the three classes weighted to one half supported; the other questions tell how good it
is. Near misses are looked at, and play no part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pdllm_store import ChunkRef, MemoryStore

from pdllm_rag import CanvasUpdate, RagEngine
from pdllm_rag.bench.machine import describe
from pdllm_rag.first_stage import BM25Index, Candidate
from pdllm_rag.ingest import InputDocument
from pdllm_rag.models import load_model
from pdllm_rag.models.families import Support
from pdllm_rag.support import support_probability

N_OTHERS = 7
EDGES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


class Signs(NamedTuple):
    """What an answer's support is told from; `kind` is supported, taken out, unrelated or near miss."""

    kind: str
    probe: float
    margin: float


class These:
    """A first stage that finds what it is told."""

    def __init__(self, refs: Sequence[ChunkRef]) -> None:
        self._refs = refs

    def search(self, text: str, k: int, /, *, doc_ids: frozenset[str] | None = None) -> list[Candidate]:
        """All of them, whatever is asked."""
        del text, doc_ids
        return [Candidate(ref, 0.0) for ref in self._refs[:k]]


class Corpus:
    """The texts of all questions in one store."""

    def __init__(self, engine: RagEngine, texts: Sequence[str]) -> None:
        self._engine = engine
        self._ids = {text: f"{number}.txt" for number, text in enumerate(dict.fromkeys(texts))}
        engine.prefill([InputDocument(doc_id, text, doc_id) for text, doc_id in self._ids.items()])
        self._bm25 = BM25Index(engine.store, engine.fingerprint)
        self._rng = random.Random(0)

    def of(self, text: str) -> list[ChunkRef]:
        """Chunks of a text."""
        return list(self._engine.store.document(self._engine.fingerprint, self._ids[text]).chunks)

    def like(self, question: str, text: str) -> list[ChunkRef]:
        """Chunks of other texts, the likest first."""
        found = self._bm25.search(question, 4 * N_OTHERS)
        return [one.ref for one in found if one.ref.doc_id != self._ids[text]][:N_OTHERS]

    def unlike(self, text: str) -> list[ChunkRef]:
        """Chunks of texts that are drawn."""
        others = self._rng.sample([one for one in self._ids if one != text], N_OTHERS)
        return [self.of(one)[0] for one in others]

    def signs(self, kind: str, question: str, refs: Sequence[ChunkRef]) -> Signs:
        """Both signs of a question over these chunks."""
        chosen = self._engine.retrieve(question, 4, candidates=len(refs), first_stage=These(refs), score_window=None)
        read = [one.ref.chunk_id for one in chosen]
        events = self._engine.stream(question, chunk_ids=read, abstain=False, max_new_tokens=32)
        probe = next(event.step.probe for event in events if isinstance(event, CanvasUpdate))
        margin = chosen[0].margin
        assert probe is not None
        assert margin is not None
        return Signs(kind, probe, margin)


def asked(corpus: Corpus, rows: Sequence[dict[str, str]], near: Sequence[dict[str, str]]) -> Iterator[list[Signs]]:
    """The signs of each question, in all its ways."""
    for row in rows:
        question, text = row["question"], row["context"]
        others = corpus.like(question, text)
        yield [
            corpus.signs("supported", question, [*corpus.of(text), *others]),
            corpus.signs("taken out", question, others),
            corpus.signs("unrelated", question, corpus.unlike(text)),
        ]
    for row in near:
        question, text = row["question"], row["context"]
        yield [corpus.signs("near miss", question, [*corpus.of(text), *corpus.like(question, text)])]


def fitted(signs: Sequence[Signs]) -> Support:
    """Logistic regression by Newton's method; `typical_margin` is the lower quartile of supported questions."""
    probe, margin = (
        torch.tensor([getattr(one, name) for one in signs], dtype=torch.float64) for name in ("probe", "margin")
    )
    held = torch.tensor([one.kind == "supported" for one in signs], dtype=torch.float64)
    share = torch.where(held > 0, 0.5 / held.sum(), 0.5 / (1 - held).sum()) * len(signs)
    x = torch.stack([torch.ones_like(probe), probe, margin], dim=1)
    w = torch.zeros(3, dtype=torch.float64)
    for _ in range(50):
        p = torch.sigmoid(x @ w)
        hessian = (x * (share * p * (1 - p))[:, None]).T @ x + 1e-6 * torch.eye(3, dtype=torch.float64)
        w += torch.linalg.solve(hessian, x.T @ (share * (held - p)))
    bias, no_answer, of_margin = w.tolist()
    typical = float(margin[held > 0].quantile(0.25))
    return Support(bias, no_answer, of_margin, typical)


def told(support: Support, signs: Sequence[Signs], *, margin: bool = True) -> dict[str, Any]:
    """Refused shares by kind, and how often what is said to be supported with a probability is."""
    sure = [support_probability(support, one.probe, one.margin if margin else None) or 0.0 for one in signs]
    kinds = dict.fromkeys(one.kind for one in signs)
    refused = {
        kind: sum(p < 0.5 for p, one in zip(sure, signs, strict=True) if one.kind == kind)
        / sum(one.kind == kind for one in signs)
        for kind in kinds
    }
    bins = []
    fitted_kinds = [(p, one) for p, one in zip(sure, signs, strict=True) if one.kind != "near miss"]
    weight = {"supported": 1.0, "taken out": 0.5, "unrelated": 0.5}
    for low, high in itertools.pairwise(EDGES):
        inside = [
            (p, weight[one.kind], one.kind == "supported")
            for p, one in fitted_kinds
            if low <= p < high or p == high == 1
        ]
        if inside:
            total = sum(w for _, w, _ in inside)
            bins.append(
                {
                    "from": low,
                    "to": high,
                    "n": len(inside),
                    "said": sum(p * w for p, w, _ in inside) / total,
                    "is": sum(w for _, w, held in inside if held) / total,
                }
            )
    return {"refused": refused, "bins": bins}


def plot(figures: dict[str, Any], path: str) -> None:
    """Said against found."""
    from pdllm_rag.bench.plots import blank

    figure = blank((4.6, 4.4))
    axis = figure.subplots()
    bins = figures["held out"]["bins"]
    axis.plot([0, 1], [0, 1], color="#999999", linewidth=1)
    axis.plot([one["said"] for one in bins], [one["is"] for one in bins], "o-", color="#0b6e4f")
    for one in bins:
        axis.annotate(str(one["n"]), (one["said"], one["is"]), xytext=(6, -10), textcoords="offset points", fontsize=8)
    axis.set_xlim(-0.05, 1.12)
    axis.set_xlabel("support that was said")
    axis.set_ylabel("share whose text was there")
    figure.savefig(path)


def read(path: str, limit: int | None) -> list[dict[str, str]]:
    """Rows of a JSON Lines file, every so many of them."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return rows[:: max(1, len(rows) // limit)][:limit] if limit else rows


def main() -> None:
    """Ask, fit, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--near-misses", required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--limit", type=int, help="questions of each file")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--plot", metavar="FILE.png")
    args = parser.parse_args()
    rows, near = read(args.data, args.limit), read(args.near_misses, args.limit)
    model = load_model(args.model, device="auto")
    with RagEngine.open(MemoryStore(kv_dtype="bfloat16"), model) as engine:
        corpus = Corpus(engine, [row["context"] for row in (*rows, *near)])
        found = list(asked(corpus, rows, near))
    fit = [one for signs in found[: len(rows)][::2] for one in signs]
    held_out = [one for signs in [*found[: len(rows)][1::2], *found[len(rows) :]] for one in signs]
    support = fitted(fit)
    figures: dict[str, Any] = {
        "machine": describe(model)._asdict(),
        "n": {"fitted": len(fit), "held out": len(held_out)},
        "support": vars(support),
        "held out": told(support, held_out),
        "held out, no margin": told(support, held_out, margin=False),
        "signs": found,
    }
    args.out.write_text(json.dumps(figures, indent=1) + "\n")
    if args.plot:
        plot(figures, args.plot)
    print(json.dumps({key: value for key, value in figures.items() if key != "signs"}, indent=1))


if __name__ == "__main__":
    main()
