"""LoRA adapters in training, by peft, and their files: peft's own, or with 8-bit matrices (`models.packed`)."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pdllm_rag.errors import ModelError
from pdllm_rag.models import lora, packed
from pdllm_rag.models.layout import Layout

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class LoraShape:
    """Rank, scale and dropout of the low-rank matrices on the attention's projections (D2F's published values)."""

    rank: int = 32
    alpha: int = 32
    dropout: float = 0.1


def adapted(model: Any, shape: LoraShape) -> Any:
    """A second model over the same, frozen, weights with fresh adapters on it, which are what can be trained.

    Raises:
        ModelError: peft is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise ModelError("training an adapter needs peft, which is not installed; run pip install 'pdllm-rag[train]'")
    from peft import LoraConfig

    model.requires_grad_(False)
    settings = LoraConfig(
        r=shape.rank, lora_alpha=shape.alpha, lora_dropout=shape.dropout, target_modules=list(PROJECTIONS)
    )
    return lora.with_adapter(lora.over_same_weights(model), settings, autocast_adapter_dtype=False).get_base_model()


def trained(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The adapters' matrices by name."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def save_adapter(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    shape: LoraShape,
    layout: Layout,
    *,
    base: str,
    in_8_bits: bool,
    alpha: int | None = None,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors under the checkpoint's own module names.

    Args:
        weights: by the name that `trained` gave.
        alpha: the scale that the file names, where it is not the one of the training.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    modules = set()
    for name, weight in weights.items():
        module, _, rest = name.partition(".lora_")
        theirs = layout.theirs(f"{module}.weight").removesuffix(".weight")
        modules.add(theirs.rpartition(".")[2])
        key = f"{lora.PREFIX}{theirs}.lora_{rest.replace('.default', '')}"
        if in_8_bits:
            tensors[key], tensors[f"{key}_scale"] = (part.cpu() for part in packed.pack_q8(weight))
        else:
            tensors[key] = weight.float().cpu().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": shape.rank,
        "lora_alpha": alpha or shape.alpha,
        "lora_dropout": shape.dropout,
        "target_modules": sorted(modules),
        "base_model_name_or_path": base,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
