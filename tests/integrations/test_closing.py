"""A component of any framework that is closed lets its store go at once, and opens it again when it is used again."""

from __future__ import annotations

import copy
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langchain_pdllm import PDLLM, ChatPDLLM, PDLLMDocumentIndex, PDLLMRetriever
from llama_index.llms.pdllm import PDLLM as LlamaIndexLLM
from llama_index.retrievers.pdllm import PDLLMQueryEngine, PDLLMSynthesizer, PrefillChunks
from llama_index.retrievers.pdllm import PDLLMRetriever as Nodes
from llama_index.vector_stores.pdllm import PDLLMVectorStore
from pdllm_store import LMDBStore, MemoryStore, StoreError

from pdllm_rag import InputDocument, RagEngine

DOCUMENT = InputDocument("a", "The beta boat sails at dawn.", "a")
COMPONENTS = (
    PDLLM, ChatPDLLM, PDLLMDocumentIndex, PDLLMRetriever, LlamaIndexLLM, Nodes, PrefillChunks, PDLLMVectorStore,
    PDLLMQueryEngine, PDLLMSynthesizer,
)  # fmt: skip


def engine_of(component: Any) -> weakref.ref[RagEngine]:
    """The engine, which is opened if need be."""
    held = next(
        (own for name in ("_search", "_llm", "_answering") if (own := getattr(component, name, None))), component
    )
    return weakref.ref(held.opened())


def is_free(store: Path) -> bool:
    """Whether nobody has the store open: else it cannot be compacted."""
    with closing(LMDBStore.open(store, create=False)) as opened:
        try:
            opened.compact()
        except StoreError:
            return False
        return True


@pytest.mark.parametrize("cls", COMPONENTS, ids=lambda cls: f"{cls.__module__.partition('.')[0]}-{cls.__name__}")
def test_a_component_that_is_closed_lets_its_store_go_and_opens_it_again(
    cls: Any, tmp_path: Path, place: dict[str, str]
) -> None:
    store = tmp_path / "kb"
    with RagEngine.open(store, place["model"]) as engine:
        engine.prefill([DOCUMENT])
    place = {"store": str(store), "model": place["model"]}
    cls(**place).close()  # unused
    with cls(**place) as component, cls(**place) as other:
        opened = engine_of(component)
        assert engine_of(other)() is opened()
        component.close()
        component.close()
        assert opened() is not None  # the other one holds it
        assert not is_free(store)
        other.close()
        assert opened() is None
        assert is_free(store)
        assert engine_of(component)() is not None
        assert not is_free(store)
        copy.deepcopy(component).close()
        assert is_free(store)
        assert engine_of(component)() is not None
    assert is_free(store)


def test_an_answer_that_is_running_when_its_component_is_closed_is_finished(place: dict[str, str]) -> None:
    options = {"k": 2, "max_tokens": 8, "steps": 4}
    whole = PDLLM(**place, **options).invoke("When does the beta boat sail?")
    with PDLLM(**place, **options) as component:
        stream = component.stream("When does the beta boat sail?")
        first = next(stream)
    assert "".join([first, *stream]) == whole


def test_a_store_object_stays_open_when_a_component_over_it_is_closed(place: dict[str, str]) -> None:
    store = MemoryStore(kv_dtype="float32")
    with RagEngine.open(store, place["model"], chunk_len=40) as engine:
        engine.prefill([DOCUMENT])
    with PDLLMRetriever(store=store, model=place["model"]) as retriever:
        assert retriever.invoke("Which boat?")
    assert len(store.refs(engine.fingerprint)) == 1
