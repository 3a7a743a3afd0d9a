"""Model families as data: what a checkpoint's own files do not say.

- ids come from the checkpoint's tokenizer and config, never from here; token texts here only check them;
- a family is chosen by what config.json says (model_type, architectures, keys), never by the path's text;
- to add one, add an entry to `FAMILIES` (docs/models.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# Chat templates for checkpoints that bring none; contents are put in afterwards, as plain text (see `chat`).
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
PLAIN = (
    "{% for m in messages %}{{ 'Answer' if m.role == 'assistant' else 'Question' }}{{ ':\n' + m.content + '\n\n' }}"
    "{% endfor %}{{ 'Answer:\n' }}"
)


@dataclass(frozen=True)
class Support:
    """When an answer counts as held by the documents.

    logit = bias + no_answer * ln p(no-answer text) + margin * (best s_I - median s_I); below 0 the answer is withheld.
    ln p is the mean over the text's tokens in the first denoising step; `typical_margin` stands in where nothing was
    scored: the lower quartile of questions whose text was there. The weights are fitted per family, by
    examples/benchmarks/calibrate_support.py (docs/decisions/0005-no-support.md).
    """

    bias: float
    no_answer: float
    margin: float
    typical_margin: float


@dataclass(frozen=True)
class Family:
    """One family of masked-diffusion language models.

    Attributes:
        model_type: of config.json; with `architectures`, if both name some, and `required_keys` it chooses the family.
        module: transformers class whose modules hold the weights.
        logit_shift: the hidden state at position i-1 predicts token i.
        prefill_mask: attention inside a chunk: "bidirectional" or "block-causal-<n>".
        template: chat template of checkpoints that bring none.
        chunk_len: default tokens of a chunk, BOS included.
        max_chunk_len: longest chunk the family was trained on; a longer one draws a warning.
        context_len: context tokens the family was trained on; more draw a warning.
        window: positions that a question's canvas may reach.
        block_len: masked tokens of one canvas block.
        draft_weight: lambda of s = s_I + lambda * s_P.
        score_window: chunks whose s lies more than this below the best one's are not read (nats per token), or None.
        no_answer: the trained text for "not in the documents", or None.
        least_rope_theta: a smaller base in config.json is another family's.
        mask_token: text that the mask id must have in the tokenizer, or None where the checkpoint declares it.
        bos_from_tokenizer: the tokenizer's BOS wins over config.json, which keeps that of the model it was made from.
        stop_tokens: texts of tokens that end an answer beside EOS, where the vocabulary has them.
        block_key: config.json's key for the n of "block-causal-<n>"; `prefill_mask` holds where it is absent.
        config_names: (key in config.json, the library's key) where they differ.
        config_defaults: (the library's key, value where config.json has none).
        computed: (key, value): config.json may say nothing else, since the modules compute nothing else.
        module_names: (the checkpoint's module, the library's), {} for a layer's number, where they differ.
        bare_questions: trained on questions alone, so that the instructions of a prompt template only distract it.
    """

    name: str
    title: str
    model_type: str
    module: str
    required_keys: tuple[str, ...]
    logit_shift: bool
    prefill_mask: str
    template: str
    chunk_len: int
    max_chunk_len: int
    context_len: int
    window: int
    block_len: int
    draft_weight: float
    score_window: float | None
    no_answer: str | None
    support: Support | None
    licence: str
    architectures: tuple[str, ...] = ()
    least_rope_theta: float = 0.0
    mask_token: str | None = None
    bos_from_tokenizer: bool = False
    stop_tokens: tuple[str, ...] = ()
    block_key: str | None = None
    config_names: tuple[tuple[str, str], ...] = ()
    config_defaults: tuple[tuple[str, Any], ...] = ()
    computed: tuple[tuple[str, Any], ...] = (("use_sliding_window", False),)
    module_names: tuple[tuple[str, str], ...] = ()
    bare_questions: bool = False


LLAMA_MDLM = Family(
    name="llama-mdlm",
    title="Llama-shaped masked diffusion (the bundled demo model)",
    model_type="llama",
    module="LlamaForCausalLM",
    required_keys=("mask_token_id", "logit_shift"),
    logit_shift=True,
    prefill_mask="bidirectional",
    template=CHATML,
    chunk_len=160,
    max_chunk_len=256,
    context_len=1024,
    window=2048,
    block_len=32,
    draft_weight=0.1,
    score_window=0.5,
    no_answer="Not found in the documents.",
    support=Support(bias=-4.91, no_answer=-0.921, margin=2.45, typical_margin=1.25),
    licence="Apache-2.0",
    bare_questions=True,
)

# Shapes that load and compute; nothing about their quality was measured, so nothing is tuned.
QWEN2_MDLM = replace(
    LLAMA_MDLM,
    name="qwen2-mdlm",
    title="Qwen2-shaped masked diffusion",
    model_type="qwen2",
    module="Qwen2ForCausalLM",
    chunk_len=512,
    max_chunk_len=1024,
    context_len=4096,
    window=8192,
    draft_weight=0.0,
    score_window=None,
    no_answer=None,
    support=None,
    bare_questions=False,
    licence="see the checkpoint's card",
)
QWEN3_MDLM = replace(
    QWEN2_MDLM,
    name="qwen3-mdlm",
    title="Qwen3-shaped masked diffusion",
    model_type="qwen3",
    module="Qwen3ForCausalLM",
    logit_shift=False,
)

# Released checkpoints. Numbers of training are from their cards and papers; nothing is tuned.
LLADA = replace(
    QWEN2_MDLM,
    name="llada",
    title="LLaDA-8B Base and Instruct, LLaDA-1.5",
    model_type="llada",
    architectures=("LLaDAModelLM",),
    required_keys=("d_model", "mask_token_id"),
    module="LlamaForCausalLM",
    logit_shift=False,
    template=PLAIN,
    context_len=4096,
    max_chunk_len=4096,
    window=16384,
    mask_token="<|mdm_mask|>",
    stop_tokens=("<|eot_id|>",),
    config_names=(
        ("d_model", "hidden_size"),
        ("n_layers", "num_hidden_layers"),
        ("n_heads", "num_attention_heads"),
        ("n_kv_heads", "num_key_value_heads"),
        ("mlp_hidden_size", "intermediate_size"),
        ("embedding_size", "vocab_size"),
        ("max_sequence_length", "max_position_embeddings"),
        ("activation_type", "hidden_act"),
        ("weight_tying", "tie_word_embeddings"),
    ),
    computed=(
        ("block_type", "llama"),
        ("block_group_size", 1),
        ("layer_norm_type", "rms"),
        ("activation_type", "silu"),
        ("rope", True),
        ("alibi", False),
        ("include_bias", False),
        ("include_qkv_bias", False),
        ("bias_for_layer_norm", False),
        ("attention_layer_norm", False),
        ("input_emb_norm", False),
        ("scale_logits", False),
        ("multi_query_attention", False),
        ("clip_qkv", False),
    ),
    module_names=(
        ("model.transformer.wte", "model.embed_tokens"),
        ("model.transformer.ln_f", "model.norm"),
        ("model.transformer.ff_out", "lm_head"),
        ("model.transformer.blocks.{}.attn_norm", "model.layers.{}.input_layernorm"),
        ("model.transformer.blocks.{}.q_proj", "model.layers.{}.self_attn.q_proj"),
        ("model.transformer.blocks.{}.k_proj", "model.layers.{}.self_attn.k_proj"),
        ("model.transformer.blocks.{}.v_proj", "model.layers.{}.self_attn.v_proj"),
        ("model.transformer.blocks.{}.attn_out", "model.layers.{}.self_attn.o_proj"),
        ("model.transformer.blocks.{}.ff_norm", "model.layers.{}.post_attention_layernorm"),
        ("model.transformer.blocks.{}.ff_proj", "model.layers.{}.mlp.gate_proj"),
        ("model.transformer.blocks.{}.up_proj", "model.layers.{}.mlp.up_proj"),
        ("model.transformer.blocks.{}.ff_out", "model.layers.{}.mlp.down_proj"),
    ),
    licence="MIT (LLaDA-8B)",
)
ULTRA_LLADA = replace(
    LLADA,
    name="ultra-llada",
    title="UltraLLaDA (LLaDA with an enlarged rotary base, 128 K)",
    least_rope_theta=500_001.0,
    context_len=131072,
    window=131072,
    licence="MIT (its repository)",
)
DREAM = replace(
    QWEN2_MDLM,
    name="dream",
    title="Dream-v0-7B Base and Instruct, DiffuCoder, Dream-Coder",
    model_type="Dream",
    architectures=("DreamModel",),
    required_keys=("mask_token_id",),
    template=PLAIN,
    chunk_len=256,
    max_chunk_len=2048,
    context_len=2048,
    window=32768,
    mask_token="<|mask|>",
    bos_from_tokenizer=True,
    stop_tokens=("<|im_end|>", "<|dlm_pad|>"),
    licence="Apache-2.0 (Dream), apple-amlr (DiffuCoder)",
)
SDAR = replace(
    QWEN3_MDLM,
    name="sdar",
    title="SDAR",
    model_type="sdar",
    architectures=("SDARForCausalLM",),
    required_keys=(),
    template=PLAIN,
    prefill_mask="block-causal-4",
    block_key="block_size",
    max_chunk_len=32768,
    context_len=32768,
    window=32768,
    block_len=4,
    mask_token="<|MASK|>",
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
    licence="Apache-2.0",
)
FAST_DLLM_V2 = replace(
    SDAR,
    name="fast-dllm-v2",
    title="Fast-dLLM v2",
    model_type="Fast_dLLM_Qwen",
    architectures=("Fast_dLLM_QwenForCausalLM",),
    module="Qwen2ForCausalLM",
    logit_shift=True,
    prefill_mask="block-causal-32",
    block_key="bd_size",
    block_len=32,
    mask_token="|<MASK>|",
)
LLADA2 = replace(
    SDAR,
    name="llada2",
    title="LLaDA2.0 (mixture of experts)",
    model_type="llada2_moe",
    architectures=("LLaDA2MoeModelLM",),
    module="Glm4MoeForCausalLM",
    prefill_mask="block-causal-32",
    block_len=32,
    mask_token="<|mask|>",
    stop_tokens=("<|role_end|>",),
    config_names=(("num_experts", "n_routed_experts"), ("num_shared_experts", "n_shared_experts")),
    config_defaults=(("use_qk_norm", True),),
    computed=(
        ("score_function", "sigmoid"),
        ("use_qk_norm", True),
        ("use_bias", False),
        ("use_qkv_bias", False),
        ("norm_topk_prob", True),
        ("use_sliding_window", False),
    ),
    module_names=(
        ("model.word_embeddings", "model.embed_tokens"),
        ("model.layers.{}.attention.query_key_value", "model.layers.{}.self_attn.qkv_proj"),
        ("model.layers.{}.attention.dense", "model.layers.{}.self_attn.o_proj"),
        ("model.layers.{}.attention.query_layernorm", "model.layers.{}.self_attn.q_norm"),
        ("model.layers.{}.attention.key_layernorm", "model.layers.{}.self_attn.k_norm"),
    ),
    licence="see the checkpoint's card",
)

FAMILIES: tuple[Family, ...] = (
    LLAMA_MDLM,
    QWEN2_MDLM,
    QWEN3_MDLM,
    ULTRA_LLADA,
    LLADA,
    DREAM,
    SDAR,
    FAST_DLLM_V2,
    LLADA2,
)


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The family that a checkpoint's config.json shows, with its own block size, or None.

    Raises:
        ValueError: the config's block size is no whole number.
    """
    for family in FAMILIES:
        classes = config.get("architectures") or family.architectures
        if (
            config.get("model_type") == family.model_type
            and (not family.architectures or any(name in family.architectures for name in classes))
            and all(key in config for key in family.required_keys)
            and (not family.least_rope_theta or (config.get("rope_theta") or 0) >= family.least_rope_theta)
        ):
            return _with_block(family, config)
    return None


def _with_block(family: Family, config: Mapping[str, Any]) -> Family:
    n = config.get(family.block_key) if family.block_key else None
    if n is None:
        return family
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"config.json has {family.block_key}={n!r}; expected a whole number of 1 or more")
    return replace(family, prefill_mask=f"block-causal-{n}", block_len=n)
