"""Everything that a store hands out, in a form that can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import blake3

from pdllm_store.errors import ChunkNotFoundError, DocumentNotFoundError
from pdllm_store.protocol import ChunkStore
from pdllm_store.table_store import TableStore
from pdllm_store.testing.campaigns.specimen import Names
from pdllm_store.testing.fakes import bits
from pdllm_store.types import ChunkId, ChunkMeta, ModelFingerprint

Reading = list[str] | str  # what one call handed out, piece by piece, or the type of the error that it raised
Deviation = Literal["false", "short", "failed"]
GENERATION = "about generation"
BELOW, SAME, ABOVE = "below", "the same", "above"
_OF_CHUNKS = ("load ", "meta ", "metas ")
_ABSENT = (ChunkNotFoundError.__name__, DocumentNotFoundError.__name__)


def readings(store: TableStore, names: Names, generation: int | None = None) -> Iterator[tuple[str, Reading]]:
    """Call everything that reads and describe what each call gave.

    Args:
        generation: what the store's own is compared with; it rises in random steps.
    """
    calls = dict(_calls(store, names))
    if generation is not None:
        calls[GENERATION] = partial(_generation, store, generation)
    for name, read in calls.items():
        try:
            yield name, read()
        except Exception as error:  # the campaign is about which calls raise what, so none is let through
            yield name, type(error).__name__


def deviation(name: str, got: Reading, expected: Reading, once: Sequence[Reading]) -> Deviation | None:
    """How a reading differs from what was written.

    "false": something was handed out that nobody wrote there. "short": something is left out, called absent, counted
    wrongly, or a chunk that is no longer held is. "failed": an error that says that something is wrong.

    Args:
        once: what the same call gave in every state that the store was in.
    """
    if got == expected:
        return None
    if isinstance(got, str):
        return "short" if got in _ABSENT else "failed"
    if name.startswith("about "):
        return "short"
    # What a chunk id stands for is the same for ever; a document that was replaced must not come back.
    states = once if name.startswith(_OF_CHUNKS) else [expected]
    allowed = {piece for state in states if not isinstance(state, str) for piece in state}
    return "short" if allowed.issuperset(got) else "false"


def _calls(store: TableStore, names: Names) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    yield "about stats", partial(_stats, store)
    yield "about dtype", lambda: [store.kv_dtype]
    yield "about cap", lambda: [str(store.max_bytes)]
    yield "about evicted", lambda: [chunk_id.hex() for chunk_id in store.evicted(names.chunk_ids)]
    yield "about missing", lambda: [chunk_id.hex() for chunk_id in store.missing(names.chunk_ids)]
    yield "fingerprints", lambda: [repr(fingerprint) for fingerprint in store.fingerprints()]
    for chunk_id in names.chunk_ids:
        yield f"load {chunk_id.hex()}", partial(_load, store, chunk_id)
        yield f"meta {chunk_id.hex()}", partial(_meta, store, chunk_id)
    for fingerprint in names.fingerprints:
        model = fingerprint.digest.hex()
        yield f"metas of {model}", partial(_metas, store, fingerprint)
        yield f"documents of {model}", partial(_documents, store, fingerprint)
        yield f"about sizes of {model}", partial(_sizes, store, fingerprint)
        yield f"references of {model}", partial(_references, store, fingerprint)
        for doc_id in names.doc_ids:
            yield f"document {doc_id} of {model}", partial(_document, store, fingerprint, doc_id)


def _stats(store: ChunkStore) -> list[str]:
    stats = store.stats()
    return [
        f"{name} {getattr(stats, name)}"
        for name in ("documents", "chunks", "orphans", "tokens", "kv_bytes", "fingerprints")
    ]


def _generation(store: ChunkStore, known: int) -> list[str]:
    generation = store.generation
    return [BELOW if generation < known else SAME if generation == known else ABOVE]


def _load(store: ChunkStore, chunk_id: ChunkId) -> list[str]:
    kv = store.load(chunk_id)
    return [
        f"{name} {tensor.dtype} {tuple(tensor.shape)} {blake3.blake3(bits(tensor).numpy().tobytes()).hexdigest()}"
        for name, tensor in (("keys", kv.k), ("values", kv.v))
    ]


def _meta(store: ChunkStore, chunk_id: ChunkId) -> list[str]:
    return [_described(store.meta(chunk_id))]


def _metas(store: TableStore, fingerprint: ModelFingerprint) -> list[str]:
    return [_described(meta) for meta in store.iter_meta(fingerprint)]


def _described(meta: ChunkMeta) -> str:
    sketch = None if meta.sketch is None else meta.sketch.tobytes().hex()
    tokens = blake3.blake3(meta.token_ids.tobytes()).hexdigest()
    return f"{meta.chunk_id.hex()} {len(meta.token_ids)} {tokens} {sketch}"


def _documents(store: ChunkStore, fingerprint: ModelFingerprint) -> list[str]:
    return [repr(info._replace(n_bytes=0, metadata=_sorted(info.metadata))) for info in store.documents(fingerprint)]


def _sizes(store: ChunkStore, fingerprint: ModelFingerprint) -> list[str]:
    return [f"{info.doc_id} {info.n_bytes}" for info in store.documents(fingerprint)]


def _references(store: ChunkStore, fingerprint: ModelFingerprint) -> list[str]:
    return [repr(ref) for ref in store.refs(fingerprint)]


def _document(store: ChunkStore, fingerprint: ModelFingerprint, doc_id: str) -> list[str]:
    return [repr(store.document(fingerprint, doc_id))]


def _sorted(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(metadata.items()))
