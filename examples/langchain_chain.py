"""The LangChain chain that everybody writes, over cached chunks: python examples/langchain_chain.py [STORE]

The chain pastes retrieved text into a prompt. The chat model knows that text again and reads the stored chunks instead;
nothing of the documents is encoded a second time.
"""

from __future__ import annotations

import sys
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_pdllm import ChatPDLLM, PDLLMRetriever, as_message

from pdllm_rag import RagEngine

STORE = sys.argv[1] if len(sys.argv) > 1 else "kb"
QUESTION = "How long is the warranty on a Gannet buoy without a service contract?"


def format_docs(docs: list[Document]) -> str:
    return "\n\n".join(doc.page_content for doc in docs)


with RagEngine.open(STORE) as engine:  # read once; the next time this costs nothing
    engine.prefill([Path(__file__).parent / "handbook"])

retriever = PDLLMRetriever(store=STORE, k=4)
model = ChatPDLLM(store=STORE)
prompt = ChatPromptTemplate.from_template(
    "Answer the question based only on the following context:\n{context}\n\nQuestion: {question}\n"
)

chain = {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | model
message = chain.invoke(QUESTION)
print(message.text, message.response_metadata["kv"])

print((chain | StrOutputParser()).batch(["Who runs the order desk in Porto?", QUESTION]))

# The retrieved documents handed over as such: exact, with their scores, and without a template.
docs = retriever.invoke(QUESTION, score_window=0.5)
message = model.invoke([as_message(docs, QUESTION)])
for citation in message.content_blocks[0]["annotations"][:1]:
    print(f"{message.text}   ({citation['title']}: {citation['cited_text']!r})")

# Or all in one call: the model retrieves by itself.
for chunk in model.stream(QUESTION):
    print(chunk.text, end="", flush=True)
print("  ", chunk.usage_metadata)
