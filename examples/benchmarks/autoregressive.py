"""The handbook's questions by the engine, and by an autoregressive model of the same size with the text in its prompt.

    python examples/benchmarks/autoregressive.py --store demo-kb --model SMOLLM2_FOLDER

What a user has today: BM25's best three chunks are pasted into a chat prompt, and transformers generates greedily. The
two take turns, question by question, in one process; accuracy is exact or contained.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

import torch
from pdllm_store import ChunkRef, LMDBStore
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from pdllm_rag import Final, RagEngine, TextDelta
from pdllm_rag.bench.machine import Spread, describe
from pdllm_rag.evaluation.metrics import grade, proportion
from pdllm_rag.evaluation.qa import read_questions
from pdllm_rag.first_stage import BM25Index
from pdllm_rag.models.precision import fastest_dtype

ROOT = Path(__file__).parent.parent.parent
OUT = ROOT / "docs" / "numbers" / "autoregressive.json"
K, MAX_NEW_TOKENS = 3, 32
PROMPT = "Answer the question in a few words, from these texts only.\n\n{texts}\n\nQuestion: {question}"

Said = tuple[str, float, float]  # text, ms to the first of it, ms to the last


class Autoregressive:
    """BM25 and a causal language model."""

    def __init__(self, folder: str, engine: RagEngine, dtype: torch.dtype) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._engine = engine
        self._index = BM25Index(engine.store, engine.fingerprint)

    def _text(self, ref: ChunkRef) -> str:
        document = self._engine.store.document(self._engine.fingerprint, ref.doc_id)
        return document.text[ref.char_start : ref.char_end]

    def ask(self, question: str) -> Said:
        started = time.perf_counter()
        found = self._index.search(question, K)
        texts = "\n\n".join(map(self._text, (one.ref for one in found)))
        messages = [{"role": "user", "content": PROMPT.format(texts=texts, question=question)}]
        inputs = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        streamer = TextIteratorStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        options = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "streamer": streamer}
        worker = threading.Thread(target=self._model.generate, kwargs={**inputs, **options})
        worker.start()
        text, first = "", 0.0
        for part in streamer:
            text += part
            if text.strip() and not first:
                first = time.perf_counter()
        worker.join()
        end = time.perf_counter()
        return text, 1000 * ((first or end) - started), 1000 * (end - started)


def by_engine(engine: RagEngine, question: str) -> Said:
    """The engine's answer, streamed; one that is withheld comes with its last event."""
    started, first, text = time.perf_counter(), 0.0, ""
    for event in engine.stream(question, max_new_tokens=MAX_NEW_TOKENS):
        if isinstance(event, TextDelta) and not first:
            first = time.perf_counter()
        if isinstance(event, Final):
            text = event.answer.text
    end = time.perf_counter()
    return text, 1000 * ((first or end) - started), 1000 * (end - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="demo-kb")
    parser.add_argument("--model", required=True, help="folder of a causal language model that transformers reads")
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    with LMDBStore.open(args.store, create=False) as store, RagEngine.open(store, "demo") as engine:
        dtype = fastest_dtype(engine.model.backbone.device)
        other = Autoregressive(args.model, engine, dtype)
        questions = [q for q in read_questions(ROOT / "examples" / "handbook_questions.jsonl") if q.answers][
            : args.limit
        ]
        sides: dict[str, Any] = {"engine": lambda q: by_engine(engine, q), "autoregressive": other.ask}
        said: dict[str, list[Said]] = {name: [] for name in sides}
        for ask in sides.values():
            ask(questions[0].text)
        for number, question in enumerate(questions):
            for name in sorted(sides, reverse=bool(number % 2)):
                said[name].append(sides[name](question.text))
        result: dict[str, Any] = {"machine": describe(engine.model)._asdict(), "n": len(questions), "model": args.model}
        for name, answers in said.items():
            right = [grade(text, q.answers).correct for (text, *_), q in zip(answers, questions, strict=True)]
            accuracy = proportion(right)
            result[name] = {
                "accuracy": accuracy.as_dict() if accuracy else None,
                "first_ms": Spread.of([first for _, first, _ in answers]).as_dict(),
                "ms": Spread.of([ms for *_, ms in answers]).as_dict(),
                "answers": [text for text, *_ in answers],
            }
        ratios = [b[2] / a[2] for a, b in zip(said["engine"], said["autoregressive"], strict=True)]
        result["times_the_engine"] = Spread.of(ratios).as_dict()
    command = f"python examples/benchmarks/autoregressive.py --store {args.store} --model SMOLLM2-135M-Instruct"
    OUT.write_text(
        json.dumps({"command": command, "result": {**result, "model": Path(args.model).name}}, indent=1) + "\n"
    )
    print(json.dumps({key: value for key, value in result.items() if key != "answers"}, indent=1)[:1500])


if __name__ == "__main__":
    main()
