"""Passes of a backbone over training rows, layer by layer; on a GPU one layer is compiled and serves for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pdllm_rag.models.backbone import Backbone
from pdllm_rag.training.attends import KeysValues, Mask, RowsAttend, Tables
from pdllm_rag.training.losses import predictions


class Passes:
    """Runs one backbone; gradients flow.

    Axes: B rows, L positions, P predictions of a row, V vocabulary.
    """

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        on_gpu = backbone.device.type == "cuda"
        self._layer = torch.compile(self._one, dynamic=False) if on_gpu else self._one

    def tables(self, positions: torch.Tensor) -> Tables:
        """cos and sin of positions int64 [B, L]."""
        return self.backbone.rope.tables(positions.flatten())

    def logits(
        self,
        ids: torch.Tensor,
        predicting: torch.Tensor,
        tables: Tables,
        mask: Mask,
        context: Sequence[KeysValues] | None = None,
    ) -> torch.Tensor:
        """float32 [B x P, V]: what positions int64 [B, P] of ids int64 [B, L] predict.

        Args:
            context: per layer what stands before the rows.
        """
        x = self.backbone.embed(ids.flatten())
        for index, layer in enumerate(self.backbone.model.model.layers):
            x, _ = self._layer(layer, x, tables, mask, len(ids), None if context is None else context[index])
        return predictions(self.backbone.normed(x), predicting, self.backbone.model.lm_head)

    def keys_values(self, ids: torch.Tensor, tables: Tables, mask: Mask) -> list[KeysValues]:
        """Per layer the rotated keys and values of ids int64 [B, L]."""
        x, found = self.backbone.embed(ids.flatten()), []
        for layer in self.backbone.model.model.layers:
            x, own = self._layer(layer, x, tables, mask, len(ids), None)
            found.append(own)
        return found

    def _one(
        self, layer: Any, x: torch.Tensor, tables: Tables, mask: Mask, n_rows: int, before: KeysValues | None
    ) -> tuple[torch.Tensor, KeysValues]:
        attend = RowsAttend(tables, mask, n_rows, before)
        x = self.backbone.block(layer, x, attend)
        assert attend.own is not None
        return x, attend.own
