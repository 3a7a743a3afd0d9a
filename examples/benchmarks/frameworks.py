"""Measure the framework components against the engine and write docs/numbers/frameworks.json.

Answers: every question of the handbook, by the engine and at each level through LangChain and LlamaIndex. They are kept
in `<store>.answers.json` as they come, so that a run that was stopped goes on. Time: whole questions, in turns.

    python examples/benchmarks/frameworks.py --store demo-kb
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_pdllm import ChatPDLLM, PDLLMRetriever, as_message
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.llms.pdllm import PDLLM
from llama_index.retrievers.pdllm import PDLLMQueryEngine, PDLLMSynthesizer
from llama_index.retrievers.pdllm import PDLLMRetriever as NodeRetriever

from pdllm_rag import Answer, RagEngine
from pdllm_rag.bench.machine import Spread, describe, take_turns
from pdllm_rag.evaluation.metrics import grade, proportion
from pdllm_rag.evaluation.qa import Question, read_questions

ROOT = Path(__file__).parent.parent.parent
OUT = ROOT / "docs" / "numbers" / "frameworks.json"
TEMPLATES = {
    "tutorial": "Answer the question based only on the following context:\n{context}\n\nQuestion: {question}\n",
    "rag-prompt": "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to "
    "answer the question. If you don't know the answer, just say that you don't know. Use three sentences maximum and "
    "keep the answer concise.\nQuestion: {question} \nContext: {context} \nAnswer:",
}

Ask = Callable[[str], dict[str, Any]]


def told(text: str, kv: Mapping[str, int], supported: bool, cited: int) -> dict[str, Any]:
    return {"text": text, "supported": supported, "cited": cited, **kv}


def by_engine(answer: Answer) -> dict[str, Any]:
    return told(answer.text, answer.stats.chunks._asdict(), answer.stats.supported, len(answer.citations))


def by_langchain(message: Any) -> dict[str, Any]:
    metadata = message.response_metadata
    return told(message.text, metadata["kv"], metadata["supported"], len(metadata["citations"]))


def by_llama_index(response: Any) -> dict[str, Any]:
    metadata = response.metadata
    return told(str(response), metadata["kv"], metadata["stats"]["supported"], len(metadata["citations"]))


def format_docs(docs: Sequence[Document]) -> str:
    return "\n\n".join(doc.page_content for doc in docs)


def chain(retriever: Any, chat: ChatPDLLM, template: str) -> Any:
    prompt = ChatPromptTemplate.from_template(template)
    return {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | chat


def ways(place: Mapping[str, str], window: float) -> dict[str, Ask]:
    """Every way to ask; those over k chunks and those within the engine's own score window are to be compared apart."""
    chat, llm = ChatPDLLM(**place), PDLLM(**place)
    engine = chat.opened()
    near, all_k = PDLLMRetriever(**place, score_window=window), PDLLMRetriever(**place)
    nodes = NodeRetriever(**place, score_window=window)
    found: dict[str, Any] = {"engine": lambda q: by_engine(engine.answer(q))}
    found["engine, async"] = lambda q: by_engine(asyncio.run(engine.aanswer(q)))
    found["engine, all k"] = lambda q: by_engine(engine.answer(q, score_window=math.inf))
    for name, template in TEMPLATES.items():
        found[f"langchain 1, {name}"] = lambda q, t=template: by_langchain(chain(near, chat, t).invoke(q))
        found[f"langchain 1, {name}, all k"] = lambda q, t=template: by_langchain(chain(all_k, chat, t).invoke(q))
    tutorial = chain(near, chat, TEMPLATES["tutorial"])
    found["langchain 1, tutorial, async"] = lambda q: by_langchain(asyncio.run(tutorial.ainvoke(q)))
    found["langchain 2"] = lambda q: by_langchain(chat.invoke([as_message(near.invoke(q), q)]))
    found["langchain 3"] = lambda q: by_langchain(chat.invoke(q))
    seen: list[dict[str, Any]] = []
    ordinary = RetrieverQueryEngine.from_args(nodes, llm=Listening(**place).telling(seen))

    def pasted(question: str) -> dict[str, Any]:
        seen.clear()
        text = str(ordinary.query(question))
        (raw,) = seen
        return told(text, raw["kv"], raw["stats"]["supported"], len(raw["citations"]))

    found["llama_index 1"] = pasted
    synthesized = RetrieverQueryEngine(nodes, response_synthesizer=PDLLMSynthesizer(llm))
    found["llama_index 2"] = lambda q: by_llama_index(synthesized.query(q))
    found["llama_index 3"] = lambda q: by_llama_index(PDLLMQueryEngine(llm).query(q))
    found["llama_index 3, async"] = lambda q: by_llama_index(asyncio.run(PDLLMQueryEngine(llm).aquery(q)))
    return found


class Listening(PDLLM):
    """Tells what a standard synthesizer drops: the answer behind the text."""

    _seen: list[dict[str, Any]] | None = None

    def telling(self, seen: list[dict[str, Any]]) -> Listening:
        self._seen = seen
        return self

    def chat(self, messages: Any, **kwargs: Any) -> Any:
        response = super().chat(messages, **kwargs)
        if self._seen is not None:
            self._seen.append(response.raw)
        return response


def answers(asks: Mapping[str, Ask], questions: Sequence[Question], kept: Path) -> dict[str, dict[str, Any]]:
    """Answers by question and way, continued from a file."""
    done: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    for question in questions:
        if question.id not in done:
            done[question.id] = {name: ask(question.text) for name, ask in asks.items()}
            kept.write_text(json.dumps(done))
    return done


def figures(done: Mapping[str, dict[str, Any]], questions: Sequence[Question], way: str) -> dict[str, Any]:
    """Accuracy and refusals of one way, and how often its text is that of the engine over as many chunks."""
    same = "engine, all k" if way.endswith("all k") else "engine"
    answerable = [q for q in questions if q.kind == "answerable"]
    correct = [grade(done[q.id][way]["text"], q.answers).correct for q in answerable]
    said = [done[q.id][way] for q in questions]
    return {
        "accuracy": accuracy.as_dict() if (accuracy := proportion(correct)) else None,
        "same_text_as_engine": sum(done[q.id][way]["text"] == done[q.id][same]["text"] for q in questions),
        "questions": len(questions),
        "recomputed": sum(one["recomputed"] for one in said),
        "hit": sum(one["hit"] for one in said),
        "unmatched_chars": sum(one.get("unmatched_chars", 0) for one in said),
        "refused": {
            kind: sum(not done[q.id][way]["supported"] for q in questions if q.kind == kind)
            for kind in dict.fromkeys(q.kind for q in questions)
        },
    }


def times(asks: Mapping[str, Ask], questions: Sequence[Question], repeat: int, engine: RagEngine) -> dict[str, Any]:
    """Seconds of whole questions, and their ratio to the engine's within the same turn."""
    names = [name for name in asks if "rag-prompt" not in name and "all k" not in name]
    ms: dict[str, list[float]] = {name: [] for name in names}
    for question in questions:
        runs = {name: (lambda ask=asks[name], text=question.text: ask(text)) for name in names}
        for name, values in take_turns(runs, repeat, device=engine.model.backbone.device).items():
            ms[name] += values
    return {
        name: {
            "ms": Spread.of(values).as_dict(),
            "of_engine": Spread.of([a / b for a, b in zip(values, ms["engine"], strict=True)]).as_dict(),
        }
        for name, values in ms.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="demo-kb")
    parser.add_argument("--every", type=int, default=1, help="ask every n-th question only")
    parser.add_argument("--timed", type=int, default=12, help="questions that are timed")
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    place = {"store": given.store, "model": "demo"}
    opened = ChatPDLLM(**place)
    engine = opened.opened()
    window = engine.model.spec.family.score_window
    assert window is not None
    questions = read_questions(ROOT / "examples" / "handbook_questions.jsonl")[:: given.every]
    asks = ways(place, window)
    engine.retrieve = cache(engine.retrieve)  # type: ignore[method-assign]  # most ways begin with it
    done = answers(asks, questions, Path(f"{given.store}.answers.json"))
    del engine.retrieve
    result = {
        "machine": describe(engine.model)._asdict(),
        "answers": {way: figures(done, questions, way) for way in asks},
        "times": times(asks, questions[: given.timed], given.repeat, engine) if given.timed else None,
    }
    options = f"--every {given.every} --timed {given.timed} --repeat {given.repeat}"
    command = f"python examples/benchmarks/frameworks.py --store {given.store} {options}"
    OUT.write_text(json.dumps({"command": command, "result": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
