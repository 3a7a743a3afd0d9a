"""The names that users import. A change here is a change of the public interface: say it in CHANGELOG.md.

Those of the store are in tests/store/test_package.py.
"""

from __future__ import annotations

import importlib

import pytest

NAMES = {
    "pdllm_rag": [
        "Answer",
        "AnswerStats",
        "AskOptions",
        "CanvasUpdate",
        "Citation",
        "Final",
        "InputDocument",
        "LoadedModel",
        "PrefillReport",
        "RagEngine",
        "Retrieved",
        "ScoringOptions",
        "StreamEvent",
        "TextDelta",
        "load_model",
    ],
    "langchain_pdllm": [
        "PDLLM",
        "ChatPDLLM",
        "PDLLMDocumentIndex",
        "PDLLMRecordManager",
        "PDLLMRetriever",
        "PDLLMTextSplitter",
        "as_message",
    ],
    "llama_index.llms.pdllm": ["PDLLM"],
    "llama_index.retrievers.pdllm": ["PDLLMQueryEngine", "PDLLMRetriever", "PDLLMSynthesizer", "PrefillChunks"],
    "llama_index.vector_stores.pdllm": ["PDLLMVectorStore"],
}


@pytest.mark.parametrize("package", NAMES)
def test_these_names_are_public(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__ == NAMES[package]
    assert all(getattr(module, name) is not None for name in NAMES[package])


@pytest.mark.parametrize("package", ["pdllm_rag", "langchain_pdllm"])
def test_a_name_that_is_looked_up_at_first_use_has_a_home_and_others_are_told(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module._HOMES) == sorted(module.__all__)
    with pytest.raises(AttributeError, match=module.__all__[0]):
        module.Nothing  # noqa: B018  (the access is the test)
