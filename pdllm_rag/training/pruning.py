"""A diffusion checkpoint to start from, out of an autoregressive one: fewer layers, a shorter vocabulary, a mask.

- layers are kept by number; which ones cost least is the caller's to find out;
- a byte-level BPE vocabulary is cut to its first entries: merges are ranked, so a prefix is a vocabulary of its own;
- the mask takes the place of a token that text never holds; its embedding begins as the mean of all others;
- the logit shift of the autoregressive model is kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pdllm_rag.errors import ModelFormatError
from pdllm_rag.models import packed, weights
from pdllm_rag.models.shards import read_entries
from pdllm_rag.models.vocabulary import read_json

MASK = "<|mask|>"
_MODULES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def prune(
    base: Path,
    folder: Path,
    *,
    mask_in_place_of: str,
    layers: Sequence[int] | None = None,
    vocabulary: int | None = None,
    bos: str | None = None,
) -> None:
    """Write the checkpoint to begin with into `folder`, in float32.

    Args:
        mask_in_place_of: text of the token that becomes the mask.
        layers: numbers of the layers that are kept, in order; None keeps all.
        vocabulary: entries that are kept; None keeps all.
        bos: text of the token that chunks are to begin with; None keeps the base's.

    Raises:
        ModelFormatError: the base is of no known shape, or its vocabulary is not byte-level BPE.
        ValueError: a layer or token that the base has not.
    """
    config = read_json(base / "config.json")
    if config.get("model_type") not in _MODULES:
        raise ModelFormatError(
            f"{base} has model_type {config.get('model_type')!r}; expected one of {', '.join(_MODULES)}"
        )
    n_layers = int(config["num_hidden_layers"])
    kept = list(range(n_layers) if layers is None else layers)
    if not kept or any(not 0 <= layer < n_layers for layer in kept) or sorted(set(kept)) != kept:
        raise ValueError(f"layers to keep are {kept}; expected some of 0..{n_layers - 1}, each once and in order")
    folder.mkdir(parents=True, exist_ok=True)
    ids = _tokenizer(base, folder, vocabulary, mask_in_place_of)
    mask_id = ids[MASK]
    settings = read_json(base / "tokenizer_config.json")
    settings.pop("added_tokens_decoder", None)  # tokenizer.json says it
    settings["mask_token"] = MASK
    if bos is not None:
        if bos not in ids:
            raise ValueError(f"the tokenizer keeps no token {bos!r} to begin chunks with")
        settings["bos_token"], config["bos_token_id"] = bos, ids[bos]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    entries = read_entries(base)
    tensors = packed.unpack(dict(weights.read(entries, torch.device("cpu"))), torch.float32)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("model.layers."):
            layer, _, rest = name.removeprefix("model.layers.").partition(".")
            if int(layer) in kept:
                found[f"model.layers.{kept.index(int(layer))}.{rest}"] = tensor
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            kept_rows = tensor[: vocabulary or len(tensor)].clone()
            kept_rows[mask_id] = kept_rows[torch.arange(len(kept_rows)) != mask_id].mean(dim=0)
            found[name] = kept_rows
        else:
            found[name] = tensor
    if config.get("tie_word_embeddings"):
        found.pop("lm_head.weight", None)
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / "model.safetensors")
    rows = len(found["model.embed_tokens.weight"])
    if max(ids.values()) >= rows:
        raise ModelFormatError(
            f"the tokenizer has ids up to {max(ids.values())} and the embedding {rows} rows; expected a row for each"
        )
    config |= {"num_hidden_layers": len(kept), "vocab_size": rows, "mask_token_id": mask_id, "logit_shift": True}
    for stale in ("layer_types", "max_window_layers", "quantization_config"):
        config.pop(stale, None)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _tokenizer(base: Path, folder: Path, vocabulary: int | None, mask_in_place_of: str) -> dict[str, int]:
    """Write tokenizer.json; returns the ids that it keeps by their texts."""
    content = read_json(base / "tokenizer.json")
    model = content.get("model") or {}
    if model.get("type") != "BPE":
        raise ModelFormatError(f"{base}/tokenizer.json is of type {model.get('type')!r}; expected byte-level BPE")
    entries: dict[str, int] = model["vocab"]
    added: list[dict[str, Any]] = content.get("added_tokens") or []
    ids = {**entries, **{token["content"]: token["id"] for token in added}}
    if mask_in_place_of not in ids:
        raise ValueError(f"the tokenizer has no token {mask_in_place_of!r} for the mask to take the place of")
    mask_id = ids[mask_in_place_of]
    limit = vocabulary or 1 + max(ids.values())
    if mask_id >= limit:
        raise ValueError(f"token {mask_in_place_of!r} has id {mask_id}, beyond the {limit} that are kept")

    def renamed(text: str) -> str:
        return MASK if text == mask_in_place_of else text

    kept = {renamed(text): number for text, number in entries.items() if number < limit}
    model["vocab"] = kept
    model["merges"] = [
        merge for merge in model["merges"] if _result(merge) in kept and all(p in kept for p in _pair(merge))
    ]
    content["added_tokens"] = [
        {**token, "content": renamed(token["content"]), "special": True} for token in added if token["id"] < limit
    ]
    if all(token["content"] != MASK for token in content["added_tokens"]):
        mask = {"id": mask_id, "content": MASK, "single_word": False, "lstrip": False, "rstrip": False}
        content["added_tokens"].append({**mask, "normalized": False, "special": True})
        content["added_tokens"].sort(key=lambda token: token["id"])
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    return {**kept, **{token["content"]: token["id"] for token in content["added_tokens"]}}


def _pair(merge: Any) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else list(merge)


def _result(merge: Any) -> str:
    return "".join(_pair(merge))
