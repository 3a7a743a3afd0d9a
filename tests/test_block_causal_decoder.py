"""Block-causal decoding over kept blocks: static-KV's answers at one block's rows a step; sub-blocks in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from test_block_causal import (
    NO_TOKEN,
    SHAPES,
    block_causal,
    block_of,
    library_logits,
    random_ids,
    request_for,
    tokens_of,
    with_eos,
)
from test_d2f import events, tails_of
from tiny import save_tiny_model

from pdllm_rag.attends import DenseAttend
from pdllm_rag.decoding import CommitRule, DecodeRequest, StaticKVDecoder, pipelined
from pdllm_rag.decoding.block_causal import BlockCausalDecoder, BlockCausalOptions, why_not
from pdllm_rag.models import LoadedModel, load_model


@pytest.fixture(scope="module", params=list(SHAPES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    shape = SHAPES[request.param]
    folder = save_tiny_model(
        tmp_path_factory.mktemp(request.param), model_type=shape.model_type, logit_shift=shape.logit_shift
    )
    return with_eos(block_causal(load_model(str(folder), dtype=torch.float32), shape.block), NO_TOKEN)


def requests_for(model: LoadedModel) -> list[DecodeRequest]:
    shapes = [((5, 17), 5, 24), ((40,), 2 * block_of(model), 7), ((), 31, 33)]
    return [request_for(model, lens, prompt_len=n, max_new_tokens=m) for lens, n, m in shapes]


def probabilities(model: LoadedModel, request: DecodeRequest, ids: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
    """[M, V] of canvas rows, by the library's forward over everything."""
    logits = library_logits(model, request, torch.tensor(ids))
    return torch.softmax(logits[torch.tensor(rows) - int(model.spec.logit_shift)], dim=-1)


def plain_blocks(model: LoadedModel, request: DecodeRequest, sub_block: int, threshold: float) -> list[dict[int, int]]:
    """The published loop: block after block, sub-block after sub-block; what each forward fills."""
    block, n_question, mask = block_of(model), len(request.prompt_ids), model.spec.mask_id
    ids, steps = list(request.prompt_ids), []
    while len(ids) - n_question < request.max_new_tokens:
        known, start = len(ids), len(ids) // block * block
        ids += [mask] * (start + block - known)
        todo = set(range(known, start + block))
        if model.spec.logit_shift and known == start:  # the finished block's last row gives the first token
            token = int(probabilities(model, request, ids[:known], [known]).argmax())
            ids[known] = token
            todo.remove(known)
            steps.append({known - n_question: token})
        for first in range(start, start + block, sub_block):
            while rows := sorted(row for row in todo if first <= row < first + sub_block):
                best, tokens = probabilities(model, request, ids, rows).max(dim=-1)
                chosen = [i for i in range(len(rows)) if best[i] > threshold or i == int(best.argmax())]
                for i in chosen:
                    ids[rows[i]] = int(tokens[i])
                    todo.remove(rows[i])
                steps.append({rows[i] - n_question: int(tokens[i]) for i in chosen})
    return steps


@pytest.mark.parametrize("backend", ["reference", "flash"])
def test_logits_are_the_librarys_at_every_state_of_a_batch(
    model: LoadedModel, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelined, "denoise", lambda *given: (given[1], given[4]))
    requests = requests_for(model)
    forward, canvases = BlockCausalDecoder(model, backend=backend).steps(requests)  # type: ignore[misc]
    active, state = [0, 1, 2], 0
    while active:
        for index, ours in zip([*active], forward(active, canvases), strict=True):
            canvas, request = canvases[index], requests[index]
            rows = canvas.open_rows()
            theirs = library_logits(model, request, canvas.ids)[canvas.prompt_len + rows - int(model.spec.logit_shift)]
            largest = float(theirs[theirs.isfinite()].abs().max())  # about 10; float32 rounds there
            torch.testing.assert_close(ours.logits, theirs, rtol=0, atol=2e-5 * largest)
            chosen = rows[: 1 + len(rows) // 3]
            canvas.commit(chosen, torch.tensor(random_ids(len(chosen), state)))
            if canvas.advance() is not None:
                active.remove(index)
        state += 1
    assert state > 3


@pytest.mark.parametrize("rule", [CommitRule(0.3), CommitRule(0.999), CommitRule(1.0, 2)], ids=str)
def test_it_decodes_what_static_kv_decodes_alone_and_in_a_batch(model: LoadedModel, rule: CommitRule) -> None:
    requests = requests_for(model)
    together = list(BlockCausalDecoder(model, rule).steps(requests))
    static = list(StaticKVDecoder(model, rule).steps(requests))
    for index, request in enumerate(requests):
        assert events(together, index) == events(static, index)
        assert events(list(BlockCausalDecoder(model, rule).steps([request]))) == events(static, index)
    ended = with_eos(model, tokens_of(static)[5])
    assert events(list(BlockCausalDecoder(ended, rule).steps(requests))) == events(
        list(StaticKVDecoder(ended, rule).steps(requests))
    )


def test_a_step_runs_one_blocks_rows_and_a_finished_block_once_more(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, seen = block_of(model), tails_of(monkeypatch)
    steps = list(
        BlockCausalDecoder(model, CommitRule(0.999)).steps([request_for(model, (9,), prompt_len=2 * block + 1)])
    )
    first, *later = [tail for (tail,) in seen]
    assert (first.start, first.n_final, len(first.ids)) == (0, 2 * block, 3 * block)
    for tail in later:
        finished, new = tail.n_final, len(tail.ids) - tail.n_final
        assert (finished, new) in ({(0, block), (block, 0)} if model.spec.logit_shift else {(0, block), (block, block)})
    assert len(later) + 1 == len(steps)


@pytest.mark.parametrize("threshold", [0.05, 0.999])
@pytest.mark.parametrize("parts", [2, 4])
def test_sub_blocks_are_filled_from_left_to_right_as_published(
    model: LoadedModel, threshold: float, parts: int
) -> None:
    options = BlockCausalOptions(block_of(model) // parts)
    for request in requests_for(model):
        steps = list(BlockCausalDecoder(model, CommitRule(threshold), options).steps([request]))
        plain = plain_blocks(model, request, options.sub_block or 0, threshold)
        ours = [dict(zip(step.rows, step.tokens, strict=True)) for step in steps]
        assert ours == plain[: len(ours)]
        assert set(range(request.max_new_tokens)) <= {row for step in ours for row in step}


class StaleBlocks:
    """Attention that keeps the keys and values of every canvas row as its latest pass left them."""

    def __init__(self, model: LoadedModel, n_rows: int) -> None:
        backbone = model.backbone
        shape = (backbone.n_layers, n_rows, backbone.n_kv_heads, backbone.head_dim)
        self.model, self.k, self.v, self.rows = model, torch.zeros(shape), torch.zeros(shape), range(0)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        own, block = slice(self.rows.start, self.rows.stop), block_of(self.model)
        q, k = DenseAttend(self.model.backbone.rope, [len(q)], torch.arange(own.start, own.stop)).rotated(q, k)
        self.k[layer, own], self.v[layer, own] = k, v
        n_seen = -(-own.stop // block) * block
        mask = torch.tensor([[column // block <= row // block for column in range(n_seen)] for row in self.rows])
        heads = [x[:n_seen].transpose(0, 1)[None] for x in (self.k[layer], self.v[layer])]
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], *heads, attn_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1)


def plain_cached_blocks(model: LoadedModel, request: DecodeRequest, sub_block: int) -> list[dict[int, int]]:
    """As `plain_blocks` at threshold 1, but a sub-block whose first token is known runs alone over a stale block."""
    block, n_question, shift = block_of(model), len(request.prompt_ids), int(model.spec.logit_shift)
    room = -(-(n_question + request.max_new_tokens) // block) * block
    ids = [*request.prompt_ids, *[model.spec.mask_id] * (room - n_question)]
    todo, attend, steps, whole = set(range(n_question, room)), StaleBlocks(model, room), [], set()
    while todo and min(todo) - n_question < request.max_new_tokens:
        first = min(todo) // sub_block * sub_block
        number = min(todo) // block
        rows = sorted(row for row in todo if first <= row < first + sub_block)
        if shift and rows[0] == number * block:
            rows = rows[:1]
        if number in whole and first not in todo:
            attend.rows = range(first, first + sub_block)
        else:  # everything anew, so that earlier blocks hold their final tokens
            attend.rows = range(rows[0] if shift and rows[0] == number * block else (number + 1) * block)
            whole |= {number} if attend.rows.stop > number * block else set()
        hidden = model.backbone.hidden(torch.tensor([ids[row] for row in attend.rows]), attend)
        logits = model.backbone.logits(hidden[torch.tensor(rows) - shift - attend.rows.start])
        best, tokens = torch.softmax(logits, dim=-1).max(dim=-1)
        row = rows[int(best.argmax())]
        ids[row] = int(tokens[best.argmax()])
        todo.remove(row)
        steps.append({row - n_question: ids[row]})
    return steps


def test_a_cached_block_runs_a_sub_blocks_rows_over_what_the_block_left(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, seen = block_of(model), tails_of(monkeypatch)
    sub_block = block // 2
    for prompt_len in (2 * block, block + sub_block + 1, 3):
        request = request_for(model, (), prompt_len=prompt_len, max_new_tokens=block + 3)
        seen.clear()
        options = BlockCausalOptions(sub_block, block_cache=True)
        steps = list(BlockCausalDecoder(model, CommitRule(1.0), options).steps([request]))
        assert [dict(zip(s.rows, s.tokens, strict=True)) for s in steps] == plain_cached_blocks(
            model, request, sub_block
        )
        assert any(len(tail.ids) == sub_block for (tail,) in seen)


def test_models_and_options_that_do_not_fit_are_refused(tiny_model: LoadedModel) -> None:
    assert "is bidirectional" in (why_not(tiny_model) or "")
    with pytest.raises(ValueError, match=r"'block_causal' does not run on .*bidirectional.*static_kv"):
        BlockCausalDecoder(tiny_model)
    causal = block_causal(tiny_model, 8)
    assert why_not(causal) is None
    with pytest.raises(ValueError, match="sub_block is 3; expected a divisor of 8"):
        BlockCausalDecoder(causal, options=BlockCausalOptions(3))
    with pytest.raises(ValueError, match="sub_block is 4 and steps is 2"):
        BlockCausalDecoder(causal, CommitRule(steps=2), BlockCausalOptions(4))
    with pytest.raises(ValueError, match="sub_block is 0"):
        BlockCausalOptions(0)
    with pytest.raises(ValueError, match="block_cache is True without sub_block"):
        BlockCausalOptions(block_cache=True)


def test_answer_blocks_of_several_mask_blocks_are_still_filled_one_mask_block_at_a_time(model: LoadedModel) -> None:
    wide = block_causal(model, block_of(model), 2 * block_of(model))
    request, rule = request_for(model, (9,)), CommitRule(0.3)
    ours = list(BlockCausalDecoder(wide, rule).steps([replace(request)]))
    assert events(ours) == events(list(BlockCausalDecoder(model, rule).steps([request])))
