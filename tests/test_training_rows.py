"""What a training row holds and who sees whom in it, against loops that say it directly."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import save_tiny_model

from pdllm_rag.attention import causal_block
from pdllm_rag.models import LoadedModel, load_model
from pdllm_rag.training.items import VIEWS, Block, Item, Itemiser, Shape
from pdllm_rag.training.noise import DiffusionNoise, MonotoneNoise
from pdllm_rag.training.rows import Batch, lay_out
from pdllm_rag.training.texts import Exchange, Sample
from pdllm_rag.training.visibility import EVERY_CHUNK, Marks, dense_mask

SHAPE = Shape(context_len=72, canvas_len=96, sample_len=72, chunk_lens=(8, 12), answer_lens=(6, 10))
TEXT = "The red lamp is in the hall. The blue lamp is in the attic."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(save_tiny_model(tmp_path_factory.mktemp("model"))), dtype=torch.float32)


def some_item(rng: random.Random, view: str, placement: str) -> Item:
    """Chunks and blocks of random tokens."""
    chunks = tuple(tuple(rng.choices(range(10, 90), k=rng.randint(2, 8))) for _ in range(rng.randint(1, 4)))
    blocks = []
    for _ in range(1 if view == "whole" else rng.randint(1, 3)):
        n_prompt, n_answer = rng.randint(2, 6), rng.randint(3, 10)
        ids = tuple(rng.choices(range(10, 90), k=n_prompt + n_answer))
        chunk = rng.choice([None, rng.randrange(len(chunks))])
        blocks.append(Block(ids, n_prompt, 2, range(1, n_prompt), chunk, "qa", 1.0))
    return Item(chunks, tuple(blocks), view, placement, 8)


def expected_sight(items: list[Item], block_len: int | None) -> list[list[bool]]:
    """Who sees whom, position by position."""
    where: list[tuple[str, int, int, int]] = [("", 0, 0, 0)] * SHAPE.row_len  # what, whose, its number, answer block
    at = 0
    for whose, item in enumerate(items):
        for number, chunk in enumerate(item.chunks):
            for _ in chunk:
                where[at] = ("chunk", whose, number, 0)
                at += 1
    at = SHAPE.context_len
    for whose, item in enumerate(items):
        for number, block in enumerate(item.blocks):
            for row in range(len(block.ids)):
                behind = row - block.prompt_len
                where[at] = ("block", whose, number, 0 if block_len is None or behind < 0 else 1 + behind // block_len)
                at += 1
    sight = [[q == kv for kv in range(SHAPE.row_len)] for q in range(SHAPE.row_len)]
    for q, kv in product(range(SHAPE.row_len), repeat=2):
        (a, whose, m, own), (b, others, n, other) = where[q], where[kv]
        if not a or not b or whose != others:
            continue
        item = items[whose]
        if item.view == "whole":
            sees = other <= own
        elif a == "chunk":
            sees = b == "chunk" and (item.view == "joint" or m == n)
        elif b == "chunk":
            only = item.blocks[m].chunk
            sees = only is None or item.view == "joint" or only == n
        else:
            sees = m == n and other <= own
        sight[q][kv] |= sees
    return sight


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    views=st.lists(st.sampled_from(VIEWS), min_size=1, max_size=2),
    block_len=st.sampled_from([None, 2, 4]),
)
def test_a_position_sees_what_it_should(model: LoadedModel, seed: int, views: list[str], block_len: int | None) -> None:
    rng = random.Random(seed)
    items = [some_item(rng, view, "sequential") for view in views]
    noise = DiffusionNoise() if block_len is None else MonotoneNoise(block_len)
    row = lay_out(items, SHAPE, model.spec, noise, rng)
    mask = dense_mask(Batch.of([row]).marks)[0, 0]
    assert mask.tolist() == expected_sight(items, block_len)
    behind = dense_mask(Batch.of([row, row]).marks, first=SHAPE.context_len)
    assert torch.equal(behind[1, 0], mask[SHAPE.context_len :])


def test_a_block_causal_models_rows_see_no_later_block_of_positions(model: LoadedModel) -> None:
    spec = replace(model.spec, family=replace(model.spec.family, prefill_mask="block-causal-4"))
    assert causal_block(spec.family) == 4
    item = Item(
        (tuple(range(10, 20)),),
        (Block(tuple(range(30, 42)), 5, 3, range(1, 4), None, "qa", 1.0),),
        "chunks",
        "sequential",
        12,
    )
    row = lay_out([item], SHAPE, spec, DiffusionNoise(), random.Random(0))
    mask = dense_mask(Batch.of([row]).marks)[0, 0]
    for q, kv in product(range(10), repeat=2):
        assert mask[q, kv] == (kv // 4 <= q // 4)
    start = SHAPE.context_len
    for q, kv in product(range(12), repeat=2):
        assert mask[start + q, start + kv] == (kv // 4 <= q // 4)
        assert mask[start + q, kv] == (kv < 10)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), placement=st.sampled_from(["sequential", "gap", "reuse"]))
def test_masks_targets_and_positions_are_those_of_the_item(model: LoadedModel, seed: int, placement: str) -> None:
    rng = random.Random(seed)
    item = some_item(rng, "chunks", placement)
    row = lay_out([item], SHAPE, model.spec, DiffusionNoise(), rng)
    at = 0
    for number, chunk in enumerate(item.chunks):
        assert tuple(row.ids[at : at + len(chunk)]) == chunk
        offset = {"reuse": 0, "gap": 8 * number, "sequential": at}[placement]
        assert row.positions[at : at + len(chunk)].tolist() == list(range(offset, offset + len(chunk)))
        at += len(chunk)
    lens = [len(chunk) for chunk in item.chunks]
    start = {"reuse": max(lens), "gap": 8 * len(lens), "sequential": sum(lens)}[placement]
    clean = {}
    at = SHAPE.context_len
    for block in item.blocks:
        assert row.positions[at : at + len(block.ids)].tolist() == list(range(start, start + len(block.ids)))
        clean |= {at + n: token for n, token in enumerate(block.ids)}
        at += len(block.ids)
    masked = {position for position, token in clean.items() if row.ids[position] != token}
    assert {int(row.ids[position]) for position in masked} <= {model.spec.mask_id}
    used = row.weights > 0
    predicted = row.predicting[used] + model.spec.logit_shift
    assert set(predicted.tolist()) == masked
    assert [clean[int(position)] for position in predicted] == row.targets[used].tolist()


def test_passages_become_chunks_with_a_bos_and_blocks_a_prompt(model: LoadedModel) -> None:
    itemiser = Itemiser(
        model.spec,
        model.tokenizer,
        replace(SHAPE, context_len=400, sample_len=400, canvas_len=400, answer_lens=(8, 16)),
    )
    sample = Sample(
        (TEXT, "Nothing here."),
        (Exchange("qa", "Where is it?", "attic", 0), Exchange("likelihood", "Where?", "attic", 0)),
    )
    item = itemiser.item(sample, random.Random(3))
    assert all(chunk[0] == model.spec.bos_id and model.spec.bos_id not in chunk[1:] for chunk in item.chunks)
    assert "".join(model.tokenizer.decode(chunk) for chunk in item.chunks) == "".join(sample.passages)
    asked, scored = item.blocks
    assert model.tokenizer.decode(asked.ids[asked.prompt_len :]) == "attic"
    assert asked.ids[asked.prompt_len + asked.answer_len - 1] == model.spec.eos_ids[0]
    prompt = model.tokenizer.render(model.spec.family.template, [{"role": "user", "content": "Where is it?"}])
    assert asked.ids[: asked.prompt_len] == prompt.ids
    assert scored.chunk is not None
    assert "attic" in model.tokenizer.decode(item.chunks[scored.chunk])
    assert asked.chunk is None
    assert scored.answer_len == 0


def test_what_does_not_fit_is_left_out_and_never_cut(model: LoadedModel) -> None:
    itemiser = Itemiser(model.spec, model.tokenizer, replace(SHAPE, sample_len=70, canvas_len=80))
    fits = Exchange("qa", "Where?", "attic", 1)
    too_long = Exchange("qa", "Where?", "in the attic of the house", 1)
    lost = Exchange("qa", "What?", "x", 0)
    item = itemiser.item(Sample(("y" * 500, TEXT), (lost, too_long, fits, fits, fits)), random.Random(0))
    assert sum(map(len, item.chunks)) <= 70
    assert {model.tokenizer.decode(block.ids[block.prompt_len :]) for block in item.blocks} == {"attic"}
    assert sum(len(block.ids) for block in item.blocks) <= 80


@given(seed=st.integers(0, 10**6))
def test_monotone_noise_rises_and_keeps_its_bounds(seed: int) -> None:
    shares = MonotoneNoise(first=(0.2, 0.7)).shares(5, random.Random(seed))
    assert shares == sorted(shares)
    assert shares[0] >= 0.2
    assert shares[-1] <= 0.7 + 1e-12


def test_masks_weigh_one_over_the_share_they_were_drawn_with() -> None:
    block = Block(tuple(range(40)), 8, 4, range(2, 6), None, "qa", 1.0)
    noise = DiffusionNoise(full=0.0, least=0.5, fill=0.1)
    counts, total = np.zeros(40), 4000
    rng = random.Random(0)
    for _ in range(total):
        for row, weight in noise.masks(block, rng):
            counts[row] += weight
    assert not counts[:8].any()
    np.testing.assert_allclose(counts[8:12] / total, 1.0, atol=0.06)  # E[1/t * t] = 1
    np.testing.assert_allclose(counts[12:] / total, 0.1, atol=0.01)
    drawn = MonotoneNoise(block_len=8, first=(0.3, 0.9)).masks(block, rng)
    assert {row for row, _ in drawn} <= set(range(8, 40))
    same = MonotoneNoise(block_len=8, first=(0.5, 0.5), fill=0.1).masks(block, rng)
    assert {(row < 12, round(weight, 9)) for row, weight in same} == {(True, 2.0), (False, 0.2)}


def test_a_likelihood_block_masks_every_other_word_of_the_question() -> None:
    block = Block(tuple(range(12)), 12, 0, range(3, 9), 0, "likelihood", 1.0)
    rows = {tuple(m.row for m in DiffusionNoise().masks(block, random.Random(seed))) for seed in range(20)}
    assert rows == {(3, 5, 7), (4, 6, 8)}


def test_marks_without_order_see_the_whole_block() -> None:
    zero = torch.zeros(1, 4, dtype=torch.int32)
    marks = Marks(zero, zero, zero + 1, zero + EVERY_CHUNK, torch.tensor([[0, 1, 1, 2]], dtype=torch.int32))
    assert dense_mask(marks)[0, 0].sum() == 1 + 3 + 3 + 4
    assert dense_mask(marks.without_order()).all()
