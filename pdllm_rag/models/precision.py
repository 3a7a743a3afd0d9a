"""Which of float32 and bfloat16 a device computes faster in.

Rule: bfloat16 on any GPU and on CPUs with AVX512-BF16 or AMX (matrix products there run on bfloat16 units; a denoising
step of the bundled model takes about half the time), float32 on every other CPU, where bfloat16 is emulated.
"""

from __future__ import annotations

import torch


def fastest_dtype(device: torch.device) -> torch.dtype:
    """torch.bfloat16 or torch.float32 by the rule above."""
    if device.type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (AVX512-BF16 or AMX)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
