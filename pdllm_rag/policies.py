"""Cache policies: where the KV of the selected chunks comes from. One never stands in for another.

- independent: the stored KV, each chunk having seen only itself (what the paper describes);
- joint: the selected chunks encoded again together, seeing each other but not the question, once per question; in a
  block-causal family a token sees, of all chunks, the blocks that do not stand after its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pdllm_store import ChunkKV

from pdllm_rag.attends import CaptureAttend
from pdllm_rag.attention import block_masks, causal_block
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.placement import Placement

POLICIES = ("independent", "joint")


def encode_jointly(
    model: LoadedModel, chunk_ids: Sequence[Sequence[int]], placement: Placement
) -> tuple[list[ChunkKV], Placement]:
    """KV of chunks that see each other, already rotated to their places: their placement has only zero offsets."""
    if not chunk_ids:
        return [], placement
    backbone = model.backbone
    lens = [len(ids) for ids in chunk_ids]
    positions = torch.cat([torch.arange(offset, offset + n) for offset, n in zip(placement.offsets, lens, strict=True)])
    masks = block_masks(positions.to(backbone.device), [sum(lens)], causal_block(model.spec.family))
    capture = CaptureAttend(backbone.rope, [sum(lens)], positions.to(backbone.device), masks, sketch_layer=-1)
    ids = torch.tensor([token for chunk in chunk_ids for token in chunk], device=backbone.device)
    backbone.encode(ids, capture)
    keys = torch.split(torch.stack(capture.keys), lens, dim=1)
    values = torch.split(torch.stack(capture.values), lens, dim=1)
    chunks = [ChunkKV(k, v) for k, v in zip(keys, values, strict=True)]
    return chunks, Placement((0,) * len(lens), placement.canvas_start)
