"""Fields and calls that the components of both frameworks share.

- the engine is opened at the first call, never made a field, and shared between copies;
- a pickle holds the store's path and opens it again where it is loaded;
- options are checked when a component is made; an option of None is the engine's default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    PrivateAttr,
    StrictBool,
    StrictInt,
    field_serializer,
    field_validator,
    model_validator,
)

from langchain_pdllm._engines import shared_engine, store_generation

if TYPE_CHECKING:
    from pdllm_rag.answer import AnswerStats
    from pdllm_rag.engine import RagEngine

ENGINE_NAMES = {"max_tokens": "max_new_tokens"}  # options that the frameworks know by another name
RETRIEVAL_OPTIONS = ("k", "candidates", "first_stage", "filter")
ASK_OPTIONS = (
    *RETRIEVAL_OPTIONS,
    "score_window",
    "policy",
    "chunk_rows",
    "placement",
    "decoder",
    "decoder_options",
    "max_tokens",
    "threshold",
    "steps",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "abstain",
)


class EngineHandle:
    """Holds an engine for its component: copies share it, pickles leave it out."""

    def __init__(self) -> None:
        self.engine: RagEngine | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineHandle:
        return self

    def __reduce__(self) -> tuple[type[EngineHandle], tuple[()]]:
        return EngineHandle, ()


class StoreComponent(BaseModel):
    """A component over one store and one model.

    Attributes:
        store: folder of a store, or a `ChunkStore`; it is opened at the first call and never created.
        model: "demo" or a checkpoint's folder.
        device: where the model computes.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    store: Any
    model: str = "demo"
    device: str = "auto"

    _handle: EngineHandle = PrivateAttr(default_factory=EngineHandle)

    @field_validator("store", mode="before")
    @classmethod
    def _check_store(cls, store: Any) -> Any:
        if isinstance(store, os.PathLike):
            store = os.fspath(store)
        if isinstance(store, str) and store:
            return store
        from pdllm_store import ChunkStore

        if not isinstance(store, ChunkStore):
            raise ValueError(f"store is {store!r}; expected the path of a store or a ChunkStore")
        return store

    @field_serializer("store")
    def _dump_store(self, store: Any) -> str:
        return store if isinstance(store, str) else str(store.path)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Any:
        memo = {} if memo is None else memo
        memo[id(self.store)] = self.store  # a copied component reads the same store
        return super().__deepcopy__(memo)

    def opened(self) -> RagEngine:
        """The engine.

        Raises:
            StoreNotFoundError: nothing is at the path; other StoreError, ModelError.
        """
        if self._handle.engine is None:
            self._handle.engine = shared_engine(self.store, self.model, self.device)
        return self._handle.engine

    def identity(self) -> dict[str, Any]:
        """Store, its generation, and model: what an answer depends on besides the options."""
        engine = self._handle.engine
        return {
            "store": os.path.realpath(self.store) if isinstance(self.store, str) else str(self.store.path),
            "generation": store_generation(self.store if engine is None else engine.store),
            "model": self.model,
            "device": self.device,
        }

    def options(self, names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's options: the component's own, then those of this call; None counts as not given.

        Raises:
            ValueError: an option that is not in `names`.
        """
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ValueError(
                f"{type(self).__name__} got unknown option {unknown[0]!r}; expected one of {', '.join(sorted(names))}"
            )
        merged: dict[str, Any] = {name: getattr(self, name, None) for name in names}
        merged.update({name: value for name, value in given.items() if value is not None})
        stop = merged.get("stop")
        if isinstance(stop, list):
            merged["stop"] = tuple(stop)
        return {ENGINE_NAMES.get(name, name): value for name, value in merged.items() if value is not None}


class AskComponent(StoreComponent):
    """A component that answers.

    Attributes:
        k, candidates, filter: how many chunks are read, how many are scored, and metadata that documents must have.
        first_stage: what proposes the chunks scored: a name, or one's own (`pdllm_rag.foreign`).
        score_window: chunks that score this far below the best one are not read; infinity reads all k.
        policy, placement: where the chunks' KV comes from, and where they stand.
        chunk_rows: most rows of a chunk that are read; None reads all.
        decoder, decoder_options, threshold, steps: how the answer is denoised.
        max_tokens: most answer tokens.
        temperature, top_p, seed: sampling; temperature 0 is deterministic.
        stop: strings that end the answer.
        abstain: withhold an answer that the documents do not support.
    """

    k: StrictInt | None = None
    candidates: StrictInt | None = None
    first_stage: Any = None
    filter: dict[str, Any] | None = None
    score_window: float | None = None
    policy: str | None = None
    chunk_rows: int | None = None
    placement: str | None = None
    decoder: str | None = None
    decoder_options: dict[str, Any] | None = None
    max_tokens: StrictInt | None = None
    threshold: float | None = None
    steps: StrictInt | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: StrictInt | None = None
    stop: list[str] | None = None
    abstain: StrictBool | None = None

    @model_validator(mode="after")
    def _check_ask_options(self) -> AskComponent:
        from pdllm_rag.config import AskOptions

        AskOptions().with_changes(self.options(ASK_OPTIONS, {}))
        return self

    def ask_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `engine.answer` besides the question; `chunk_ids` may be among those given."""
        return self.options((*ASK_OPTIONS, "chunk_ids"), given)


class Hit(NamedTuple):
    """A retrieved chunk in the frameworks' terms. `chunk_id` is hex; metadata is the document's own and the chunk's."""

    chunk_id: str
    text: str
    score: float
    char_end: int
    metadata: dict[str, Any]


class SearchComponent(StoreComponent):
    """A component that retrieves.

    Attributes:
        k: most chunks to return.
        candidates: chunks that are scored.
        first_stage: what proposes them: a name, or one's own (`pdllm_rag.foreign`).
        filter: metadata that documents must have.
    """

    k: StrictInt = 4
    candidates: StrictInt | None = None
    first_stage: Any = None
    filter: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_search_options(self) -> SearchComponent:
        from pdllm_rag.config import AskOptions

        AskOptions().with_changes(self.options(RETRIEVAL_OPTIONS, {}))
        return self

    def search(self, question: str, given: Mapping[str, Any]) -> list[Hit]:
        """The best chunks, best first; options given here win."""
        engine = self.opened()
        found = engine.retrieve(question, **self.options(RETRIEVAL_OPTIONS, given))
        documents = {
            doc_id: engine.store.document(engine.fingerprint, doc_id) for doc_id in {hit.ref.doc_id for hit in found}
        }
        hits = []
        for ref, score, text in found:
            document = documents[ref.doc_id]
            metadata = {
                **document.metadata,
                "doc_id": ref.doc_id,
                "ordinal": ref.ordinal,
                "start_index": ref.char_start,
                "score": score,
                "source": document.source,
            }
            if ref.page is not None:
                metadata["page"] = ref.page
            hits.append(Hit(ref.chunk_id.hex(), text, score, ref.char_end, metadata))
        return hits


class Usage(NamedTuple):
    """Tokens of one answer. `input_tokens` holds both kinds of context tokens: read from the store, computed now."""

    input_tokens: int
    output_tokens: int
    stored_tokens: int
    computed_tokens: int

    @classmethod
    def of(cls, stats: AnswerStats) -> Usage:
        """Usage of an answer."""
        computed = stats.context_tokens - stats.cached_tokens
        return cls(stats.prompt_tokens + stats.context_tokens, stats.tokens, stats.cached_tokens, computed)
