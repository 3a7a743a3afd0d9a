"""Model families as data: what a checkpoint's own files do not say.

- ids come from the checkpoint's tokenizer and config, never from here;
- a family is chosen by the checkpoint's `model_type` and the keys of its config, never by the path's text;
- to add one, add an entry to `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Template:
    """A chat template as pieces; a piece that is a special token's text becomes that token's id.

    `{role}` and `{content}` are filled in and tokenised as ordinary text, whatever they hold.
    """

    turn: tuple[str, ...]
    answer: tuple[str, ...]


CHATML = Template(
    turn=("<|im_start|>", "{role}\n", "{content}", "<|im_end|>", "\n"),
    answer=("<|im_start|>", "assistant\n"),
)


@dataclass(frozen=True)
class Support:
    """When an answer counts as held by the documents.

    logit = bias + no_answer * ln p(no-answer text) + margin * (best s_I - median s_I); below 0 the answer is withheld.
    ln p is the mean over the text's tokens in the first denoising step; `typical_margin` stands in where nothing was
    scored. The weights are fitted per family (docs/decisions/0005-no-support.md).
    """

    bias: float
    no_answer: float
    margin: float
    typical_margin: float


@dataclass(frozen=True)
class Family:
    """One family of masked-diffusion language models.

    Attributes:
        module: transformers class whose modules hold the weights.
        logit_shift: the hidden state at position i-1 predicts token i.
        prefill_mask: attention inside a chunk.
        chunk_len: default tokens of a chunk, BOS included.
        max_chunk_len: longest chunk the family was trained on; a longer one draws a warning.
        context_len: context tokens the family was trained on; more draw a warning.
        window: positions that a question's canvas may reach.
        block_len: masked tokens of one canvas block.
        draft_weight: lambda of s = s_I + lambda * s_P.
        score_window: chunks whose s lies more than this below the best one's are not read (nats per token), or None.
        no_answer: the trained text for "not in the documents", or None.
    """

    name: str
    title: str
    model_type: str
    module: str
    required_keys: tuple[str, ...]
    logit_shift: bool
    prefill_mask: str
    template: Template
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
    support=Support(bias=-5.15, no_answer=-0.85, margin=1.92, typical_margin=0.825),
    licence="Apache-2.0",
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

FAMILIES: tuple[Family, ...] = (LLAMA_MDLM, QWEN2_MDLM, QWEN3_MDLM)


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The family whose `model_type` and required config keys a checkpoint's config.json shows, or None."""
    for family in FAMILIES:
        if config.get("model_type") == family.model_type and all(key in config for key in family.required_keys):
            return family
    return None
