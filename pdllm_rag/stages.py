"""The first stages that a question may name, over one store and model."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pdllm_store import ChunkStore, ModelFingerprint

from pdllm_rag.first_stage import BM25Index, FirstStage
from pdllm_rag.foreign import ForeignStage, Search
from pdllm_rag.fusion import Fusion
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.sketches import SketchIndex

Choice = str | FirstStage | Search | list["Choice"] | tuple["Choice", ...]  # what `AskOptions.first_stage` takes


class FirstStages:
    """Each is made when it is first asked for; the sketches' memory is taken then."""

    def __init__(self, model: LoadedModel, store: ChunkStore, fingerprint: ModelFingerprint, index: BM25Index) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._makers: dict[str, Callable[[], FirstStage]] = {
            "bm25": lambda: index,
            "sketch": lambda: SketchIndex(model, store, fingerprint),
            "fusion": lambda: Fusion([index, self.chosen("sketch")]),
        }
        self._made: dict[str, FirstStage] = {}
        self._lock = threading.RLock()

    def chosen(self, choice: Choice) -> FirstStage:
        """The stage that a name, a stage or a user's function stands for, or the fusion of several of them.

        Raises:
            ValueError: it is none of them.
        """
        check_choice(choice)
        if isinstance(choice, str):
            with self._lock:
                if choice not in self._made:
                    self._made[choice] = self._makers[choice]()
                return self._made[choice]
        if isinstance(choice, (list, tuple)):
            return Fusion([self.chosen(one) for one in choice])
        return choice if isinstance(choice, FirstStage) else ForeignStage(choice, self._store, self._fingerprint)


NAMES = ("bm25", "sketch", "fusion")


def check_choice(choice: object) -> None:
    """Raises ValueError unless this is a stage's name, a stage, a function, or a list of such."""
    if isinstance(choice, (list, tuple)) and choice:
        for one in choice:
            check_choice(one)
        return
    if choice in NAMES if isinstance(choice, str) else isinstance(choice, FirstStage) or callable(choice):
        return
    raise ValueError(
        f"first_stage is {choice!r}; expected one of {', '.join(NAMES)}, an object with search(text, n, doc_ids=...), "
        "a function (text, n) -> [(doc_id, passage), ...], or several of them in a list"
    )
