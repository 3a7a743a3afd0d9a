"""What tests of decoders share: requests over a random model, and what its steps told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pdllm_rag import LoadedModel
from pdllm_rag.attention import causal_block
from pdllm_rag.decoding import DecodeRequest, DecodeStep
from pdllm_rag.encoder import ChunkEncoder
from pdllm_rag.placement import plan_offsets

NO_TOKEN = -1  # an end-of-answer id that no model produces


def ending(model: LoadedModel, *eos_ids: int) -> LoadedModel:
    """The same model, its answers ended by these tokens."""
    return replace(model, spec=replace(model.spec, eos_ids=eos_ids))


def with_blocks(model: LoadedModel, block_len: int) -> LoadedModel:
    """The same model, its canvas in blocks of this length."""
    return replace(model, spec=replace(model.spec, family=replace(model.spec.family, block_len=block_len)))


def request_for(
    model: LoadedModel, *, prompt: int = 9, max_new_tokens: int = 32, seed: int = 0, **rest: Any
) -> DecodeRequest:
    """Two chunks and a prompt, random."""
    generator = torch.Generator().manual_seed(seed)
    chunks = [torch.randint(4, 250, (n,), generator=generator).numpy().astype(np.int32) for n in (11, 6)]
    block = causal_block(model.spec.family)
    encoder = ChunkEncoder(model, model.fingerprint("float32"))
    return DecodeRequest(
        torch.randint(4, 250, (prompt,), generator=generator).tolist(),
        plan_offsets([len(chunk) for chunk in chunks], "sequential", chunk_len=11, multiple=block or 1),
        max_new_tokens,
        chunk_ids=[chunk.tolist() for chunk in chunks],
        chunk_kv=[next(iter(encoder.batches([chunk])))[0][1] for chunk in chunks],
        **rest,
    )


def told(steps: Sequence[DecodeStep], sequence: int = 0) -> list[tuple[object, ...]]:
    """What is told of one sequence, but for rounding."""
    return [(s.rows, s.tokens, s.nfe, s.finished) for s in steps if s.sequence == sequence]


def tokens_of(steps: Sequence[DecodeStep], sequence: int = 0) -> dict[int, int]:
    """The answer of one sequence, by row."""
    tokens: dict[int, int] = {}
    for step in steps:
        if step.sequence == sequence:
            assert not set(step.rows) & set(tokens), "a committed token was replaced"
            tokens.update(zip(step.rows, step.tokens, strict=True))
    return tokens
