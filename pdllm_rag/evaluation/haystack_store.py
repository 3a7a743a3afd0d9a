"""A haystack in a store, a document for each of its parts: what is in place already is never encoded again.

With BOS anchors the parts go in as any document does (`RagEngine.prefill`). Without them they are encoded as bare
tokens, which the engine's own prefill never does: a chunk's tokens are part of its id, so the two are never mixed up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from pdllm_store import ChunkRef, Document

from pdllm_rag.chunking import text_id
from pdllm_rag.encoder import ChunkEncoder
from pdllm_rag.engine import RagEngine
from pdllm_rag.evaluation.haystack import Haystack, Part
from pdllm_rag.prefill import InputDocument

BARE = "one chunk without BOS"  # the recipe of a part without an anchor


class HaystackStore:
    """Keeps the store of an engine in step with the haystack that is asked.

    Args:
        engine: over a store that is used for nothing else; its chunk_len is the haystacks'.
        bos: whether each chunk begins with a BOS.
    """

    def __init__(self, engine: RagEngine, *, bos: bool) -> None:
        self._engine = engine
        self._bos = bos
        self._encoder = ChunkEncoder(engine.model, engine.fingerprint)
        self._filler: dict[str, str] = {}  # text by doc_id
        self._needle: str | None = None
        engine.store.register(engine.fingerprint)

    @staticmethod
    def doc_id(part: Part) -> str:
        """The document of a part; ids sort as the text goes."""
        return f"part-{part.place:08d}"

    def fill(self, haystack: Haystack) -> int:
        """Bring in the parts that stay, and take out what is of another haystack; returns the chunks encoded."""
        wanted = {self.doc_id(part): part.text for part in haystack.parts}
        self._drop([doc_id for doc_id in self._filler if doc_id not in wanted])
        self._drop([] if self._needle is None else [self._needle])
        n_computed = self._bring([(name, text) for name, text in wanted.items() if self._filler.get(name) != text])
        self._filler, self._needle = wanted, None
        return n_computed

    def hide(self, part: Part) -> int:
        """Put the needle's part in the place of the one before; returns the chunks encoded."""
        self._drop([] if self._needle is None else [self._needle])
        self._needle = self.doc_id(part)
        return self._bring([(self._needle, part.text)])

    def _drop(self, doc_ids: Iterable[str]) -> None:
        for doc_id in doc_ids:
            self._engine.delete(doc_id)

    def _bring(self, texts: Sequence[tuple[str, str]]) -> int:
        if not self._bos:
            return self._bring_bare(texts)
        report = self._engine.prefill([InputDocument(doc_id, text, doc_id) for doc_id, text in texts])
        if report.failed:
            raise ValueError(f"part {report.failed[0].path} of a haystack did not go in: {report.failed[0].reason}")
        if any(len(info.chunk_ids) != 1 for info in self._engine.documents()):
            raise ValueError("a part of a haystack was cut into several chunks; expected one. Take longer chunks")
        return report.chunks_computed

    def _bring_bare(self, texts: Sequence[tuple[str, str]]) -> int:
        engine, fingerprint = self._engine, self._engine.fingerprint
        rows = [np.array(engine.model.tokenizer.encode(text), dtype=np.int32) for _, text in texts]
        absent = set(engine.store.missing([fingerprint.chunk_id(ids) for ids in rows]))
        n_computed = 0
        for batch in self._encoder.batches([ids for ids in rows if fingerprint.chunk_id(ids) in absent]):
            engine.store.put(fingerprint, batch)
            n_computed += len(batch)
        for (doc_id, text), ids in zip(texts, rows, strict=True):
            ref = ChunkRef(doc_id, 0, fingerprint.chunk_id(ids), 0, len(text))
            document = Document(doc_id, doc_id, text, text_id(text), BARE, (ref,), len(ids))
            engine.store.add_document(fingerprint, document)
        return n_computed
