"""Between LangChain's messages and the engine's: question, chunk references, answer with citations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    UsageMetadata,
)
from langchain_core.messages.content import Citation as CitationBlock

from langchain_pdllm._component import Usage

if TYPE_CHECKING:
    from pdllm_rag.answer import Answer, AnswerStats, Citation

_CHUNK_ID = re.compile(r"[0-9a-f]{32}")
_ROLES = ("system", "user", "assistant")


class Reading(NamedTuple):
    """What messages ask: turns {"role", "content"}, and the ids of the chunks to read, None to retrieve them."""

    turns: list[dict[str, str]]
    chunk_ids: list[str] | None


def as_message(docs: Sequence[Document], question: str) -> HumanMessage:
    """A question about exactly these documents of `PDLLMRetriever`, for `ChatPDLLM`.

    Each document becomes a text block with `extras={"chunk_id": ...}`: `ChatPDLLM` reads the stored chunk of that id,
    other chat models read the text. Without documents `ChatPDLLM` answers that there is nothing to read.

    Raises:
        ValueError: a document whose id is no chunk id.
    """
    blocks: list[str | dict[str, Any]] = [
        {"type": "text", "text": doc.page_content, "extras": {"chunk_id": _checked(doc.id)}} for doc in docs
    ]
    blocks.append({"type": "text", "text": question, "extras": {"n_chunks": len(docs)}})
    return HumanMessage(content=blocks)


def read_messages(messages: Sequence[BaseMessage]) -> Reading:
    """Turns and chunk references of a conversation; the chunks of all its messages are read, each once.

    Raises:
        ValueError: a role, part or tool call that the model cannot take; nothing is left out silently.
    """
    turns: list[dict[str, str]] = []
    chunk_ids: dict[str, None] = {}
    refers = False
    for message in messages:
        role = _role(message)
        texts = []
        for text, extras in _text_parts(message):
            refers = refers or "chunk_id" in extras or "n_chunks" in extras
            if "chunk_id" in extras:
                chunk_ids[_checked(extras["chunk_id"])] = None
            else:
                texts.append(text)
        turns.append({"role": role, "content": "\n".join(texts)})
    return Reading(turns, list(chunk_ids) if refers else None)


def answer_message(answer: Answer) -> AIMessage:
    """An answer as one message."""
    block: dict[str, Any] = {"type": "text", "text": answer.text, "annotations": _annotations(answer)}
    return AIMessage(content=[block], usage_metadata=_usage(answer), response_metadata=response_metadata(answer))


def delta_message(text: str) -> AIMessageChunk:
    """A piece of an answer's text."""
    return AIMessageChunk(content=[{"type": "text", "text": text, "index": 0}])


def final_message(answer: Answer) -> AIMessageChunk:
    """What comes after an answer's text: citations, usage, metadata."""
    return AIMessageChunk(
        content=[{"type": "text", "text": "", "annotations": _annotations(answer), "index": 0}],
        usage_metadata=_usage(answer),
        response_metadata=response_metadata(answer),
        chunk_position="last",
    )


def response_metadata(answer: Answer) -> dict[str, Any]:
    """Circumstances of an answer. Timings are milliseconds by phase; `nfe` counts forward passes of decoding."""
    stats: AnswerStats = answer.stats
    return {
        "model_name": stats.model,
        "finish_reason": stats.finish_reason,
        "nfe": stats.nfe,
        "kv": stats.chunks._asdict(),
        "policy": stats.policy,
        "decoder": stats.decoder,
        "supported": stats.supported,
        "timings": dict(stats.ms),
        "citations": answer.as_dict()["citations"],
    }


def _usage(answer: Answer) -> UsageMetadata:
    usage = Usage.of(answer.stats)
    counts = {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "input_token_details": {"cache_read": usage.stored_tokens, "cache_creation": usage.computed_tokens},
    }
    return cast(UsageMetadata, counts)  # its optional keys look required to mypy below Python 3.11


def _annotations(answer: Answer) -> list[CitationBlock]:
    return [_annotation(citation) for citation in answer.citations]


def _annotation(citation: Citation) -> CitationBlock:
    fields = citation._asdict()
    quote = fields.pop("quote")
    extras = {name: value for name, value in fields.items() if value is not None}
    block = {"type": "citation", "title": citation.doc_id, "cited_text": quote, "extras": extras}
    return cast(CitationBlock, block)


def _role(message: BaseMessage) -> str:
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, AIMessage):
        if message.tool_calls or message.invalid_tool_calls:
            raise ValueError("ChatPDLLM got a message with tool calls, which it does not support; expected text only")
        return "assistant"
    if isinstance(message, ChatMessage) and message.role in _ROLES:
        return message.role
    kind = f"chat message of role {message.role!r}" if isinstance(message, ChatMessage) else f"{message.type!r} message"
    raise ValueError(f"ChatPDLLM got a {kind}; expected human, ai and system messages")


def _text_parts(message: BaseMessage) -> Iterator[tuple[str, dict[str, Any]]]:
    parts = [message.content] if isinstance(message.content, str) else message.content
    for part in parts:
        if isinstance(part, str):
            yield part, {}
        elif part.get("type") == "text" and isinstance(part.get("text"), str):
            yield part["text"], part.get("extras") or {}
        else:
            raise ValueError(f"ChatPDLLM got a message part of type {part.get('type')!r}; expected text parts only")


def _checked(chunk_id: Any) -> str:
    if not isinstance(chunk_id, str) or not _CHUNK_ID.fullmatch(chunk_id):
        raise ValueError(f"{chunk_id!r} is no chunk id; expected documents that PDLLMRetriever gave, ids unchanged")
    return chunk_id
