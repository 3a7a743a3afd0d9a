"""One entry to every Split-S backend. A backend that is asked for by name never falls back to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from pdllm_rag.attention import flash, flex, reference, triton
from pdllm_rag.attention.merge import AttentionState
from pdllm_rag.attention.table import ChunkTable
from pdllm_rag.models.backbone import on_device_of
from pdllm_rag.models.rope import Rope


class Backend(NamedTuple):
    """One way to compute Split-S.

    attend: called as (q, k, v, table, *, rope, mask) after the arguments were checked.
    why_not: why it cannot run on this device with this dtype and head dim, or None.
    """

    attend: Callable[..., AttentionState]
    why_not: Callable[[torch.device, torch.dtype, int], str | None]


BACKENDS = {
    "reference": Backend(reference.reference, lambda *_: None),
    "flash": Backend(flash.flash, flash.why_not),
    "flex": Backend(flex.flex, flex.why_not),
    "triton": Backend(triton.triton, triton.why_not),
}


def resolve(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The name of the backend that runs: the one asked for, or what "auto" comes to here.

    "auto" is on CUDA the first of triton and flash that runs, elsewhere flash if it runs; else the reference.

    Args:
        backend: "auto" or one of `BACKENDS`.
        device, dtype, head_dim: of queries and keys.

    Raises:
        ValueError: an unknown backend, or a named one that cannot run here.
    """
    if backend == "auto":
        preferred = ("triton", "flash") if device.type == "cuda" else ("flash",)
        return next((name for name in preferred if not BACKENDS[name].why_not(device, dtype, head_dim)), "reference")
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r} is unknown; expected auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[backend].why_not(device, dtype, head_dim)
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot run: {reason}; ask for 'auto' or 'reference'")
    return backend


def split_s_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: ChunkTable,
    *,
    rope: Rope | None = None,
    mask: torch.Tensor | None = None,
    backend: str = "auto",
) -> AttentionState:
    """Attention of every query row over the rows that `table` names, as one softmax.

    Args:
        q: [L, H, D], rotated at absolute positions.
        k, v: [S, G, D], H a multiple of G; rows that the table does not read are never read. Within a row of q, k or v
            elements lie next to each other; rows may lie apart, those of k and v equally far.
        table: the splits; an offset o means that the keys stand o positions further on than they were rotated for.
        rope: needed when an offset is not 0.
        mask: bool [L, rows of the last split], True where a query row sees a key of it; None: everywhere. The other
            splits are seen by every row. The last split is then to be read whole.
        backend: "auto" (see `resolve`), "reference", "flash", "flex" or "triton".

    Returns:
        out [L, H, D] in q's dtype and lse [L, H] in natural logarithms; a row that sees no key gets zeros and -inf.

    Raises:
        ValueError: shapes do not fit, the table reaches beyond the buffer, or the backend cannot run here.
    """
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"split_s_attention got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; "
            "expected [L, H, D], [S, G, D], [S, G, D] with H a multiple of G"
        )
    if not all(x[:1].is_contiguous() for x in (q, k, v)) or (len(k) > 1 and k.stride(0) != v.stride(0)):
        raise ValueError(
            f"split_s_attention got strides {q.stride()} of q, {k.stride()} of k, {v.stride()} of v; expected "
            "contiguous rows, those of k and v equally far apart: pass .contiguous() copies"
        )
    if any(start + length > k.shape[0] for start, length, _ in table.runs()):
        raise ValueError(f"chunk table reaches beyond the buffer: runs {list(table.runs())}, buffer rows {k.shape[0]}")
    if any(table.offsets) and rope is None:
        raise ValueError("chunk table has offsets but no rope was given; pass the model's rope")
    if mask is not None and mask.shape != (q.shape[0], table.lens[-1] if table.lens else 0):
        raise ValueError(f"mask is {tuple(mask.shape)}; expected {q.shape[0]} query rows by the last of {table.lens}")
    if mask is not None and table.kept and table.kept[-1] is not None:
        raise ValueError(
            f"the last run is masked and keeps {len(table.kept[-1])} of its {table.lens[-1]} rows; expected a masked "
            "run that is read whole: leave its kept rows at None and hide keys in the mask"
        )
    name = resolve(backend, q.device, q.dtype, q.shape[2])
    with on_device_of(q):
        return BACKENDS[name].attend(q, k, v, table, rope=rope, mask=mask)
