"""A tiny random checkpoint in the on-disk form of a real one: byte tokenizer, two layers, safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")


def save_tiny_model(folder: Path, *, model_type: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write a random model of `model_type` (llama, qwen2, qwen3) into `folder`; `changes` go into its config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": SPECIALS[0], "eos_token": SPECIALS[2], "mask_token": SPECIALS[3]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))

    shape: dict[str, Any] = {
        "vocab_size": len(vocabulary) + 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": True,
    }
    own = {"mask_token_id": 3, "logit_shift": True}
    shape.update({key: value for key, value in changes.items() if key not in own})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape))
    for parameter in model.parameters():  # wide weights, so that a tiny model's answers differ
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **own, **changes}))
    return folder
