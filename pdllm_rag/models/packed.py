"""Weights in 4 and 8 bits, as the bundled model and its adapter are stored.

- 4 bits, groups of 32 columns with one float16 scale: `<name>_q4` uint8 [rows, columns/2] holds column 2j in its low
  and 2j+1 in its high half; W[r, c] = (q[r, c] - 8) * scale[r, c // 32], `<name>_q4_scale` float16 [rows, columns/32];
- 8 bits, one float16 scale a row: `<name>` int8 [rows, columns]; W[r, c] = q[r, c] * scale[r], `<name>_scale` float16
  [rows, 1].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

GROUP = 32
SUFFIX = "_q4"
SHARES = (1.0, 0.9, 0.8)  # of a group's farthest value, which level -8 may stand for


def is_packed(names: Mapping[str, object]) -> bool:
    """Whether a checkpoint's tensor names show one of these formats."""
    return any(name.endswith("_scale") and name.removesuffix("_scale") in names for name in names)


def unpack(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """De-quantised tensors under their plain names, in `dtype`; what is not packed is converted.

    Raises:
        ValueError: a packed tensor has no scale, a scale no tensor, or the shapes do not fit.
    """
    for name in tensors:
        if name.endswith("_scale") and name.removesuffix("_scale") not in tensors:
            raise ValueError(f"{name} has no tensor {name.removesuffix('_scale')} to scale")
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SUFFIX):
            scale = tensors.get(f"{name}_scale")
            if scale is None or scale.shape != (tensor.shape[0], tensor.shape[1] * 2 // GROUP):
                got = None if scale is None else tuple(scale.shape)
                raise ValueError(f"{name}: scale has shape {got}, expected {(tensor.shape[0], tensor.shape[1] // 16)}")
            plain[name.removesuffix(SUFFIX)] = _unpack_one(tensor, scale, dtype)
        elif tensor.dtype == torch.int8:
            scale = tensors.get(f"{name}_scale")
            if scale is None or scale.shape != (tensor.shape[0], 1):
                got = None if scale is None else tuple(scale.shape)
                raise ValueError(f"{name}: scale has shape {got}, expected {(tensor.shape[0], 1)}")
            plain[name] = (tensor.float() * scale.float()).to(dtype)
        elif not name.endswith("_scale"):
            plain[name] = tensor.to(dtype)
    return plain


class Q4(NamedTuple):
    """A matrix in 4 bits: float32 levels -8..7 [rows, columns] and float16 scales [rows, columns/32]."""

    levels: torch.Tensor
    scale: torch.Tensor

    def values(self) -> torch.Tensor:
        """What is read back, float32 [rows, columns]."""
        return (self.levels.view(*self.scale.shape, GROUP) * self.scale.float()[..., None]).view(self.levels.shape)

    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(`_q4`, `_q4_scale`)."""
        pairs = (self.levels + 8).to(torch.uint8).view(self.levels.shape[0], -1, 2)
        return (pairs[..., 0] | (pairs[..., 1] << 4)).contiguous(), self.scale


def quantised(weight: torch.Tensor) -> Q4:
    """A float32 matrix [rows, columns], columns a multiple of 32, each value at its nearest level."""
    scale = scales(weight, SHARES)
    return Q4(_levels(_groups(weight), scale).view(weight.shape), scale)


def scales(weight: torch.Tensor, shares: Sequence[float], *, importance: torch.Tensor | None = None) -> torch.Tensor:
    """Scales of a float32 matrix's groups, float16 [rows, columns/32].

    Level -8 stands for a share of the value farthest from zero, the best of `shares` by the squared error: levels reach
    one step farther on that side, and a large value is worth cutting where it spares the others.

    Args:
        importance: of a column's squared errors, [columns]; None: all count alike.
    """
    check_q4([weight])
    groups = _groups(weight)
    farthest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))[..., 0]
    weights = None if importance is None else importance.view(-1, GROUP)

    def cut(share: float) -> tuple[torch.Tensor, torch.Tensor]:
        scale = _half(farthest * (share / -8))
        squared = (_levels(groups, scale) * scale.float()[..., None] - groups).square()
        return (squared if weights is None else squared * weights).sum(dim=-1), scale

    error, best = cut(shares[0])
    for share in shares[1:]:
        other, scale = cut(share)
        best = torch.where(other < error, scale, best)
        error = torch.minimum(other, error)
    return best


def pack_q8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as (int8, its scale)."""
    scale = _half(weight.float().abs().amax(dim=1, keepdim=True) / 127)
    return (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8), scale


def check_q4(weights: Sequence[torch.Tensor]) -> None:
    """Raises ValueError if one of the matrices has columns that make no whole groups."""
    for weight in weights:
        if weight.shape[1] % GROUP:
            raise ValueError(f"a matrix has {weight.shape[1]} columns; expected a multiple of {GROUP} for 4 bits")


def rounded_q4(weight: torch.Tensor) -> torch.Tensor:
    """A float32 matrix as it comes back from 4 bits."""
    return quantised(weight).values()


def rounded_q8(weight: torch.Tensor) -> torch.Tensor:
    """A float32 matrix as it comes back from `pack_q8`."""
    levels, scale = pack_q8(weight)
    return levels.float() * scale.float()


def _groups(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(weight.shape[0], -1, GROUP)


def _levels(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (groups / scale.float()[..., None]).round().clamp(-8, 7)


def _half(scale: torch.Tensor) -> torch.Tensor:
    """In float16, and nowhere zero or below float16's normal range, so that nothing is divided by zero."""
    least = torch.finfo(torch.float16).smallest_normal
    return torch.where(scale.abs() < least, least, scale).half()


def _unpack_one(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows, half = packed.shape
    levels = torch.arange(-8, 8, dtype=torch.float32, device=packed.device)
    pairs = torch.stack((levels.repeat(16), levels.repeat_interleave(16)), dim=1)  # byte -> (low, high)
    values = pairs[packed.reshape(-1).int()].view(rows, half * 2 // GROUP, GROUP)
    return (values * scale.float()[..., None]).view(rows, half * 2).to(dtype)
