"""Drafts of an answer, which chunks are scored by: pseudo-labels from a few denoising rounds.

What a draft is made over decides what it can know. Without any chunk it is a guess, or empty, or says that nothing was
found; over the first stage's best chunks it favours those; over each candidate alone it says how well a candidate
answers by itself, at the price of a draft per candidate.

Source: Prefilling-dLLM (arXiv 2606.10537), the preliminary diffusion pass. Two deviations: all slots are filled in the
end (the authors leave some masked), and their shares are even (they fill one slot a round).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdllm_store import ChunkKV

from pdllm_rag.attention import causal_block
from pdllm_rag.decoding import CommitRule, DecodeRequest, StaticKVDecoder
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.models.tokenizer import Prompt
from pdllm_rag.placement import plan_offsets
from pdllm_rag.support import says_nothing

DRAFT_CHUNKS = 2  # of the first stage's

# From the candidates, the first stage's best first, to the chunks that each draft is made over.
CONTEXTS: dict[str, Callable[[Sequence[ChunkKV]], list[Sequence[ChunkKV]]]] = {
    "first_stage": lambda kvs: [kvs[:DRAFT_CHUNKS]],
    "none": lambda _: [()],
    "per_chunk": lambda kvs: [[kv] for kv in kvs],
}


def make_drafts(
    model: LoadedModel, question: Prompt, kvs: Sequence[ChunkKV], *, context: str, slots: int, rounds: int
) -> list[list[int]]:
    """A draft for each candidate, one and the same for all unless `context` is "per_chunk".

    A draft ends before its first end-of-answer token; one that says that nothing was found is empty.

    Args:
        kvs: KV of the candidates, [Y, T, G, D], the first stage's best first.
        context: one of `CONTEXTS`.
        slots: most tokens of a draft.
        rounds: denoising rounds of an answer block.

    Raises:
        NumericsError: the model's logits are not finite.
    """
    rule = CommitRule(threshold=0.0) if rounds == 1 else CommitRule(threshold=1.0, steps=rounds)
    block = causal_block(model.spec.family) or 1
    requests = []
    for chunks in CONTEXTS[context](kvs):
        lens = [kv.k.shape[1] for kv in chunks]
        placement = plan_offsets(lens, "sequential", chunk_len=0, multiple=block)
        requests.append(DecodeRequest(question.ids, placement, slots, chunk_kv=chunks))
    filled: list[dict[int, int]] = [{} for _ in requests]
    for step in StaticKVDecoder(model, rule).steps(requests):
        filled[step.sequence].update(zip(step.rows, step.tokens, strict=True))
    drafts = [_said(model, [token for _, token in sorted(tokens.items())][:slots]) for tokens in filled]
    return drafts if context == "per_chunk" else drafts * len(kvs)


def _said(model: LoadedModel, tokens: Sequence[int]) -> list[int]:
    """What comes before the end of the answer, unless that says nothing."""
    end = next((index for index, token in enumerate(tokens) if token in model.spec.eos_ids), len(tokens))
    draft = list(tokens[:end])
    return [] if says_nothing(model.tokenizer.decode(draft), model.spec.family.no_answer) else draft
