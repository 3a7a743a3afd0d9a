"""Cache policies: where the KV of the selected chunks comes from. One never stands in for another.

- independent: the stored KV, each chunk having seen only itself (what the paper describes);
- joint: the selected chunks encoded again together, seeing each other but not the question, once per question; in a
  block-causal family a token sees, of all chunks, the blocks that do not stand after its own;
- joint_query: as joint, and they see the question and the first block of masks too, as in the first step of dense
  decoding (what the authors' published numbers were made with). A chunk of a block-causal family sees neither.

Whatever decoder reads chunk KV reads that of any policy.
Source: Prefilling-dLLM (arXiv 2606.10537); its public code for joint_query.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pdllm_store import ChunkKV

from pdllm_rag.attends import CaptureAttend
from pdllm_rag.attention import block_masks, causal_block
from pdllm_rag.errors import UnfitModelError
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.models.spec import ModelSpec
from pdllm_rag.placement import Placement

POLICIES = ("independent", "joint", "joint_query")


def check_policy(policy: str, spec: ModelSpec) -> None:
    """Raises UnfitModelError where a policy means nothing for a model."""
    if policy == "joint_query" and causal_block(spec.family) is not None:
        raise UnfitModelError(
            f"policy is 'joint_query' with family {spec.family.name}, whose chunks do not see what stands after them; "
            "expected 'joint', which is the same there, or 'independent'"
        )


def rows_seen(policy: str, spec: ModelSpec, prompt_ids: Sequence[int]) -> list[int]:
    """Ids of the canvas rows that chunks see under a joint policy: none, or the prompt and a block of masks."""
    return [*prompt_ids, *[spec.mask_id] * spec.family.block_len] if policy == "joint_query" else []


def encode_jointly(
    model: LoadedModel, chunk_ids: Sequence[Sequence[int]], placement: Placement, canvas_ids: Sequence[int] = ()
) -> tuple[list[ChunkKV], Placement]:
    """KV of chunks that see each other, already rotated to their places: their placement has only zero offsets.

    Args:
        canvas_ids: of rows behind the chunks that they see too; their own KV is not kept.
    """
    if not chunk_ids:
        return [], placement
    backbone = model.backbone
    lens = [*map(len, chunk_ids), len(canvas_ids)]
    starts = [*placement.offsets, placement.canvas_start]
    positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lens, strict=True)])
    positions = positions.to(backbone.device)
    masks = block_masks(positions, [sum(lens)], causal_block(model.spec.family))
    capture = CaptureAttend(backbone.rope, [sum(lens)], positions, masks, sketch_layer=-1)
    ids = torch.tensor([token for part in (*chunk_ids, canvas_ids) for token in part], device=backbone.device)
    backbone.encode(ids, capture)
    keys = torch.split(torch.stack(capture.keys), lens, dim=1)[:-1]
    values = torch.split(torch.stack(capture.values), lens, dim=1)[:-1]
    chunks = [ChunkKV(k, v) for k, v in zip(keys, values, strict=True)]
    return chunks, Placement((0,) * len(chunks), placement.canvas_start)
