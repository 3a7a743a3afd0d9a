"""A checkpoint's own names and shapes, put into the library's: of config keys, of modules, of tensors.

Most families only rename. Mixture-of-experts checkpoints keep a tensor for each expert where the library stacks them,
and may fuse q, k and v. A partial rotary embedding becomes a whole one by permuting the dimensions of q and k alike,
which no attention score notices: dimensions that turn together go where the half-rotation layout has them, the others
get frequency zero (see `Rope.from_config`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from pdllm_rag.models.families import Family

_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_ABOUT_FILES = {"model_type", "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version"}


class Piece(NamedTuple):
    """A tensor, and the part of the library's tensor that it is (None: all of it)."""

    target: str
    part: tuple[int | slice, ...] | None
    tensor: torch.Tensor


def library_config(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json under the library's names.

    Raises:
        ValueError: config.json asks for something that the family's modules do not compute.
    """
    for key, value in family.computed:
        if config.get(key) is not None and config[key] != value:
            raise ValueError(
                f"config.json has {key}={config[key]!r}; family {family.name} computes {key}={value!r} only"
            )
    names = dict(family.config_names)
    renamed = {names[key]: value for key, value in config.items() if key in names and value is not None}
    kept = {key: value for key, value in config.items() if key not in names and key not in _ABOUT_FILES}
    return {**dict(family.config_defaults), **kept, **renamed}


class Layout:
    """Where a checkpoint's tensors belong in the library's model.

    Args:
        config: the library's config.
    """

    def __init__(self, family: Family, config: Any) -> None:
        layers = range(config.num_hidden_layers)
        self.modules = {
            theirs.format(layer): ours.format(layer) for theirs, ours in family.module_names for layer in layers
        }
        self._theirs = {ours: theirs for theirs, ours in self.modules.items()}
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._qkv = [n * self._head_dim for n in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
        self._n_turning = int(self._head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        self._inner: int = getattr(config, "moe_intermediate_size", 0)
        self.only_renames = self._n_turning == self._head_dim and not self._inner

    def theirs(self, target: str) -> str:
        """The checkpoint's name of a tensor of the library's, as far as it only differs by name."""
        module, _, kind = target.rpartition(".")
        return f"{self._theirs.get(module, module)}.{kind}"

    def ours(self, module: str) -> str:
        """The library's name of a checkpoint's module."""
        return self.modules.get(module, module)

    def pieces(self, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        """What a tensor of the checkpoint is in the library's model. Shapes follow, so meta tensors will do."""
        module, _, kind = name.rpartition(".")
        module = self.ours(module)
        if module.endswith(".qkv_proj"):
            for letter, part in zip("qkv", torch.split(tensor, self._qkv), strict=True):
                # cloned: a view would keep all three alive
                yield from self.pieces(f"{module.removesuffix('qkv_proj')}{letter}_proj.{kind}", part.clone())
        elif found := _EXPERT.fullmatch(f"{module}.{kind}"):
            experts, number, which = found[1], int(found[2]), found[3]
            if which == "down":
                yield Piece(f"{experts}.down_proj", (number,), tensor)
            else:
                rows = slice(0, self._inner) if which == "gate" else slice(self._inner, 2 * self._inner)
                yield Piece(f"{experts}.gate_up_proj", (number, rows), tensor)
        elif module.endswith(".mlp.gate") and kind == "expert_bias":
            yield Piece(f"{module}.e_score_correction_bias", None, tensor)
        else:
            if module.endswith((".q_proj", ".k_proj", ".q_norm", ".k_norm")):
                tensor = self._turned(tensor)
            yield Piece(f"{module}.{kind}", None, tensor)

    def _turned(self, tensor: torch.Tensor) -> torch.Tensor:
        turning, dims = self._n_turning, self._head_dim
        if turning == dims:
            return tensor
        still = (dims - turning) // 2
        order = [*range(turning // 2), *range(turning, turning + still)]
        order += [*range(turning // 2, turning), *range(turning + still, dims)]
        return tensor.view(-1, dims, *tensor.shape[1:])[:, order].reshape(tensor.shape)
