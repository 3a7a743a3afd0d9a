"""No call leaves a team of OpenMP threads behind, from whichever thread it came (`pdllm_rag.teams`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import save_tiny_model

ROOT = Path(__file__).parent.parent.parent

PROGRAM = """
import asyncio, json, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
import torch
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_pdllm import ChatPDLLM, PDLLMRetriever
from pdllm_rag import Final, InputDocument, RagEngine, TextDelta
from pdllm_rag.server.worker import Worker

native = lambda: len(os.listdir("/proc/self/task")) - threading.active_count()  # threads that Python did not make

def n_left():
    for _ in range(200):  # a thread that was waited for may be listed for a moment longer
        if native() == before:
            return 0
        time.sleep(0.01)
    return native() - before

torch.set_num_threads(2)
store, model, question = sys.argv[1], sys.argv[2], "When does the red boat sail?"
with ThreadPoolExecutor(1) as passing:  # which takes its team with it
    engine, opened = passing.submit(lambda: (RagEngine.open(store, model), native())).result()
time.sleep(0.5)
before = native()
left, during = {"open": opened - before}, []
texts = [f"The red boat number {n} sails at {n} in the morning. " * 6 for n in range(8)]
engine.prefill([InputDocument(f"d{n}", text, "s") for n, text in enumerate(texts)],
               on_progress=lambda _: during.append(native() - before))
left["prefill"] = n_left()
options = dict(k=2, candidates=4, max_new_tokens=4, abstain=False, threshold=0.05)

held = threading.local()

def run(work):
    if not hasattr(held, "loop"):  # it keeps its threads
        held.loop = asyncio.new_event_loop()
    return held.loop.run_until_complete(work)

def halfway():
    with closing(engine.stream(question, **options)) as events:
        next(events)

async def acollect(events):
    async with aclosing(events):
        return "".join([event.text async for event in events if isinstance(event, TextDelta)])

async def ahalfway():
    async with aclosing(engine.astream(question, **options)) as events:
        await anext(events)

async def served():
    worker = Worker(max_batch=2, max_waiting=2, on_batch=lambda _: None)
    worker.start()
    ticket = worker.submit(engine.asked(question, **options))
    while not isinstance(event := await ticket.next(), Final):
        pass
    left["worker"] = n_left()
    worker.close()
    return event.answer.text

def refused():
    try:
        engine.answer(question, min_support=0.5)
    except ValueError as error:
        return type(error).__name__

def nested(text, n):
    return [(hit.ref.doc_id, hit.ref.chunk_id) for hit in engine.retrieve(text, k=n)]

def collect():
    return "".join(event.text for event in engine.stream(question, **options) if isinstance(event, TextDelta))

component = dict(store=store, model=model, k=2, candidates=4)
chat = ChatPDLLM(**component, max_tokens=4, abstain=False, threshold=0.05)
paste = PDLLMRetriever(**component) | (lambda docs: " ".join(doc.page_content for doc in docs))
prompt = ChatPromptTemplate.from_template("Context:\\n{context}\\n\\nQuestion: {question}")
chain = {"context": paste, "question": RunnablePassthrough()} | prompt | chat | StrOutputParser()
ways = {
    "retrieve": lambda: [hit.text for hit in engine.retrieve(question, k=2)],
    "answer": lambda: engine.answer(question, **options).text,
    "first stage": lambda: engine.answer(question, first_stage=nested, **options).text,
    "stream": collect,
    "halfway": halfway,
    "refused": refused,
    "aanswer": lambda: run(engine.aanswer(question, **options)).text,
    "astream": lambda: run(acollect(engine.astream(question, **options))),
    "ahalfway": lambda: run(ahalfway()),
    "served": lambda: run(served()),
    "chain": lambda: chain.invoke(question),
    "chain.stream": lambda: "".join(chain.stream(question)),
    "chain.ainvoke": lambda: run(chain.ainvoke(question)),
}
said = {}
with ThreadPoolExecutor(1) as lasting:
    for way, call in ways.items():
        said[way] = [call()]
        left[way] = n_left()
        said[way].append(lasting.submit(call).result())
        left[way + ", in a thread"] = n_left()

def forked(n_threads):
    child = os.fork()
    if not child:
        torch.set_num_threads(n_threads)
        os._exit(engine.answer(question, **options).text != said["answer"][0])
    for _ in range(3000):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.01)
    os.kill(child, 9)
    return "hangs"

children = [forked(2)]
torch.ones(1 << 20).add_(1)  # this team stays: it is not the engine's
children.append(forked(1))
print(json.dumps({"left": left, "during": max(during), "said": said, "children": children}))
unfinished = engine.stream(question, **options)
next(unfinished)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_call_leaves_no_team_a_fork_goes_on_and_an_open_stream_lets_the_process_end(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", hidden_size=128, intermediate_size=512)  # wide enough for two threads
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM, str(tmp_path / "kb"), str(model)],
        capture_output=True, text=True, timeout=300, cwd=ROOT, env={**os.environ, "OMP_WAIT_POLICY": "passive"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert {way: n for way, n in found["left"].items() if n} == {}
    assert found["during"] == 1  # a batch's was there
    assert found["children"] == [0, 0]
    assert all(one == other for one, other in found["said"].values())
    assert len({found["said"][way][0] for way in ("answer", "stream", "aanswer", "astream", "served")}) == 1
