"""Read documents once, ask many times: the Python interface in a page."""

from __future__ import annotations

from pathlib import Path

from pdllm_rag import Final, InputDocument, RagEngine, TextDelta

HANDBOOK = Path(__file__).parent / "handbook"

with RagEngine.open(store="kb", model="demo") as engine:
    report = engine.prefill([HANDBOOK])
    print(f"{report.added} documents added, {report.unchanged} unchanged, {report.chunks_computed} chunks computed")

    engine.prefill([InputDocument("notes/today", "The canteen in Galway opens at 11:45.", source="a note")])

    for chunk in engine.retrieve("When does the canteen in Galway open?", k=2):
        score = "-" if chunk.score is None else f"{chunk.score:.2f}"  # None where there is nothing to choose
        print(f"{score:>6}  {chunk.ref.doc_id}  {chunk.text[:60]!r}")

    answer = engine.answer("When does the canteen in Galway open?")
    print(answer.text)
    for citation in answer.citations[:1]:
        print(f"  {citation.doc_id}: {citation.quote}")

    for event in engine.stream("Who runs the order desk in Porto?"):
        if isinstance(event, TextDelta):
            print(event.text, end="", flush=True)
        elif isinstance(event, Final):
            print(f"   ({event.answer.stats.nfe} forward passes, {event.answer.stats.ms['total']:.0f} ms)")
