"""Fields that the components of every framework share, and what they become for the engine.

- the engine is opened at the first call, never made a field, and shared between copies;
- closing one lets the engine go, and the next call opens it again;
- a pickle holds the store's path and opens it again where it is loaded;
- options are checked when a component is made; an option of None is the engine's default;
- an option of a call wins over the component's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    InstanceOf,
    PrivateAttr,
    Strict,
    StrictBool,
    StrictInt,
    TypeAdapter,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from pdllm_rag.components.engines import EngineKey, engine_key, shared_engine, store_generation

if TYPE_CHECKING:
    from pdllm_rag.engine import RagEngine

ENGINE_NAMES = {"max_tokens": "max_new_tokens"}  # options that the frameworks know by another name
Number = Annotated[float, Strict()]
Opened = TypeVar("Opened")
MATERIAL: dict[str, Any] = {  # further arguments of `engine.answer`
    "chunk_ids": list[Any],
    "context": str | list[str],
    "cancel": InstanceOf[threading.Event],
}
_GIVEN = {"chunks": list[Any], **MATERIAL}  # what has no field


class EngineHandle:
    """Holds an engine for its component: copies share it, pickles leave it out, comparisons pass over it."""

    def __init__(self) -> None:
        self.engine: RagEngine | None = None
        self.key: EngineKey | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineHandle:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EngineHandle)

    def __reduce__(self) -> tuple[type[EngineHandle], tuple[()]]:
        return EngineHandle, ()


class Closing:
    """Can be closed, by hand or at the end of a `with`."""

    def close(self) -> None:
        """Let the engine go; a store opened by its path is closed once no component in the process holds it.

        Answers that are running finish first. May be called again; the next use of the object opens the store anew.
        """
        raise NotImplementedError  # each has its own

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StoreComponent(Closing, BaseModel):
    """A component over one store and one model.

    Attributes:
        store: folder or URL of a store, or a `ChunkStore`; it is opened at the first call.
        model: "demo" or a checkpoint's folder.
        device: where the model computes.
        adapter, canvas_adapter: LoRAs beside a model: for every row, and for the canvas's (decoder d2f).
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    store: Any
    model: str = "demo"
    device: str = "auto"
    adapter: str | None = None
    canvas_adapter: str | None = None

    _handle: EngineHandle = PrivateAttr(default_factory=EngineHandle)
    _creates: bool = PrivateAttr(default=False)

    @field_validator("store", mode="before")
    @classmethod
    def _check_store(cls, store: Any) -> Any:
        if isinstance(store, os.PathLike):
            store = os.fspath(store)
        if isinstance(store, str) and store:
            return store
        from pdllm_store import ChunkStore

        if not isinstance(store, ChunkStore):
            raise ValueError(f"store is {store!r}; expected the folder or URL of a store, or a ChunkStore")
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
            StoreNotFoundError: nothing is at the path (a component that writes makes a store); StoreError, ModelError.
        """
        place = (self.store, self.model, self.device, self.adapter, self.canvas_adapter)
        key = engine_key(*place)
        if self._handle.key != key:  # of a copy with another store or model
            self._handle = EngineHandle()
            self._handle.key = key
        engine = self._handle.engine  # another thread may close the component meanwhile
        if engine is None:
            engine = self._handle.engine = shared_engine(*place, create=self._creates)
        return engine

    def close(self) -> None:
        """See `Closing`; its copies let the engine go with it."""
        self._handle.engine = None

    def identity(self) -> dict[str, Any]:
        """Store, its generation, and model: what an answer depends on besides the options."""
        from pdllm_store import real_location

        engine = self._handle.engine
        return {
            "store": real_location(self.store) if isinstance(self.store, str) else str(self.store.path),
            "generation": store_generation(self.store if engine is None else engine.store),
            "model": self.model,
            "device": self.device,
            "adapter": self.adapter,
            "canvas_adapter": self.canvas_adapter,
        }

    def identifying_params(self) -> dict[str, Any]:
        """The identity and the component's own options, for caches of answers."""
        names = sorted(
            type(self).model_fields.keys()
            & {*ask_options(), "recognise", "on_unmatched", "retrieve", "max_history_tokens"}
        )
        return {**self.identity(), **{name: getattr(self, name) for name in names}}

    def checked(self, names: Collection[str], given: Mapping[str, Any]) -> dict[str, Any]:
        """What a call gives, by the same types as a component's fields; None counts as not given.

        Raises:
            ValueError: an option that is not in `names`, or a value of another type.
        """
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ValueError(
                f"{type(self).__name__} got unknown option {unknown[0]!r}; expected one of "
                f"{', '.join(sorted({*names} - {'chunk_ids'}))}"
            )
        return {name: self._typed(name, value) for name, value in given.items() if value is not None}

    def _typed(self, name: str, value: Any) -> Any:
        adapter = _adapter(type(self), name)
        try:
            return value if adapter is None else adapter.validate_python(value)
        except ValidationError as error:
            expected = error.errors()[0]["msg"].replace("Input should be", "expected")
            raise ValueError(f"{name} is {value!r}; {expected}") from None

    def options(self, names: Collection[str], given: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's options: the component's own, then those of this call. Raises what `checked` raises."""
        merged: dict[str, Any] = {name: getattr(self, name, None) for name in names}
        merged.update(self.checked(names, given))
        stop = merged.get("stop")
        if isinstance(stop, list):
            merged["stop"] = tuple(stop)
        return {ENGINE_NAMES.get(name, name): value for name, value in merged.items() if value is not None}


class AskComponent(StoreComponent):
    """A component that answers.

    Attributes:
        k, candidates, filter: how many chunks are read, how many are scored, and metadata that documents must have.
        first_stage: what proposes the chunks scored: a name, or one's own (`pdllm_rag.foreign`).
        rank_weight: what its ranking counts beside the score.
        score_window: chunks that score this far below the best one are not read; infinity reads all k.
        policy, placement: where the chunks' KV comes from, and where they stand.
        chunk_rows: most rows of a chunk that are read; None reads all.
        decoder, decoder_options, threshold, steps: how the answer is denoised.
        max_tokens: most answer tokens.
        temperature, top_p, seed: sampling; temperature 0 is deterministic.
        stop: strings that end the answer.
        abstain, min_support: whether an answer that the documents do not support is withheld, and below which support.
    """

    k: StrictInt | None = None
    candidates: StrictInt | None = None
    first_stage: Any = None
    rank_weight: Number | None = None
    filter: dict[str, Any] | None = None
    score_window: Number | None = None
    policy: str | None = None
    chunk_rows: int | None = None
    placement: str | None = None
    decoder: str | None = None
    decoder_options: dict[str, Any] | None = None
    max_tokens: StrictInt | None = None
    threshold: Number | None = None
    steps: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    seed: StrictInt | None = None
    stop: list[str] | None = None
    abstain: StrictBool | None = None
    min_support: Number | None = None

    @model_validator(mode="after")
    def _check_ask_options(self) -> AskComponent:
        from pdllm_rag.config import AskOptions

        AskOptions().with_changes(self.options(ask_options(), {}))
        return self

    def engine_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `engine.answer` besides the question: its options, those of `MATERIAL` among them."""
        return self.options({*ask_options(), *MATERIAL}, given)


@cache
def _adapter(component: type[StoreComponent], name: str) -> TypeAdapter[Any] | None:
    field = component.model_fields.get(name)
    kind: Any = _GIVEN.get(name) if field is None else Annotated[field.annotation, field]
    return None if kind is None else TypeAdapter(kind)


def ask_options() -> frozenset[str]:
    """The engine's options of a question, by the frameworks' names. One without a field works per call."""
    from dataclasses import fields

    from pdllm_rag.config import AskOptions

    named = {name: theirs for theirs, name in ENGINE_NAMES.items()}
    return frozenset(named.get(field.name, field.name) for field in fields(AskOptions)) - {"cancel"}
