"""LlamaIndex query engines over cached chunks: python examples/llamaindex_query_engine.py [STORE]"""

from __future__ import annotations

import sys
from pathlib import Path

from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.llms.pdllm import PDLLM
from llama_index.retrievers.pdllm import PDLLMQueryEngine, PDLLMRetriever, PDLLMSynthesizer

from pdllm_rag import RagEngine

STORE = sys.argv[1] if len(sys.argv) > 1 else "kb"
QUESTION = "Who runs the order desk in Porto?"

with RagEngine.open(STORE) as engine:  # read once; the next time this costs nothing
    engine.prefill([Path(__file__).parent / "handbook"])

llm = PDLLM(store=STORE)
retriever = PDLLMRetriever(store=STORE, similarity_top_k=4)

# An ordinary query engine: the text that it pastes into its prompt is known again and read from the store.
response = RetrieverQueryEngine.from_args(retriever, llm=llm).query(QUESTION)
print(response, [scored.node.metadata["doc_id"] for scored in response.source_nodes])

# With the synthesizer the nodes are handed over as such, and citations and costs come back.
response = RetrieverQueryEngine(retriever, response_synthesizer=PDLLMSynthesizer(llm)).query(QUESTION)
print(response, response.metadata["kv"], repr(response.metadata["citations"][0]["quote"]))

# Or all in one call, streamed.
response = PDLLMQueryEngine(llm, streaming=True).query(QUESTION)
for text in response.response_gen:
    print(text, end="", flush=True)
print("  ", [scored.node.metadata["doc_id"] for scored in response.source_nodes])
