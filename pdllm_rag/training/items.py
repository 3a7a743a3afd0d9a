"""A text sample in tokens: chunks as the prefill cuts them, and question blocks as the engine asks them.

A block is a prompt and its answer's rows: the answer, one EOS, and more of it up to the block's length.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdllm_rag.chunking import split
from pdllm_rag.models.spec import ModelSpec
from pdllm_rag.models.tokenizer import Tokenizer
from pdllm_rag.placement import MODES
from pdllm_rag.training.texts import Exchange, Sample

LIKELIHOOD = "likelihood"  # the kind of an exchange whose question is what is learnt
VIEWS = ("chunks", "joint", "whole")


@dataclass(frozen=True)
class Shape:
    """Sizes and shares of a training row, which holds as many samples as fit.

    Attributes:
        context_len: positions for chunks, BOS included.
        canvas_len: positions for question blocks.
        sample_len: most context positions of one sample.
        chunk_lens: tokens of a chunk, BOS included; one is drawn for each sample.
        answer_lens: rows of an answer; one that the answer fits in is drawn for each block.
        views: shares of `VIEWS`: chunks that see only themselves, chunks that see each other, and one question block
            that sees and is seen by all of them.
        placements: shares of `placement.MODES`.
    """

    context_len: int = 2048
    canvas_len: int = 1152
    sample_len: int = 1024
    chunk_lens: tuple[int, ...] = (64, 128, 160, 160, 160, 160, 256)
    answer_lens: tuple[int, ...] = (16, 32, 32, 48, 64)
    views: tuple[float, float, float] = (0.82, 0.12, 0.06)
    placements: tuple[float, float, float] = (0.4, 0.4, 0.2)

    @property
    def predictions(self) -> int:
        """Most tokens of a row that are predicted: what a canvas of short answers may come to."""
        return self.canvas_len * 9 // 16

    @property
    def row_len(self) -> int:
        """Positions of a row."""
        return self.context_len + self.canvas_len


class Block(NamedTuple):
    """One question block.

    ids: of prompt and answer, nothing masked.
    prompt_len: where the answer begins.
    answer_len: tokens of the answer and its first EOS.
    question: rows of the question's own words.
    chunk: the only chunk that it reads; None: all of them.
    """

    ids: tuple[int, ...]
    prompt_len: int
    answer_len: int
    question: range
    chunk: int | None
    kind: str
    weight: float


class Item(NamedTuple):
    """A sample in tokens. `view` is of `VIEWS`, `placement` of `placement.MODES`, `slot_len` its width of a slot."""

    chunks: tuple[tuple[int, ...], ...]
    blocks: tuple[Block, ...]
    view: str
    placement: str
    slot_len: int

    @property
    def context_len(self) -> int:
        """Positions of its chunks."""
        return sum(map(len, self.chunks))

    @property
    def canvas_len(self) -> int:
        """Positions of its blocks."""
        return sum(len(block.ids) for block in self.blocks)


class Itemiser:
    """Turns samples into tokens for one checkpoint."""

    def __init__(self, spec: ModelSpec, tokenizer: Tokenizer, shape: Shape) -> None:
        self._spec, self._tokenizer, self._shape = spec, tokenizer, shape
        prompt = tokenizer.render(spec.family.template, [{"role": "user", "content": "?"}])
        self._before, self._after = prompt.ids[: prompt.content.start], prompt.ids[prompt.content.stop :]

    def item(self, sample: Sample, rng: random.Random) -> Item:
        """Cut the passages into chunks, and take as many of the exchanges as there is room for, in their order.

        Passages that no exchange needs are left out first where there are too many.
        """
        shape = self._shape
        slot_len = rng.choice(shape.chunk_lens)
        view = rng.choices(VIEWS, shape.views)[0]
        cut = [self._cut(text, slot_len) for text in sample.passages]
        kept = self._that_fit([sum(len(ids) for ids, _ in chunks) for chunks in cut], sample.exchanges)
        chunks: list[tuple[int, ...]] = []
        first: dict[int, int] = {}
        for index in kept:
            first[index] = len(chunks)
            chunks += [ids for ids, _ in cut[index]]
        blocks: list[Block] = []
        room = shape.canvas_len
        for exchange in sample.exchanges:
            if exchange.passage is not None and exchange.passage not in first:
                continue
            chunk = None
            if exchange.kind == LIKELIHOOD and exchange.passage is not None:
                texts = [text for _, text in cut[exchange.passage]]
                holding = [n for n, text in enumerate(texts) if exchange.answer in text]
                chunk = first[exchange.passage] + (holding[0] if holding else rng.randrange(len(texts)))
            block = self._block(exchange, chunk, room, rng)
            if block is not None:
                blocks.append(block)
                room -= len(block.ids)
                if view == "whole":
                    break
        placement = rng.choices(MODES, shape.placements)[0]
        return Item(tuple(chunks), tuple(blocks), view, placement, slot_len)

    def _cut(self, text: str, chunk_len: int) -> list[tuple[tuple[int, ...], str]]:
        """Chunks of a text with their BOS, and the text of each."""
        spans = split(text, self._tokenizer.encode_with_offsets, chunk_len=chunk_len).spans
        return [
            ((self._spec.bos_id, *span.token_ids.tolist()), text[span.char_start : span.char_end]) for span in spans
        ]

    def _that_fit(self, lens: Sequence[int], exchanges: Sequence[Exchange]) -> list[int]:
        """Indices, in order, of the passages that are kept."""
        needed = {exchange.passage for exchange in exchanges}
        kept: set[int] = set()
        room = min(self._shape.sample_len, self._shape.context_len)
        for index in sorted(range(len(lens)), key=lambda index: index not in needed):
            if 0 < lens[index] <= room:
                kept.add(index)
                room -= lens[index]
        return sorted(kept)

    def _block(self, exchange: Exchange, chunk: int | None, room: int, rng: random.Random) -> Block | None:
        """The block of an exchange, or None where it has no room."""
        question = self._tokenizer.encode(exchange.question)
        prompt = (*self._before, *question, *self._after)
        own = range(len(self._before), len(self._before) + len(question))
        if exchange.kind == LIKELIHOOD:
            return (
                Block(prompt, len(prompt), 0, own, chunk, exchange.kind, exchange.weight)
                if (len(prompt) <= room and question)
                else None
            )
        answer = self._tokenizer.encode(exchange.answer)
        lens = [n for n in self._shape.answer_lens if len(answer) < n <= room - len(prompt)]
        if not lens or not answer:
            return None
        fill = [self._spec.eos_ids[0]] * (rng.choice(lens) - len(answer))
        return Block(
            (*prompt, *answer, *fill), len(prompt), len(answer) + 1, own, chunk, exchange.kind, exchange.weight
        )
