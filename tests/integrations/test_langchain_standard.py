"""LangChain's own suites for chat models, retrievers and indexes, offline, with the bundled model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_socket
from langchain_pdllm import ChatPDLLM, PDLLMDocumentIndex, PDLLMRetriever
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.integration_tests.indexer import AsyncDocumentIndexTestSuite, DocumentIndexerTestSuite
from langchain_tests.unit_tests import ChatModelUnitTests

from pdllm_rag import InputDocument, RagEngine

TEXTS = (
    "The Galway office opens at half past eight and closes at five.",
    "The order desk in Porto is run by Ines Carvalho.",
    "A Gannet buoy has a warranty of three years without a service contract.",
    "Every full-time employee gets 28 days of paid annual leave.",
)
PLACE: dict[str, Any] = {"model": "demo"}


@pytest.fixture(scope="module", autouse=True)
def _store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    PLACE["store"] = str(tmp_path_factory.mktemp("kb"))
    with RagEngine.open(PLACE["store"]) as engine:  # held, so that the weights are loaded once
        engine.prefill([InputDocument(f"d{i}", text, f"d{i}.txt") for i, text in enumerate(TEXTS)])
        yield


@pytest.fixture(autouse=True)
def _offline() -> Iterator[None]:
    pytest_socket.disable_socket(allow_unix_socket=True)  # an event loop wakes itself up through one
    yield
    pytest_socket.enable_socket()


class _Chat:
    """Skipped for want of tools, structured output, images, sound and PDF: neither is offered."""

    @property
    def chat_model_class(self) -> type[ChatPDLLM]:
        return ChatPDLLM

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return PLACE

    @property
    def has_tool_calling(self) -> bool:
        return False  # `bind_tools` is there only to say so

    @property
    def supports_model_override(self) -> bool:
        return False  # a store is read with the model that wrote it


class TestChatModel(_Chat, ChatModelUnitTests):
    pass


class TestChatModelAtWork(_Chat, ChatModelIntegrationTests):
    @property
    def supported_usage_metadata_details(self) -> Any:
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> Any:
        return self._asked(stream, "Who runs the order desk in Porto?")

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> Any:
        return self._asked(stream, "When does it open?", context="The canteen opens at noon.")

    def _asked(self, stream: bool, question: str, **options: Any) -> Any:
        chat = ChatPDLLM(**PLACE)
        if not stream:
            return chat.invoke(question, **options)
        first, *others = chat.stream(question, **options)
        return sum(others, first)


class TestRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[PDLLMRetriever]:
        return PDLLMRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return PLACE

    @property
    def retriever_query_example(self) -> str:
        return "Who runs the order desk?"


class TestDocumentIndex(DocumentIndexerTestSuite):
    @pytest.fixture
    def index(self, tmp_path: Path) -> PDLLMDocumentIndex:
        return PDLLMDocumentIndex(store=tmp_path / "kb")


class TestAsyncDocumentIndex(AsyncDocumentIndexTestSuite):
    @pytest.fixture
    def index(self, tmp_path: Path) -> PDLLMDocumentIndex:
        return PDLLMDocumentIndex(store=tmp_path / "kb")
