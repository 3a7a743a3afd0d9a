"""Several first stages as one, by the ranks that they give.

Source: Cormack, Clarke, Buettcher (SIGIR 2009), reciprocal rank fusion.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pdllm_store import ChunkId

from pdllm_rag.first_stage import Candidate, FirstStage

RANK_OFFSET = 60  # the source's constant: how little the first ranks count more than the next
DEPTH = 32  # candidates of each stage, at least


class Fusion:
    """Ranks by the sum over stages of 1 / (60 + rank).

    What a stage gives a score of exactly 0.0 it only fills up with (see `Candidate`): that earns nothing, and comes
    behind all others.
    """

    def __init__(self, stages: Sequence[FirstStage]) -> None:
        if not stages:
            raise ValueError("fusion got no stages; expected one at least")
        self._stages = stages

    def search(self, text: str, n: int, /, *, doc_ids: Collection[str] | None = None) -> list[Candidate]:
        """The n best chunks, best first, ties in document order."""
        found: dict[ChunkId, Candidate] = {}
        for stage in self._stages:
            for rank, (ref, score) in enumerate(stage.search(text, max(n, DEPTH), doc_ids=doc_ids), start=1):
                earned = 1 / (RANK_OFFSET + rank) if score != 0.0 else 0.0
                before = found.get(ref.chunk_id, Candidate(ref, 0.0))
                found[ref.chunk_id] = Candidate(min(before.ref, ref), before.score + earned)
        return sorted(found.values(), key=lambda candidate: (-candidate.score, candidate.ref))[:n]
