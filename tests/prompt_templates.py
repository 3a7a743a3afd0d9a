"""Prompt templates in use: LangChain's tutorials and hub, LlamaIndex's defaults, and what people write by hand."""

from __future__ import annotations

ONE_MESSAGE = {
    "lcel": "Answer the question based only on the following context:\n{context}\n\nQuestion: {question}\n",
    "hub": "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to answer "
    "the question. If you don't know the answer, just say that you don't know. Use three sentences maximum and keep "
    "the answer concise.\nQuestion: {question} \nContext: {context} \nAnswer:",
    "stuff": "Use the following pieces of context to answer the question at the end. If you don't know the answer, "
    "just say that you don't know.\n\n{context}\n\nQuestion: {question}\nHelpful Answer:",
    "llama_index": "Context information is below.\n---------------------\n{context}\n---------------------\nGiven the "
    "context information and not prior knowledge, answer the query.\nQuery: {question}\nAnswer: ",
    "inline": "Use the following context: {context}\n\nQuestion: {question}",
    "open webui": "### Task:\nRespond to the user query using the provided context, with citations in the format [id] "
    '**only when the <source> tag has an id** (e.g., <source id="1">).\n\n### Guidelines:\n- Be brief.\n\n'
    "<context>\n{context}\n</context>\n{question}",
    "markdown": "### Context:\n{context}\n\n### Question:\n{question}\n\n### Answer:\n",
}
SYSTEM = {
    "tutorial": "You are a helpful assistant. Use the following context in your response:\n\n{context}",
    "retrieval chain": "Use the given context to answer the question. Keep the answer concise. Context: {context}",
    "announced": "Use the following pieces of retrieved context to answer. Say if you don't know.\n\n{context}",
    "tags": "Answer from the documents.\n<documents>\n{context}\n</documents>\nBe brief.",
    "llama_index chat": "\n  Be talkative.\n\n  Here are the relevant documents for the context:\n\n  {context}"
    "\n\n  Instruction: Based on the above documents, provide a detailed answer for the user question below.\n"
    '  Answer "don\'t know" if not present in the document.\n  ',
}
