"""What a question reads instead of what retrieval finds: stored chunks by their ids, and texts that come with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdllm_store import ChunkId, ChunkKV, ChunkStore, DocumentNotFoundError, ModelFingerprint

from pdllm_rag.chunking import is_blank
from pdllm_rag.clock import Clock
from pdllm_rag.first_stage import BM25Index
from pdllm_rag.prefill import Prefiller
from pdllm_rag.reading import Found, Source, sources_of
from pdllm_rag.retrieval import Retriever, Selection, needs_scores

PASTED = "<context>"  # doc_id of chunks of texts that come with a question


class Chosen(NamedTuple):
    """A stored chunk and what retrieval said of it.

    chunk_id: 16 bytes, or as hex.
    score: for its citation, if it was scored.
    margin: how far the best candidate stood above their median; an answer's support is judged by that of the first.
    """

    chunk_id: ChunkId | str
    score: float | None = None
    margin: float | None = None


def id_of(chunk: ChunkId | str | Chosen) -> ChunkId:
    """The id of a chunk, however it is given. Raises ValueError."""
    given = chunk.chunk_id if isinstance(chunk, Chosen) else chunk
    try:
        return bytes.fromhex(given) if isinstance(given, str) else bytes(memoryview(given))
    except (TypeError, ValueError) as error:
        raise ValueError(f"chunk id {given!r} is no hexadecimal text; expected 32 hex digits or 16 bytes") from error


@dataclass(frozen=True)
class Given:
    """Reads what is given, over one store and model."""

    store: ChunkStore
    fingerprint: ModelFingerprint
    index: BM25Index
    prefiller: Prefiller
    retriever: Retriever

    def stored(self, chunks: Sequence[ChunkId | str | Chosen]) -> Found:
        """Exactly these chunks.

        Raises:
            DocumentNotFoundError: a chunk is no document's; ValueError: something is no id.
        """
        if isinstance(chunks, (str, bytes, Chosen)):
            raise ValueError("chunk_ids is a single id; expected a list of them")
        chosen: dict[ChunkId, Chosen] = {}
        for one in chunks:
            chosen.setdefault(id_of(one), one if isinstance(one, Chosen) else Chosen(one))
        refs = tuple(self.index.refs_of(chosen))
        known = {ref.chunk_id for ref in refs}
        unknown = [chunk_id.hex() for chunk_id in chosen if chunk_id not in known]
        if unknown:
            raise DocumentNotFoundError(
                f"chunk {unknown[0]} belongs to no document of this model in {self.store.path}; "
                "expected ids from retrieve() or `pdllm store list --json`"
            )
        scores = tuple(chosen[ref.chunk_id].score for ref in refs)
        margin = next((one.margin for one in chosen.values()), None)
        selection = Selection.unscored(refs)._replace(scores=scores, margin=margin)
        return Found(sources_of(self.store, self.fingerprint, refs), selection, {}, exact=True)

    def pasted(
        self, texts: str | Sequence[str], question: str, k: int, clock: Clock, *, score_window: float | None
    ) -> Found:
        """The k best chunks of texts that are encoded now and not stored.

        Raises:
            EmptyDocumentError: there is nothing to see in the texts.
        """
        texts = [texts] if isinstance(texts, str) else texts
        sources: list[Source] = []
        kv: dict[ChunkId, ChunkKV] = {}
        with clock.phase("load"):
            pieces = [text for text in dict.fromkeys(texts) if not is_blank(text)]
            for number, text in enumerate(pieces or texts, start=1):
                name = PASTED if number == 1 else f"{PASTED[:-1]} {number}>"
                document, chunks = self.prefiller.encode_text(name, text)
                for batch in self.prefiller.encoder.batches(list(chunks.values())):
                    kv |= {meta.chunk_id: chunk for meta, chunk in batch}
                for ref in document.chunks:
                    quote = text[ref.char_start : ref.char_end]
                    sources.append(Source(ref, chunks[ref.chunk_id].tolist(), quote))
        refs = [source.ref for source in sources]
        if needs_scores(len(refs), k, score_window):
            kvs = [kv[ref.chunk_id] for ref in refs]
            selection = self.retriever.rank(question, refs, kvs, k, clock)
        else:
            selection = Selection.unscored(refs)
        computed = frozenset(ref.chunk_id for ref in selection.refs)
        by_ref = {source.ref: source for source in sources}
        return Found([by_ref[ref] for ref in selection.refs], selection._replace(recomputed=computed), kv)

    def together(self, stored: Found, pasted: Found) -> Found:
        """All of both. Their scores say nothing about each other, so none are kept."""
        selection = Selection.unscored((*stored.selection.refs, *pasted.selection.refs))
        selection = selection._replace(recomputed=pasted.selection.recomputed)
        return Found([*stored.sources, *pasted.sources], selection, pasted.kv, exact=True)
