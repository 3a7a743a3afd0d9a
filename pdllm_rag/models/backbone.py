"""The layer loop, over packed rows, with injected attention.

- weights and modules are the library's; the loop is ours, so prefill, scoring and every decoder share it;
- rows of all sequences lie one after another ("packed"): no padding exists, so none can leak;
- `attend` receives un-rotated queries and keys and owns positions, masks and caches.

Axes: N packed rows, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from pdllm_rag.models.rope import Rope

# On a CPU oneDNN keeps, up to 1,024 of them, each 16-bit matrix product that it has compiled: half a megabyte and two
# milliseconds for each number of rows. They are rounded up to multiples of this, which changes a row by rounding at
# most. Loops that call the layers themselves (dyllm) are not.
_EVEN_ROWS = 32


class Attend(Protocol):
    """Attention of one layer over packed rows."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Context of every row, [N, H, D], from q [N, H, D] and k, v [N, G, D], all un-rotated."""
        ...


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """The tensor's GPU is the current one within: Triton launches there, wherever a kernel's arguments lie."""
    manager: AbstractContextManager[object] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return manager


class Backbone:
    """A decoder stack of the Llama/Qwen2/Qwen3 shape.

    Args:
        model: a transformers `*ForCausalLM` whose `.model.layers` have the usual names.
        rope: the model's rotary tables.
        forbidden_from: logits of ids at or above it are never returned as finite (rows beyond the tokenizer).
        mask_id: its logit is -inf: a mask is never an answer.
    """

    def __init__(self, model: Any, rope: Rope, *, mask_id: int, forbidden_from: int) -> None:
        self.model = model
        self.rope = rope
        self.mask_id = mask_id
        self.forbidden_from = forbidden_from
        config = model.config
        self.n_layers: int = config.num_hidden_layers
        self.n_heads: int = config.num_attention_heads
        self.n_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.dtype: torch.dtype = model.model.embed_tokens.weight.dtype
        self.device: torch.device = model.model.embed_tokens.weight.device

    def over(self, model: Any) -> Backbone:
        """A plain backbone over another model of this shape, such as one with an adapter on it."""
        return Backbone(model, self.rope, mask_id=self.mask_id, forbidden_from=self.forbidden_from)

    @torch.inference_mode()
    def hidden(self, ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Final normed hidden states [N, hidden] of packed token ids int64 [N]."""
        n_rows = len(ids)
        with on_device_of(ids):
            return self.forward(*self._even(ids, attend))[:n_rows]

    def forward(self, ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        """As `hidden`, with gradients."""
        x = self.embed(ids)
        for index, layer in enumerate(self.model.model.layers):
            x = self.block(layer, x, partial(attend, index))
        return self.normed(x)

    def block(self, layer: Any, x: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        """One layer (a module of the model's) over x [1, N, hidden]; `attend` is called with q, k and v."""
        normed = layer.input_layernorm(x)
        context = attend(self.queries(layer, normed), *self.keys_values(layer, normed))
        x = x + layer.self_attn.o_proj(context.reshape(1, context.shape[0], -1))
        return x + self._feed_forward(layer, layer.post_attention_layernorm(x)[0])

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """What the first layer is given, [1, N, hidden], of ids int64 [N]."""
        embedded: torch.Tensor = self.model.model.embed_tokens(ids[None])
        return embedded

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """The final norm of what the last layer gives, [N, hidden]."""
        out: torch.Tensor = self.model.model.norm(x)[0]
        return out

    @torch.inference_mode()
    def encode(self, ids: torch.Tensor, attend: Attend) -> None:
        """Run the layers for what `attend` captures; whatever only the output would need is left out."""
        with on_device_of(ids):
            ids, attend = self._even(ids, attend)
            x = self.embed(ids)
            last = self.n_layers - 1
            for index, layer in enumerate(self.model.model.layers):
                normed = layer.input_layernorm(x)
                context = attend(index, self.queries(layer, normed), *self.keys_values(layer, normed))
                if index < last:
                    x = x + layer.self_attn.o_proj(context.reshape(1, context.shape[0], -1))
                    x = x + self.feed_forward(index, layer.post_attention_layernorm(x)[0])

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits [M, V] of hidden rows [M, hidden]; the mask id and unused rows are -inf."""
        return self.allowed(self.raw_logits(hidden))

    @torch.inference_mode()
    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head's own output [M, V], in the compute dtype, for every id."""
        n_rows, n_more = len(hidden), self._n_more(len(hidden))
        rows = F.pad(hidden, (0, 0, 0, n_more)) if n_more else hidden
        raw: torch.Tensor = self.model.lm_head(rows[None])[0, :n_rows]
        return raw

    @torch.inference_mode()
    def allowed(self, raw: torch.Tensor) -> torch.Tensor:
        """`raw_logits` as float32, with -inf at ids that are never an answer (float32 ones are changed in place)."""
        logits = raw.float()
        logits[:, self.mask_id] = -torch.inf
        logits[:, self.forbidden_from :] = -torch.inf
        return logits

    @torch.inference_mode()
    def proposals(self, raw: torch.Tensor) -> torch.Tensor:
        """int32 [M, 3] of `raw_logits` [M, V]: the likeliest token, and the bits of two float32 values, its probability
        and the logarithm of the softmax's denominator. As `decoding.propose` at temperature 0, on the device."""
        logits = self.allowed(raw)
        best, tokens = logits.max(dim=-1)
        lse = logits.logsumexp(dim=-1)
        return torch.stack((tokens.int(), (best - lse).exp().view(torch.int32), lse.view(torch.int32)), dim=1)

    # What a layer is made of, for a loop that leaves rows out of some of it.

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """x + delta, and its norm by a module; both [..., hidden]."""
        total = x if delta is None else x + delta
        return total, norm(total)

    def queries(self, layer: Any, normed: torch.Tensor) -> torch.Tensor:
        """Un-rotated queries [N, H, D] of a layer's (a module's) normed rows [..., hidden]."""
        attention = layer.self_attn
        q: torch.Tensor = attention.q_proj(normed).view(-1, self.n_heads, self.head_dim)
        return attention.q_norm(q) if hasattr(attention, "q_norm") else q

    def keys_values(self, layer: Any, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Un-rotated keys and values [N, G, D], likewise."""
        attention = layer.self_attn
        k = attention.k_proj(normed).view(-1, self.n_kv_heads, self.head_dim)
        v = attention.v_proj(normed).view(-1, self.n_kv_heads, self.head_dim)
        return attention.k_norm(k) if hasattr(attention, "k_norm") else k, v

    def feed_forward(self, index: int, normed: torch.Tensor) -> torch.Tensor:
        """What a layer's feed-forward part adds to normed rows [N, hidden]."""
        return self._feed_forward(self.model.model.layers[index], normed)

    def _feed_forward(self, layer: Any, normed: torch.Tensor) -> torch.Tensor:
        out = layer.mlp(normed[None])
        output: torch.Tensor = out[0]  # of mixture-of-experts blocks the first of two: they also return router logits
        return output[0] if isinstance(out, tuple) else output

    def _n_more(self, n_rows: int) -> int:
        """Rows to add to `n_rows`."""
        return -n_rows % _EVEN_ROWS if self.device.type == "cpu" and self.dtype.itemsize == 2 else 0

    def _even(self, ids: torch.Tensor, attend: Attend) -> tuple[torch.Tensor, Attend]:
        """`ids` with rows added, and an `attend` that keeps those from the one given."""
        n_rows, n_more = len(ids), self._n_more(len(ids))

        def among_more(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.pad(attend(layer, q[:n_rows], k[:n_rows], v[:n_rows]), (0, 0, 0, 0, 0, n_more))

        return (F.pad(ids, (0, n_more)), among_more) if n_more else (ids, attend)
