"""The bundled model's 4-bit weights: groups of 32 columns with one float16 scale.

`<name>_q4` uint8 [rows, columns/2] holds column 2j in its low and 2j+1 in its high half;
W[r, c] = (q[r, c] - 8) * scale[r, c // 32], with `<name>_q4_scale` float16 [rows, columns/32].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

GROUP = 32
SUFFIX = "_q4"


def is_packed(names: Mapping[str, object]) -> bool:
    """Whether a checkpoint's tensor names show this format."""
    return any(name.endswith(SUFFIX) for name in names)


def unpack(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """De-quantised tensors under their plain names, in `dtype`; what is not packed is converted.

    Raises:
        ValueError: a packed tensor has no scale, or the shapes do not fit.
    """
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SUFFIX):
            scale = tensors.get(f"{name}_scale")
            if scale is None or scale.shape != (tensor.shape[0], tensor.shape[1] * 2 // GROUP):
                got = None if scale is None else tuple(scale.shape)
                raise ValueError(f"{name}: scale has shape {got}, expected {(tensor.shape[0], tensor.shape[1] // 16)}")
            plain[name.removesuffix(SUFFIX)] = _unpack_one(tensor, scale, dtype)
        elif not name.endswith(f"{SUFFIX}_scale"):
            plain[name] = tensor.to(dtype)
    return plain


def _unpack_one(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows, half = packed.shape
    levels = torch.arange(-8, 8, dtype=torch.float32, device=packed.device)
    pairs = torch.stack((levels.repeat(16), levels.repeat_interleave(16)), dim=1)  # byte -> (low, high)
    values = pairs[packed.reshape(-1).int()].view(rows, half * 2 // GROUP, GROUP)
    return (values * scale.float()[..., None]).view(rows, half * 2).to(dtype)
