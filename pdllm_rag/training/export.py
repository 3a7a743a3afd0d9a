"""A trained model as a checkpoint folder: safetensors shards, config.json and the tokenizer's files of its base.

Packed in 4 bits it is the bundled model's format (`models.packed`); else float32, which every reader of safetensors
takes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from pdllm_rag.models import packed, shards
from pdllm_rag.models.layout import Layout

BESIDE = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
          "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json")  # fmt: skip
SHARD_BYTES = 15_000_000


def save_model(
    folder: Path,
    base: Path,
    weights: Mapping[str, torch.Tensor],
    layout: Layout,
    *,
    in_4_bits: bool,
    rounded: Mapping[str, packed.Q4] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights and what of the base's files says how to read them.

    Args:
        weights: by the library's names.
        rounded: matrices, by these names, that were brought into 4 bits already.

    Raises:
        ValueError: the family reshapes its weights, so that they cannot be written back under its names.
    """
    if not layout.only_renames:
        raise ValueError(
            "this family's weights are stacked or permuted when they are read, and are not written back; train an "
            "adapter instead (pdllm train chunk-lora)"
        )
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        theirs, weight = layout.theirs(name), weight.detach().cpu()
        if in_4_bits and weight.dim() == 2:
            q4 = (rounded or {}).get(name) or packed.quantised(weight.float())
            tensors[f"{theirs}{packed.SUFFIX}"], tensors[f"{theirs}{packed.SUFFIX}_scale"] = q4.packed()
        else:
            tensors[theirs] = (weight.half() if in_4_bits else weight.float()).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    parts = _parts(tensors, shard_bytes)
    placed: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    (folder / shards.INDEX).write_text(json.dumps(index, indent=1) + "\n")
    for name in BESIDE:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)


def _parts(tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> list[dict[str, torch.Tensor]]:
    """The tensors in order of their names, a new part before one would exceed `shard_bytes`."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name in sorted(tensors):
        if parts[-1] and size + tensors[name].nbytes > shard_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = tensors[name]
        size += tensors[name].nbytes
    return parts
