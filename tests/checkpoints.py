"""Tiny random checkpoints as the released ones are on disk: config keys, tensor names, tokenizer files, shards.

Shapes, names and the reference forward are written out here from the models' descriptions, on purpose without anything
of `pdllm_rag.models`, so that the two can be held against each other.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("o", "r")]

LLADA_CHAT = (
    "{% for message in messages %}{% set text = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.first %}{% set text = bos_token + text %}{% endif %}"
    "{{ text }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN_CHAT = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role != 'system' %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPECIALS = {
    "llada": ("<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>"),
    "llada-instruct": (
        "<|startoftext|>",
        "<|endoftext|>",
        "<|mdm_mask|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
    "dream": (*QWEN_SPECIALS, "<tool_call>", "<|beginoftext|>", "<|mask|>"),
    "sdar": (*QWEN_SPECIALS, "<think>", "<|MASK|>"),
    "fast-dllm-v2": (*QWEN_SPECIALS, "|<MASK>|"),
    "llada2": ("<|startoftext|>", "<|endoftext|>", "<|mask|>", "<|role_end|>"),
}
KINDS = tuple(SPECIALS)
BIDIRECTIONAL = ("llada", "llada-instruct", "dream")
NOT_SPECIAL = ("<tool_call>", "<think>", "|<MASK>|")  # added tokens that the released files do not call special


def vocabulary(kind: str) -> tuple[dict[str, int], dict[str, int]]:
    """Ids of byte-level tokens and of added ones."""
    from tokenizers import pre_tokenizers

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    base = {word: number for number, word in enumerate(words)}
    return base, {token: len(base) + number for number, token in enumerate(SPECIALS[kind])}


def write_checkpoint(folder: Path, kind: str, *, seed: int = 0, shards: int = 2, **changes: Any) -> Path:
    """Write a checkpoint of a kind in `KINDS`; `changes` go into its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    _, added = vocabulary(kind)
    config = {**_config(kind, added), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, kind)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.2 if len(shape) > 1 else 0.1)
        + ("norm" in name or "ln_f" in name)
        for name, shape in _shapes(kind, config).items()
    }  # fmt: skip
    save_shards(folder, tensors, shards)
    return folder


def save_shards(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    """Write tensors as `shards` files and their index, or as one file without."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = sorted(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        own = names[number::shards]
        save_file({name: tensors[name].contiguous() for name in own}, folder / file)
        weight_map.update(dict.fromkeys(own, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_tokenizer(folder: Path, kind: str) -> None:
    """Dream and Fast-dLLM v2 ship vocab.json and merges.txt with added tokens elsewhere, the others tokenizer.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    base, added = vocabulary(kind)
    qwen = kind in ("dream", "sdar", "fast-dllm-v2")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if qwen:
        settings |= {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "bos_token": None}
        settings["chat_template"] = QWEN_CHAT
    else:
        settings |= {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>"}
    if kind == "dream":
        settings |= {"tokenizer_class": "DreamTokenizer", "bos_token": "<|beginoftext|>", "mask_token": "<|mask|>"}
        settings |= {"eos_token": "<|endoftext|>", "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer"]}}
    if kind == "llada-instruct":
        settings["chat_template"] = LLADA_CHAT
    if kind in ("dream", "fast-dllm-v2"):
        (folder / "vocab.json").write_text(json.dumps(base))
        (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in MERGES))
        if kind == "dream":
            settings["added_tokens_decoder"] = {
                str(number): {"content": token, "normalized": False, "special": token not in NOT_SPECIAL}
                for token, number in added.items()
            }
        else:
            (folder / "added_tokens.json").write_text(json.dumps(added))
    else:
        tokenizer = Tokenizer(models.BPE(vocab=base, merges=MERGES))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        for token in added:
            if token in NOT_SPECIAL:
                tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
            else:
                tokenizer.add_special_tokens([token])
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _config(kind: str, added: dict[str, int]) -> dict[str, Any]:
    rows = 280
    if kind.startswith("llada") and kind != "llada2":
        return {
            "architectures": ["LLaDAModelLM"], "model_type": "llada",
            "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig", "AutoModel": "modeling_llada.LLaDAModelLM"},
            "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "attention_dropout": 0.0,
            "attention_layer_norm": False, "attention_layer_norm_with_affine": True, "embedding_dropout": 0.0,
            "flash_attention": False, "init_cutoff_factor": None, "init_fn": "mitchell", "init_std": 0.02,
            "precision": "amp_bf16", "residual_dropout": 0.0, "transformers_version": "4.46.3",
            "bias_for_layer_norm": False, "block_group_size": 1,
            "block_type": "llama", "d_model": 32, "embedding_size": rows, "include_bias": False,
            "include_qkv_bias": False, "init_device": "meta", "input_emb_norm": False, "layer_norm_type": "rms",
            "layer_norm_with_affine": True, "max_sequence_length": 4096, "mlp_hidden_size": 48, "mlp_ratio": 4,
            "multi_query_attention": None, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2, "rms_norm_eps": 1e-05,
            "rope": True, "rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False,
            "vocab_size": rows, "weight_tying": False, "use_cache": False, "torch_dtype": "bfloat16",
            "mask_token_id": added["<|mdm_mask|>"], "eos_token_id": added["<|endoftext|>"],
            "pad_token_id": added["<|endoftext|>"],
        }  # fmt: skip
    if kind == "llada2":
        return {
            "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "first_k_dense_replace": 1,
            "head_dim": 16, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
            "max_position_embeddings": 32768, "moe_intermediate_size": 24, "moe_router_enable_expert_bias": True,
            "n_group": 4, "norm_topk_prob": True, "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 2,
            "num_hidden_layers": 3, "num_key_value_heads": 2, "num_shared_experts": 1,
            "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 600000,
            "routed_scaling_factor": 2.5, "score_function": "sigmoid", "tie_word_embeddings": False, "topk_group": 2,
            "use_bias": False, "use_qkv_bias": False, "vocab_size": rows, "pad_token_id": added["<|endoftext|>"],
            "eos_token_id": added["<|endoftext|>"],
        }  # fmt: skip
    config: dict[str, Any] = {
        "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": rows,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False,
        "max_window_layers": 28, "tie_word_embeddings": False, "bos_token_id": added["<|endoftext|>"],
        "eos_token_id": added["<|endoftext|>"], "torch_dtype": "bfloat16", "use_cache": True,
    }  # fmt: skip
    if kind == "dream":
        own: dict[str, Any] = {
            "architectures": ["DreamModel"],
            "model_type": "Dream",
            "mask_token_id": added["<|mask|>"],
        }
    elif kind == "sdar":
        own = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "head_dim": 16, "block_size": 4}
    else:
        own = {"architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen", "bd_size": 32}
        own |= {"tie_word_embeddings": True, "eos_token_id": added["<|im_end|>"]}
    return {**config, **own, "auto_map": {"AutoModel": "modeling.Model"}}


def _shapes(kind: str, c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    if "d_model" in c:
        width, inner, rows = c["d_model"], c["mlp_hidden_size"], c["embedding_size"]
        kv = width * c["n_kv_heads"] // c["n_heads"]
        shapes = {"wte": (rows, width), "ln_f": (width,)} | ({} if c["weight_tying"] else {"ff_out": (rows, width)})
        for n in range(c["n_layers"]):
            own = {"attn_norm": (width,), "q_proj": (width, width), "k_proj": (kv, width), "v_proj": (kv, width)}
            own |= {"attn_out": (width, width), "ff_norm": (width,), "ff_proj": (inner, width)}
            own |= {"up_proj": (inner, width), "ff_out": (width, inner)}
            shapes |= {f"blocks.{n}.{name}": shape for name, shape in own.items()}
        return {f"model.transformer.{name}.weight": shape for name, shape in shapes.items()}
    width, rows, heads, kv_heads = c["hidden_size"], c["vocab_size"], c["num_attention_heads"], c["num_key_value_heads"]
    dims = c.get("head_dim", width // heads)
    moe = kind == "llada2"
    found = {f"model.{'word_embeddings' if moe else 'embed_tokens'}": (rows, width), "model.norm": (width,)}
    if not c["tie_word_embeddings"]:
        found["lm_head"] = (rows, width)
    for n in range(c["num_hidden_layers"]):
        own = {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
        if moe:
            own |= {"attention.query_key_value": ((heads + 2 * kv_heads) * dims, width)}
            own |= {"attention.dense": (width, heads * dims)}
            own |= {"attention.query_layernorm": (dims,), "attention.key_layernorm": (dims,)}
        else:
            own |= {"self_attn.q_proj": (heads * dims, width), "self_attn.o_proj": (width, heads * dims)}
            own |= {"self_attn.k_proj": (kv_heads * dims, width), "self_attn.v_proj": (kv_heads * dims, width)}
            if kind == "sdar":
                own |= {"self_attn.q_norm": (dims,), "self_attn.k_norm": (dims,)}
        mlps = {"mlp": c["intermediate_size"]}
        if moe and n >= c["first_k_dense_replace"]:
            own["mlp.gate"] = (c["num_experts"], width)
            mlps = {f"mlp.experts.{e}": c["moe_intermediate_size"] for e in range(c["num_experts"])}
            mlps["mlp.shared_experts"] = c["moe_intermediate_size"] * c["num_shared_experts"]
        for name, inner in mlps.items():
            own |= {f"{name}.gate_proj": (inner, width), f"{name}.up_proj": (inner, width)}
            own |= {f"{name}.down_proj": (width, inner)}
        found |= {f"model.layers.{n}.{name}": shape for name, shape in own.items()}
    named = {f"{name}.weight": shape for name, shape in found.items()}
    if kind in ("dream", "fast-dllm-v2"):
        for letter, n_heads in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            named |= {f"model.layers.{n}.self_attn.{letter}_proj.bias": (n_heads * dims,) for n in range(c["num_hidden_layers"])}  # fmt: skip  # noqa: E501
    if moe:
        named |= {
            f"model.layers.{n}.mlp.gate.expert_bias": (c["num_experts"],)
            for n in range(c["first_k_dense_replace"], c["num_hidden_layers"])
        }
    return named


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, in float32."""
    return {k: v.float() for file in sorted(folder.glob("model*.safetensors")) for k, v in load_file(file).items()}


@torch.inference_mode()
def reference_logits(folder: Path, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits [L, rows] of ids [L] under a mask [L, L] (True: row sees column), without the project's code."""
    c, w = json.loads((folder / "config.json").read_text()), read_tensors(folder)
    if c["model_type"] == "llada":
        return _llada(c, w, ids, mask)
    if c["model_type"] == "llada2_moe":
        return _llada2(c, w, ids, mask)
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    keys = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
    )
    shape = {key: c[key] for key in (*keys, "num_key_value_heads", "tie_word_embeddings", "max_position_embeddings")}
    shape["rope_parameters"] = {"rope_type": "default", "rope_theta": c["rope_theta"]}
    model: Any
    if c["model_type"] == "sdar":
        model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=c["head_dim"]))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    if c["tie_word_embeddings"]:
        w["lm_head.weight"] = w["model.embed_tokens.weight"]
    model.load_state_dict(w)
    return model.eval()(ids[None], attention_mask=mask[None, None]).logits[0]


def _llada(c: dict[str, Any], w: dict[str, torch.Tensor], ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    base, eps = "model.transformer", c["rms_norm_eps"]
    x = w[f"{base}.wte.weight"][ids]
    for n in range(c["n_layers"]):
        own = f"{base}.blocks.{n}."
        block = {name.removeprefix(own).removesuffix(".weight"): t for name, t in w.items() if name.startswith(own)}
        a = _rms(x, block["attn_norm"], eps)
        q, k, v = (_heads(a @ block[f"{letter}_proj"].T, h) for letter, h in zip(
            "qkv", (c["n_heads"], c["n_kv_heads"], c["n_kv_heads"]), strict=True))  # fmt: skip
        q, k = _turn(q, c["rope_theta"], q.shape[-1]), _turn(k, c["rope_theta"], k.shape[-1])
        x = x + _attend(q, k, v, mask) @ block["attn_out"].T
        a = _rms(x, block["ff_norm"], eps)
        x = x + (torch.nn.functional.silu(a @ block["ff_proj"].T) * (a @ block["up_proj"].T)) @ block["ff_out"].T
    head = w[f"{base}.wte.weight" if c["weight_tying"] else f"{base}.ff_out.weight"]
    return _rms(x, w[f"{base}.ln_f.weight"], eps) @ head.T


def _llada2(c: dict[str, Any], w: dict[str, torch.Tensor], ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    eps, heads, kv_heads = c["rms_norm_eps"], c["num_attention_heads"], c["num_key_value_heads"]
    turning = int(c["head_dim"] * c["partial_rotary_factor"])
    x = w["model.word_embeddings.weight"][ids]
    for n in range(c["num_hidden_layers"]):
        own = {name.removeprefix(f"model.layers.{n}."): t for name, t in w.items() if f"layers.{n}." in name}
        a = _rms(x, own["input_layernorm.weight"], eps)
        fused = _heads(a @ own["attention.query_key_value.weight"].T, heads + 2 * kv_heads)
        q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
        q = _turn(_rms(q, own["attention.query_layernorm.weight"], eps), c["rope_theta"], turning)
        k = _turn(_rms(k, own["attention.key_layernorm.weight"], eps), c["rope_theta"], turning)
        x = x + _attend(q, k, v, mask) @ own["attention.dense.weight"].T
        a = _rms(x, own["post_attention_layernorm.weight"], eps)
        x = x + (_swiglu(a, own, "mlp") if n < c["first_k_dense_replace"] else _experts(a, own, c))
    return _rms(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def _experts(x: torch.Tensor, own: dict[str, torch.Tensor], c: dict[str, Any]) -> torch.Tensor:
    scores = torch.sigmoid(x @ own["mlp.gate.weight"].T)
    out = _swiglu(x, own, "mlp.shared_experts")
    size = c["num_experts"] // c["n_group"]
    for row in range(len(x)):
        routed = (scores[row] + own["mlp.gate.expert_bias"]).tolist()
        groups = [sum(sorted(routed[g * size : (g + 1) * size])[-2:]) for g in range(c["n_group"])]
        open_groups = sorted(range(c["n_group"]), key=lambda g: -groups[g])[: c["topk_group"]]
        allowed = [e for e in range(c["num_experts"]) if e // size in open_groups]
        chosen = sorted(allowed, key=lambda e: -routed[e])[: c["num_experts_per_tok"]]
        total = sum(scores[row, e] for e in chosen)
        for e in chosen:
            weight = scores[row, e] / total * c["routed_scaling_factor"]
            out[row] += weight * _swiglu(x[row], own, f"mlp.experts.{e}")
    return out


def _swiglu(x: torch.Tensor, own: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    gate, up, down = (own[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _heads(x: torch.Tensor, n_heads: int) -> torch.Tensor:
    return x.view(len(x), n_heads, -1)


def _turn(x: torch.Tensor, theta: float, turning: int) -> torch.Tensor:
    """Rows [L, H, D] at positions 0..L-1: dimensions i and i + turning/2 are one plane, those beyond stand still."""
    half, out = turning // 2, x.clone()
    for i in range(half):
        angle = torch.arange(len(x), dtype=torch.float64) * theta ** (-2 * i / turning)
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
        out[..., i] = x[..., i] * cos - x[..., i + half] * sin
        out[..., i + half] = x[..., i + half] * cos + x[..., i] * sin
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


def family_mask(kind: str, n: int, block: int = 0) -> torch.Tensor:
    """What rows see of each other: all, or their own block and those before."""
    block = block or {"sdar": 4, "fast-dllm-v2": 32, "llada2": 32}.get(kind, n)
    number = torch.arange(n) // block
    return number[:, None] >= number
