"""Where the answer looks: the attention mass on the BOS of each chunk, and what becomes of it without BOS.

The rows are those of an answer that is all masks still, the first denoising step; mass is a mean over them, heads,
layers and questions, and the masses of a question sum to 1. Three ways to encode one context are compared:

- "each": every chunk on its own behind a BOS, as the prefill does it;
- "none": every chunk on its own, without a BOS;
- "first": all of them together, as one dense text behind one BOS.

"head" is the mass on the first row of a chunk, its BOS where it has one, and "rest" that on its other rows. A sink is a
first chunk whose head takes much of the mass; a ridge are heads that take about as much everywhere.

No matrix of rows by rows is made: a Split-S backend returns the logarithm of each softmax's denominator, and the mass
on a run of keys is exp(lse of the run - lse of all).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from pdllm_store import ChunkKV

from pdllm_rag.attends import SplitSAttend
from pdllm_rag.attention import AttentionState, ChunkTable, causal_block, split_s_attention
from pdllm_rag.context import Context, Placed, gather
from pdllm_rag.decoding import Canvas
from pdllm_rag.encoder import ChunkEncoder
from pdllm_rag.evaluation.haystack import BETWEEN, Haystack
from pdllm_rag.models.backbone import Backbone
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.placement import Placement, plan_offsets, round_up
from pdllm_rag.policies import encode_jointly

ANCHORS = ("each", "none", "first")


class RecordingAttend(SplitSAttend):
    """`SplitSAttend` of one sequence that also keeps the mass which its last rows put on each run of keys.

    The runs are the head (one row) and the rest of each chunk, chunk after chunk, and then the canvas.

    Args:
        context: of one sequence; the rest of a chunk of one row has no mass.
        n_rows: canvas rows at the end whose attention is kept.
        block: positions of one block of a block-causal model.
        backend: a Split-S backend.

    Attributes:
        masses: per layer that was run, float32 [runs], on the CPU; a mean over rows and heads.
    """

    def __init__(
        self, backbone: Backbone, context: Context, n_rows: int, *, block: int | None = None, backend: str = "auto"
    ) -> None:
        (sequence,) = context.sequences
        super().__init__(backbone.rope, context, block=block, backend=backend)
        (mask,) = self._masks
        self._own_mask = None if mask is None else mask[-n_rows:]
        self._n_rows = n_rows
        *chunks, canvas = sequence.table.runs()
        parts = [part for start, length, _ in chunks for part in ((start, 1, 0), (start + 1, length - 1, 0))]
        self._tables = [ChunkTable.of([run]) for run in (*parts, canvas)]
        self.masses: list[torch.Tensor] = []

    def attended(self, layer: int, q: torch.Tensor, state: AttentionState) -> None:
        del state  # the masses of the runs sum to it
        rows, keys, values = q[-self._n_rows :], self.context.k[layer], self.context.v[layer]
        last = len(self._tables) - 1
        lse = torch.stack(
            [
                split_s_attention(
                    rows, keys, values, table, mask=self._own_mask if index == last else None, backend=self._backend
                ).lse.float()
                for index, table in enumerate(self._tables)
            ]
        )
        self.masses.append(torch.softmax(lse, dim=0).mean(dim=(1, 2)).cpu())


class Encoded(NamedTuple):
    """A context's KV as one of `ANCHORS` makes it, and where its parts stand."""

    chunks: list[ChunkKV]
    placement: Placement


def encode(model: LoadedModel, texts: Sequence[str], anchors: str, placement: str, chunk_len: int) -> Encoded:
    """Encode the chunks of a context.

    Args:
        anchors: one of `ANCHORS`; "first" encodes the texts joined, and cuts the KV into as many parts.
        placement: mode of `plan_offsets`, of chunks that are encoded on their own.

    Raises:
        ValueError: unknown anchors or placement.
    """
    bos, tokenizer = [model.spec.bos_id], model.tokenizer
    block = causal_block(model.spec.family) or 1
    if anchors == "first":
        ids = [bos + tokenizer.encode(BETWEEN.join(texts))]
        (whole,), placed = encode_jointly(model, ids, plan_offsets([len(ids[0])], "sequential", chunk_len=0))
        start = round_up(placed.canvas_start, block)
        keys, values = (torch.tensor_split(tensor, len(texts), dim=1) for tensor in whole)
        chunks = [ChunkKV(k, v) for k, v in zip(keys, values, strict=True)]
        return Encoded(chunks, Placement((0,) * len(chunks), start))
    if anchors not in ANCHORS:
        raise ValueError(f"anchors is {anchors!r}; expected one of {', '.join(ANCHORS)}")
    rows = [np.array((bos if anchors == "each" else []) + tokenizer.encode(text), dtype=np.int32) for text in texts]
    fingerprint = model.fingerprint("float32")
    batches = ChunkEncoder(model, fingerprint).batches(rows)
    by_id = {meta.chunk_id: kv for batch in batches for meta, kv in batch}
    lens = [len(row) for row in rows]
    planned = plan_offsets(lens, placement, chunk_len=chunk_len, multiple=block)
    return Encoded([by_id[fingerprint.chunk_id(row)] for row in rows], planned)


def masses(model: LoadedModel, encoded: Encoded, question: str) -> torch.Tensor:
    """float32 [Y, 2 * chunks + 1]: mass of the answer's rows on each run of `RecordingAttend`, by layer."""
    family, spec = model.spec.family, model.spec
    block = causal_block(family)
    prompt = model.tokenizer.render(family.template, [{"role": "user", "content": question}])
    canvas = Canvas(
        prompt.ids,
        mask_id=spec.mask_id,
        eos_ids=spec.eos_ids,
        block_len=family.block_len,
        max_new_tokens=family.block_len,
        align=block or 1,
    )
    context = gather([Placed(tuple(encoded.chunks), encoded.placement)], [len(canvas.ids)], model.backbone)
    n_rows = len(canvas.ids) - canvas.prompt_len
    attend = RecordingAttend(model.backbone, context, n_rows, block=block)
    model.backbone.hidden(canvas.ids.to(model.backbone.device), attend)
    return torch.stack(attend.masses)


def measure_anchors(
    model: LoadedModel,
    *,
    lengths: Sequence[int],
    chunk_len: int,
    questions: int,
    placement: str = "sequential",
    seed: int = 0,
    on_question: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Figures for each length and way to encode: the JSON of `pdllm eval anchors`.

    Every question is the passkey's of a haystack that is read whole; its needle is in the middle of another part of it
    each time.

    Raises:
        ValueError: a context does not fit the model's window, or has fewer than two chunks.
    """
    found = []
    for length in lengths:
        haystack = Haystack("passkey", length, chunk_len, lambda text: len(model.tokenizer.encode(text)), seed=seed)
        if not haystack.parts or length > model.spec.family.window:
            raise ValueError(
                f"context of {length} tokens in chunks of {chunk_len}; expected two chunks or more, and at most the "
                f"{model.spec.family.window} tokens of the model's window"
            )
        hidden = [haystack.hide((number + 0.5) / questions, number) for number in range(questions)]
        for way in ANCHORS:
            by_question = []
            for one in hidden:
                texts = [part.text for part in haystack.parts_with(one.part)]
                encoded = encode(model, texts, way, placement, chunk_len)
                by_question.append(masses(model, encoded, one.needle.question))
                on_question()
            found.append({"length": length, "anchors": way, **_figures(torch.stack(by_question))})
    return found


def _figures(mass: torch.Tensor) -> dict[str, Any]:
    """Figures of masses float32 [questions, Y, 2 * chunks + 1].

    `largest_head_by_mean` is 1 for an even ridge and the number of chunks where one head has all the mass.
    """
    by_run = mass.mean(dim=(0, 1)).tolist()
    head, rest, canvas = by_run[:-1:2], by_run[1:-1:2], by_run[-1]
    by_layer = mass.mean(dim=0)
    return {
        "n_chunks": len(head),
        "head": head,
        "rest": rest,
        "canvas": canvas,
        "heads_in_all": sum(head),
        "largest_head_by_mean": max(head) / statistics.fmean(head),
        "layers": {
            "heads": by_layer[:, :-1:2].sum(dim=1).tolist(),
            "first_head": by_layer[:, 0].tolist(),
            "canvas": by_layer[:, -1].tolist(),
        },
    }
