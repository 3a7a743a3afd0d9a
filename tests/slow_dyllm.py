"""DyLLM as its source writes it, row by row over dense matrices: slow, and obviously right.

One sequence. Nothing of the product's decoder is used but the canvas, the denoising loop and the model's modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from pdllm_rag.attention import causal_block
from pdllm_rag.decoding import Canvas, CommitRule, DecodeRequest, DecodeStep
from pdllm_rag.decoding.denoise import denoise
from pdllm_rag.decoding.dyllm import DyLLMOptions
from pdllm_rag.decoding.predictions import LogitRows
from pdllm_rag.models import LoadedModel
from pdllm_rag.models.rope import rotate


@dataclass
class Snapshot:
    """After one pass, of every layer and canvas row: keys, values, contexts, feed-forward outputs; and S by layer."""

    keys: torch.Tensor
    values: torch.Tensor
    contexts: torch.Tensor
    outputs: torch.Tensor
    salient: list[list[int]]


@dataclass
class SlowDyLLM:
    model: LoadedModel
    rule: CommitRule
    options: DyLLMOptions
    tau: float
    snapshots: list[Snapshot] = field(default_factory=list)

    @torch.inference_mode()
    def steps(self, request: DecodeRequest) -> Iterator[DecodeStep]:
        model, options = self.model, self.options
        backbone, layers = model.backbone, model.backbone.model.model.layers
        n_heads, n_kv_heads, dim = backbone.n_heads, backbone.n_kv_heads, backbone.head_dim
        shift, block = int(model.spec.logit_shift), causal_block(model.spec.family)
        chunk_keys = [torch.zeros(0, n_kv_heads, dim) for _ in layers]
        chunk_values = [torch.zeros(0, n_kv_heads, dim) for _ in layers]
        for kv, offset in zip(request.chunk_kv, request.placement.offsets, strict=True):
            for y in range(len(layers)):
                chunk_keys[y] = torch.cat([chunk_keys[y], backbone.rope.shift(kv.k[y], offset)])
                chunk_values[y] = torch.cat([chunk_values[y], kv.v[y]])
        kept: list[dict[str, dict[int, torch.Tensor]]] = [{name: {} for name in "kvcrf"} for _ in layers]
        seen: list[int] = []
        number = 0

        def attention(layer: int, q: torch.Tensor, row: int, n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
            """Softmax weights [H, keys], chunks first, and the values [keys, H, D]."""
            own = kept[layer]
            keys = torch.cat([chunk_keys[layer], torch.stack([own["k"][r] for r in range(n_rows)])])
            values = torch.cat([chunk_values[layer], torch.stack([own["v"][r] for r in range(n_rows)])])
            keys, values = (x.repeat_interleave(n_heads // n_kv_heads, dim=1) for x in (keys, values))
            scores = torch.einsum("hd,thd->ht", q, keys) / math.sqrt(dim)
            if block is not None:
                start, n_chunk = request.placement.canvas_start, len(chunk_keys[layer])
                for other in range(n_rows):
                    if (start + other) // block > (start + row) // block:
                        scores[:, n_chunk + other] = -torch.inf
            return torch.softmax(scores, dim=-1), values

        def forward(_: Sequence[int], canvases: Sequence[Canvas]) -> list[LogitRows]:
            nonlocal seen, number
            (canvas,) = canvases
            ids = canvas.ids.tolist()
            n_rows, n_known = len(ids), len(seen)
            everything = list(range(n_rows))
            is_full = number < options.full_steps or n_rows > n_known
            is_full |= options.refresh_every is not None and number % options.refresh_every == 0
            is_whole = is_full or number % options.whole_every == 0
            rows = everything if is_whole else everything[canvas.prompt_len - shift :]
            committed = [r for r in rows if r < n_known and seen[r] != ids[r]]
            salient = everything if is_full else committed
            always = everything if is_full else (committed if options.union_committed else [])
            room = len(rows) if options.capacity is None else math.ceil(options.capacity * len(rows))
            room = len(rows) if is_full else max(room, len(committed))
            x = {r: backbone.model.model.embed_tokens(torch.tensor([ids[r]]))[0] for r in rows}
            by_layer = []
            for y, layer in enumerate(layers):
                own, tables = kept[y], backbone.rope.tables
                normed = {r: layer.input_layernorm(x[r]) for r in rows}
                queries, change = {}, {}
                for r in rows:
                    q = layer.self_attn.q_proj(normed[r]).view(n_heads, dim)
                    q = layer.self_attn.q_norm(q) if hasattr(layer.self_attn, "q_norm") else q
                    cos, sin = tables(torch.tensor([request.placement.canvas_start + r]))
                    queries[r] = rotate(q, cos[0], sin[0])
                    if r in salient:
                        k = layer.self_attn.k_proj(normed[r]).view(n_kv_heads, dim)
                        k = layer.self_attn.k_norm(k) if hasattr(layer.self_attn, "k_norm") else k
                        v = layer.self_attn.v_proj(normed[r]).view(n_kv_heads, dim)
                        change[r] = v - own["v"].get(r, v)
                        own["k"][r], own["v"][r] = rotate(k, cos[0], sin[0]), v
                contexts, similar = {}, {}
                for r in rows:
                    weights, values = attention(y, queries[r], r, n_rows)
                    if r in salient:
                        new = torch.einsum("ht,thd->hd", weights, values).flatten()
                    else:
                        new = own["c"][r].clone()
                        for s in salient:
                            moved = change[s].repeat_interleave(n_heads // n_kv_heads, dim=0)
                            new += (weights[:, len(chunk_keys[y]) + s, None] * moved).flatten()
                    old = own["r" if options.similarity == "refresh" else "c"].get(r, new)
                    similar[r] = float(F.cosine_similarity(new, old, dim=0, eps=1e-16))
                    contexts[r] = own["c"][r] = new
                ranked = sorted(rows, key=lambda r: (-9.0 if r in always else similar[r], r))
                salient = sorted(r for r in ranked[:room] if r in always or similar[r] < self.tau)
                by_layer.append(salient)
                for r in rows:
                    x[r] = x[r] + layer.self_attn.o_proj(contexts[r])
                    if r in salient:
                        out: Any = layer.mlp(layer.post_attention_layernorm(x[r])[None, None])
                        own["f"][r] = (out[0] if isinstance(out, tuple) else out)[0, 0]
                        own["r"][r] = contexts[r]
                    x[r] = x[r] + own["f"][r]
            seen, number = ids, number + 1
            stacked = {
                name: torch.stack([torch.stack([kept[y][name][r] for r in everything]) for y in range(len(layers))])
                for name in "kvcf"
            }
            self.snapshots.append(Snapshot(stacked["k"], stacked["v"], stacked["c"], stacked["f"], by_layer))
            predicting = [x[canvas.prompt_len + row - shift] for row in canvas.open_rows().tolist()]
            return [LogitRows(backbone.logits(backbone.model.model.norm(torch.stack(predicting))))]

        yield from denoise([request], forward, model.spec, self.rule)
