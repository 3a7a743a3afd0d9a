"""Keep a store in step with its documents through LangChain: python examples/langchain_index_and_update.py [STORE]

The record manager is the store itself: what it says is indexed is there, and what is unchanged costs nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.indexing import index
from langchain_pdllm import ChatPDLLM, PDLLMDocumentIndex, PDLLMRecordManager

STORE = sys.argv[1] if len(sys.argv) > 1 else "kb-langchain"
FOLDER = Path(__file__).parent / "handbook" / "offices"
QUESTION = "When does the canteen in Galway open?"

documents = PDLLMDocumentIndex(store=STORE)
model = ChatPDLLM(store=STORE)


def in_step(docs: list[Document]) -> None:
    result = index(
        docs,
        PDLLMRecordManager(documents, source_id_key="source"),
        documents,
        cleanup="full",
        source_id_key="source",
        key_encoder="sha256",
    )
    print(result)


docs = [Document(path.read_text(), metadata={"source": path.name}) for path in sorted(FOLDER.glob("*.md"))]
in_step(docs)
in_step(docs)  # nothing to do

notice = Document("The canteen in Galway opens at 11:45 from Monday on.", metadata={"source": "notice.txt"})
in_step([*docs, notice])
print(model.invoke(QUESTION).text)

in_step(docs)  # the notice is gone, and so is everything that was known of it
print(model.invoke(QUESTION).text)
