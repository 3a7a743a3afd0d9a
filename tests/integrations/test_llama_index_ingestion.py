"""Ingestion pipelines over the store: upserts, deletes, caches, other splitters; and the store as a vector store."""

from __future__ import annotations

import asyncio
import datetime
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.ingestion import DocstoreStrategy, IngestionCache, IngestionPipeline
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.schema import Document, MetadataMode, NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
)
from llama_index.llms.pdllm import PDLLM
from llama_index.retrievers.pdllm import PDLLMRetriever, PDLLMSynthesizer, PrefillChunks
from llama_index.vector_stores.pdllm import PDLLMVectorStore

TEXTS = {
    "alpha": "The alpha boat sails at dawn from pier one. Its captain likes tea, and its cook likes nobody at all.",
    "beta": "The beta boat sails at noon from pier two. Its captain likes milk, and its cook is a quiet man.",
}


@pytest.fixture
def where(tmp_path: Path, tiny_model_path: Path) -> dict[str, str]:
    return {"store": str(tmp_path / "kb"), "model": str(tiny_model_path)}


def documents(**texts: str) -> list[Document]:
    return [Document(id_=name, text=text, metadata={"colour": name[0]}) for name, text in texts.items()]


def pipeline(where: dict[str, str], *before: Any, **options: Any) -> IngestionPipeline:
    return IngestionPipeline(
        transformations=[*before, PrefillChunks(**where)],
        vector_store=PDLLMVectorStore(**where),
        docstore=SimpleDocumentStore(),
        **options,
    )


def text_of(node: Any) -> str:
    return str(node.get_content(metadata_mode=MetadataMode.NONE))


def held(where: dict[str, str]) -> dict[str, str]:
    """Texts of the stored documents by id."""
    engine = PDLLMVectorStore(**where).opened()
    return {info.doc_id: engine.store.document(engine.fingerprint, info.doc_id).text for info in engine.documents()}


# -- pipelines -----------------------------------------------------------------------------------------------------


def test_a_pipeline_upserts_and_deletes(where: dict[str, str]) -> None:
    line = pipeline(where, docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE)
    nodes = line.run(documents=documents(**TEXTS))
    assert held(where) == TEXTS
    assert [node.node_id for node in nodes] == [
        hit.node.node_id for hit in sorted(PDLLMRetriever(**where).retrieve("boat"), key=lambda n: n.node.ref_doc_id)
    ]
    assert line.run(documents=documents(**TEXTS)) == []
    changed = {**TEXTS, "beta": "The beta boat is sold."}
    assert [node.ref_doc_id for node in line.run(documents=documents(**changed))] == ["beta"]
    assert held(where) == changed
    line.run(documents=documents(beta=changed["beta"]))
    assert held(where) == {"beta": changed["beta"]}
    line.run(documents=documents(**changed))  # back again, though the pipeline's cache has seen it
    assert held(where) == changed


def test_pieces_of_a_splitter_are_replaced_and_deleted_with_their_document(where: dict[str, str]) -> None:
    splitter = TokenTextSplitter(chunk_size=12, chunk_overlap=4, tokenizer=str.split)
    line = pipeline(where, splitter, docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE)
    nodes = line.run(documents=documents(**TEXTS))
    pieces = held(where)
    assert {name.split("#")[0] for name in pieces} == set(TEXTS)
    assert len(pieces) > 4
    assert {node.ref_doc_id for node in nodes} == set(TEXTS)
    assert {text_of(node) for node in nodes} == set(pieces.values())
    line.run(documents=documents(**{**TEXTS, "alpha": "The alpha boat is sold."}))
    assert [text for name, text in held(where).items() if name.startswith("alpha")] == ["The alpha boat is sold."]
    line.run(documents=documents(alpha="The alpha boat is sold."))
    assert list(held(where).values()) == ["The alpha boat is sold."]


@pytest.mark.parametrize("kind", [PrefillChunks, PDLLMVectorStore])
def test_nodes_of_one_source_may_come_in_many_calls(where: dict[str, str], kind: Any) -> None:
    """LlamaIndex inserts in batches; a node that comes again replaces itself."""
    component = kind(**where)
    add = component.add if kind is PDLLMVectorStore else component
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="log")}
    nodes = [TextNode(id_=f"n{i}", text=f"Buoy {i} was seen.", relationships=source) for i in range(4)]
    for batch in (nodes[:2], nodes[2:], nodes[1:2]):
        assert len(add(batch)) == len(batch)
    assert sorted(held(where).values()) == [node.text for node in nodes]
    nodes[1].text = "Buoy 1 was lost."
    add(nodes[1:2])
    assert sorted(held(where).values()) == sorted(node.text for node in nodes)
    add([TextNode(id_="other", text="A boat.")])
    PDLLMVectorStore(**where).delete("log")
    assert held(where) == {"other": "A boat."}


def test_pieces_of_another_splitter_are_read_from_the_store(where: dict[str, str]) -> None:
    """A vector store of somebody else gives pieces longer than a chunk, that overlap, with ids of its own."""
    text = " ".join(f"Sentence {i} of the log says that buoy {i * 7} was seen." for i in range(30))
    pieces = TokenTextSplitter(chunk_size=60, chunk_overlap=15, tokenizer=str.split)(documents(log=text))
    PrefillChunks(**where)(pieces)
    llm = PDLLM(**where, max_tokens=8, steps=4)
    found = [NodeWithScore(node=TextNode(text=piece.get_content())) for piece in (pieces[2], pieces[0])]
    response = PDLLMSynthesizer(llm).synthesize("Which buoy was seen?", found)
    assert response.metadata is not None
    kv = response.metadata["kv"]
    assert (kv["recomputed"], kv["unmatched_chars"]) == (0, 0)
    assert kv["hit"] == kv["recognised"] > 2
    prompt = f"Context:\n{found[0].node.get_content()}\n\nQuestion: Which buoy was seen?"
    done = llm.complete(prompt, on_unmatched="error")
    assert done.raw is not None
    assert done.raw["kv"]["recomputed"] == 0


def test_chunks_are_nodes_as_the_retriever_gives_them(where: dict[str, str]) -> None:
    nodes = {node.node_id: node for node in PrefillChunks(**where)(documents(**TEXTS))}
    retrieved = PDLLMRetriever(**where, similarity_top_k=9).retrieve("boat")
    assert len(retrieved) == len(nodes)
    for scored in retrieved:
        node, chunk = scored.node, nodes[scored.node.node_id]
        assert isinstance(node, TextNode)
        assert (node.text, node.start_char_idx, node.ref_doc_id) == (chunk.text, chunk.start_char_idx, chunk.ref_doc_id)
        assert chunk.metadata.items() <= node.metadata.items()
        assert chunk.get_content(metadata_mode=MetadataMode.EMBED) == chunk.text
        assert chunk.relationships[NodeRelationship.SOURCE].node_id in TEXTS  # type: ignore[union-attr]


def test_unchanged_documents_cost_nothing_and_need_no_cache(where: dict[str, str]) -> None:
    prefill = PrefillChunks(**where)
    first = prefill(documents(**TEXTS))
    generation = prefill.opened().store.generation
    assert [node.node_id for node in PrefillChunks(**where)(documents(**TEXTS))] == [node.node_id for node in first]
    assert prefill.opened().store.generation == generation


def test_a_cache_never_skips_what_the_store_has_lost(where: dict[str, str]) -> None:
    cache = IngestionCache()
    line = IngestionPipeline(transformations=[PrefillChunks(**where)], cache=cache)
    for _ in range(2):
        line.run(documents=documents(**TEXTS))
        assert held(where) == TEXTS
        PDLLMVectorStore(**where).delete("alpha")
        assert list(held(where)) == ["beta"]


def test_what_does_not_go_in_is_left_out_and_said(where: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    docs = [
        Document(id_="good", text="Tea is at four.", metadata={"when": datetime.date(2026, 11, 30)}),
        Document(id_="blank", text="\n"),
    ]
    with caplog.at_level(logging.WARNING):
        nodes = PrefillChunks(**where)(docs)
    assert [node.ref_doc_id for node in nodes] == ["good"]
    assert nodes[0].metadata["when"] == "2026-11-30"
    assert "document 'blank' was not stored" in caplog.text


def test_a_pipeline_is_asynchronous_too(where: dict[str, str], heartbeat: Any) -> None:
    PrefillChunks(**where).opened()
    line = pipeline(where, docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE)
    texts = {f"d{i}": f"Text {i}. " * 30 for i in range(8)}
    assert len(asyncio.run(heartbeat(line.arun(documents=documents(**texts))))) > 8
    asyncio.run(line.arun(documents=documents(d0=texts["d0"])))
    assert list(held(where)) == ["d0"]


def test_a_transformation_dumps_pickles_and_comes_back(where: dict[str, str]) -> None:
    prefill = PrefillChunks(**where)
    prefill(documents(**TEXTS))
    again = PrefillChunks.from_dict(prefill.to_dict())
    assert again.opened() is prefill.opened() is pickle.loads(pickle.dumps(prefill)).opened()
    with pytest.raises(ValueError, match="top_k"):
        PrefillChunks(**where, top_k=1)


# -- vector store --------------------------------------------------------------------------------------------------


def test_the_store_is_searched_by_text(where: dict[str, str]) -> None:
    store = PDLLMVectorStore(**where)
    ids = store.add(documents(**TEXTS))
    found = store.query(VectorStoreQuery(query_str="Which boat?", similarity_top_k=3))
    assert found.nodes is not None
    assert len(found.nodes) == min(3, len(ids))
    assert set(found.ids or ()) <= set(ids)
    assert found.similarities == sorted(found.similarities or (), reverse=True)
    assert asyncio.run(store.aquery(VectorStoreQuery(query_str="Which boat?", similarity_top_k=3))).ids == found.ids
    beta = MetadataFilters(filters=[MetadataFilter(key="colour", value="b")])
    found = store.query(VectorStoreQuery(query_str="Which boat?", similarity_top_k=9, filters=beta))
    assert {node.ref_doc_id for node in found.nodes or ()} == {"beta"}


def test_what_it_cannot_search_for_is_refused(where: dict[str, str]) -> None:
    store = PDLLMVectorStore(**where)
    store.add(documents(**TEXTS))
    with pytest.raises(ValueError, match="not searched by embeddings"):
        store.query(VectorStoreQuery(query_embedding=[0.0], similarity_top_k=1))
    more = MetadataFilter(key="year", value=3, operator=FilterOperator.GT)
    alpha, beta = MetadataFilter(key="colour", value="a"), MetadataFilter(key="colour", value="b")
    nested = MetadataFilters(filters=[alpha, MetadataFilters(filters=[beta])])
    for filters in (
        MetadataFilters(filters=[more]),
        MetadataFilters(filters=[alpha], condition=FilterCondition.NOT),
        MetadataFilters(filters=[alpha, beta], condition=FilterCondition.OR),
        nested,
    ):
        with pytest.raises(ValueError, match="equalities joined by 'and'"):
            store.query(VectorStoreQuery(query_str="x", similarity_top_k=1, filters=filters))
    for query, named in (
        ({"doc_ids": ["beta"]}, "doc_ids"),
        ({"node_ids": ["n"]}, "node_ids"),
        ({"mode": "mmr"}, "mmr"),
    ):
        with pytest.raises(ValueError, match=named):
            store.query(VectorStoreQuery(query_str="x", similarity_top_k=1, **query))  # type: ignore[arg-type]
    both = MetadataFilters(filters=[alpha, beta])
    assert store.query(VectorStoreQuery(query_str="x", similarity_top_k=1, filters=both)).ids == []
    of_alpha = PDLLMVectorStore(**where, filter={"colour": "a"})
    only_beta = MetadataFilters(filters=[beta])
    assert of_alpha.query(VectorStoreQuery(query_str="x", similarity_top_k=1, filters=only_beta)).ids == []
    either = MetadataFilters(filters=[alpha, alpha])
    assert store.query(VectorStoreQuery(query_str="x", similarity_top_k=1, filters=either)).ids
