"""LoRA adapters, put on the model by peft.

A merged adapter acts on every row, chunk rows included, so its digest is part of the fingerprint. An adapter that acts
on canvas rows only (D2F) is put on a second set of modules over the same weights: chunk KV is encoded without it, so it
leaves `LoadedModel.adapter_digest` empty.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import blake3
import torch
from safetensors.torch import load_file

from pdllm_rag.errors import ModelError, ModelFormatError
from pdllm_rag.models import packed
from pdllm_rag.models.layout import Layout
from pdllm_rag.models.vocabulary import read_json

PREFIX = "base_model.model."
_IN_BOOKKEEPING = {"base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version"}


def merge(model: Any, layout: Layout, folder: Path) -> tuple[Any, str]:
    """The model with the adapter of a folder in its weights, and the adapter's digest.

    Raises:
        ModelError: peft is not installed.
        ModelFormatError: no LoRA in safetensors, or one that does not fit the model.
    """
    adapted, digest = _adapted(model, layout, folder)
    try:
        return adapted.merge_and_unload(safe_merge=True), digest
    except ValueError as error:
        raise ModelFormatError(f"adapter {folder} does not fit the model: {error}") from error


def beside(model: Any, layout: Layout, folder: Path) -> Any:
    """A second model over the same weights, with the adapter of a folder on it; the first one stays as it is.

    Raises: as `merge`.
    """
    return _adapted(over_same_weights(model), layout, folder)[0].get_base_model()


def with_adapter(model: Any, settings: Any, **options: Any) -> Any:
    """peft's model of this one, which is changed. peft asks for a property that transformers is about to rename."""
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return get_peft_model(model, settings, **options)


def over_same_weights(model: Any) -> Any:
    """A copy of the modules that holds the same tensors."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def _adapted(model: Any, layout: Layout, folder: Path) -> tuple[Any, str]:
    """peft's model of this one, which is changed, and the adapter's digest."""
    if importlib.util.find_spec("peft") is None:
        raise ModelError("an adapter needs peft, which is not installed; install it with pip install 'pdllm-rag[lora]'")
    from peft import LoraConfig
    from peft.utils import set_peft_model_state_dict

    settings = read_json(folder / "adapter_config.json")
    file = folder / "adapter_model.safetensors"
    if settings.get("peft_type") != "LORA" or not file.is_file():
        raise ModelFormatError(
            f"adapter {folder} is of type {settings.get('peft_type')!r} with files "
            f"{sorted(path.name for path in folder.glob('adapter_*'))}; expected LORA and {file.name} (pickled "
            "adapters can run code and are refused)"
        )
    unread = [key for key in ("modules_to_save", "rank_pattern", "alpha_pattern", "trainable_token_indices")
              if settings.get(key)]  # fmt: skip
    if unread or not layout.only_renames:
        raise ModelFormatError(
            f"adapter {folder} cannot be merged: "
            + (f"it has {', '.join(unread)}" if unread else "the family reshapes the weights it was trained on")
            + "; expected plain low-rank matrices on a model whose modules are only renamed"
        )
    tensors, modules = {}, set()
    for name, tensor in packed.unpack(load_file(file), torch.float32).items():
        module, at, rest = name.removeprefix(PREFIX).rpartition(".lora_")
        ours = layout.ours(module) if at else name
        tensors[f"{PREFIX}{ours}{at}{rest}"] = tensor
        modules.add(ours)
    known = dict(model.named_modules())
    strange = sorted(module for module in modules if module not in known)
    if strange or not modules:
        raise ModelFormatError(
            f"{file}: {len(strange)} of {len(modules)} adapted modules are not in the model, the first is "
            f"{strange[0] if strange else 'none at all'!r}. The adapter is of another family"
        )
    kept = {key: value for key, value in settings.items() if key in LoraConfig.__dataclass_fields__}
    chosen = {"target_modules": sorted(modules), "exclude_modules": None, "layers_to_transform": None,
              "layers_pattern": None, "task_type": None, "inference_mode": True, "auto_mapping": None,
              "base_model_name_or_path": None}  # fmt: skip
    try:
        adapted = with_adapter(model, LoraConfig(**{**kept, **chosen}))
        found = set_peft_model_state_dict(adapted, tensors)
        lacking = [name for name in found.missing_keys if ".lora_" in name]
        if lacking or found.unexpected_keys:
            raise ValueError(f"missing {lacking[:1]}, unexpected {list(found.unexpected_keys)[:1]}")
    except (ValueError, RuntimeError, TypeError) as error:
        raise ModelFormatError(f"adapter {folder} does not fit the model: {error}") from error
    meaning = {key: value for key, value in kept.items() if key not in _IN_BOOKKEEPING}
    hasher = blake3.blake3(file.read_bytes())
    hasher.update(json.dumps(meaning, sort_keys=True).encode())
    return adapted, hasher.hexdigest()
