"""Of each chunk the rows that the question attends to most; they keep their positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pdllm_store import ChunkKV, MemoryStore

from pdllm_rag import AskOptions, InputDocument, LoadedModel, RagEngine
from pdllm_rag.attends import CaptureAttend, DenseAttend
from pdllm_rag.decoding import CommitRule, DecodeRequest, StaticKVDecoder
from pdllm_rag.placement import plan_offsets
from pdllm_rag.sparsity import attention_received, kept_rows, sparse

LENS = (9, 14)
PROMPT = [30, 31, 32, 33, 34]


def chunk_ids() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(5, 200, (n,), generator=generator).tolist() for n in LENS]


def encoded(model: LoadedModel, ids: list[int]) -> ChunkKV:
    capture = CaptureAttend(model.backbone.rope, [len(ids)], torch.arange(len(ids)), sketch_layer=0)
    model.backbone.encode(torch.tensor(ids), capture)
    return ChunkKV(torch.stack(capture.keys), torch.stack(capture.values))


class Recording(DenseAttend):
    """Dense attention over everything, under a mask, that sums what each column gets from the last rows."""

    def __init__(self, *given: object, n_last: int) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.n_last = n_last
        self.sums = torch.zeros(sum(self._lens))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert self._masks is not None
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = torch.einsum("lhd,thd->lht", q, keys) / q.shape[2] ** 0.5
        weights = scores.masked_fill(~self._masks[0][:, None], -torch.inf).softmax(-1)
        self.sums += weights[-self.n_last :].sum(dim=(0, 1))
        return super().attend(q, k, v)


def test_what_a_row_receives_is_the_dense_columns_sum(tiny_model: LoadedModel) -> None:
    ids = chunk_ids()
    placement = plan_offsets(LENS, "sequential", chunk_len=20)
    received = attention_received(tiny_model, PROMPT, [encoded(tiny_model, one) for one in ids], placement)
    n = sum(LENS)
    mask = torch.zeros(n + len(PROMPT), n + len(PROMPT), dtype=torch.bool)
    mask[:9, :9] = mask[9:n, 9:n] = mask[n:] = True
    tokens = torch.tensor([*ids[0], *ids[1], *PROMPT])
    dense = Recording(tiny_model.backbone.rope, [len(tokens)], torch.arange(len(tokens)), [mask], n_last=len(PROMPT))
    tiny_model.backbone.hidden(tokens, dense)
    torch.testing.assert_close(torch.cat(received), dense.sums[:n], rtol=0, atol=1e-4 * float(dense.sums.max()))


def test_all_rows_are_the_chunk_itself(tiny_model: LoadedModel) -> None:
    chunk = encoded(tiny_model, chunk_ids()[0])
    for budget in (9, 10, 1000):
        rows = kept_rows(torch.rand(9), budget)
        assert rows.tolist() == list(range(9))
        assert sparse(chunk, rows) is chunk


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 45))
def test_bos_is_kept_and_so_are_the_best_neighbourhoods(received: list[int], budget: int) -> None:
    values = torch.tensor(received, dtype=torch.float32)
    rows = kept_rows(values, budget).tolist()
    assert rows == sorted(set(rows))
    assert len(rows) == min(budget, len(received))
    assert rows[0] == 0
    pooled = [max(received[max(0, row - 3) : row + 4]) for row in range(len(received))]
    left = [pooled[row] for row in range(1, len(received)) if row not in rows]
    taken = [pooled[row] for row in rows[1:]]
    assert max(left, default=-1) <= min(taken, default=9)


def test_a_planted_row_is_kept_with_its_neighbours() -> None:
    received = torch.zeros(60)
    received[40] = 5.0
    assert kept_rows(received, 8).tolist() == [0, 37, 38, 39, 40, 41, 42, 43]
    assert kept_rows(received, 2).tolist() == [0, 40]
    with pytest.raises(ValueError, match="1 or more"):
        kept_rows(received, 0)


def test_decoding_over_kept_rows_is_a_dense_pass_that_hides_the_others(tiny_model: LoadedModel) -> None:
    """Positions are the whole chunk's: the dense side keeps every token where it is and only masks columns."""
    ids = chunk_ids()
    placement = plan_offsets(LENS, "gap", chunk_len=20)
    rows = [torch.tensor([0, 3, 4, 8]), torch.tensor([0, 1, 2, 9, 13])]
    chunks = [sparse(encoded(tiny_model, one), kept) for one, kept in zip(ids, rows, strict=True)]
    request = DecodeRequest(PROMPT, placement, 4, chunk_kv=chunks)
    (step,) = StaticKVDecoder(tiny_model, CommitRule(threshold=0.0)).steps([request])

    n, n_canvas = sum(LENS), len(PROMPT) + tiny_model.spec.family.block_len
    seen = torch.zeros(n, dtype=torch.bool)
    seen[rows[0]], seen[rows[1] + LENS[0]] = True, True
    mask = torch.zeros(n + n_canvas, n + n_canvas, dtype=torch.bool)
    mask[:9, :9] = mask[9:n, 9:n] = True
    mask[n:, :n], mask[n:, n:] = seen, True
    canvas = [*PROMPT, *[tiny_model.spec.mask_id] * tiny_model.spec.family.block_len]
    positions = torch.cat((torch.arange(9), torch.arange(20, 34), torch.arange(40, 40 + n_canvas)))
    attend = DenseAttend(tiny_model.backbone.rope, [len(positions)], positions, [mask])
    hidden = tiny_model.backbone.hidden(torch.tensor([*ids[0], *ids[1], *canvas]), attend)
    answer = torch.arange(n + len(PROMPT), len(positions)) - int(tiny_model.spec.logit_shift)
    best = tiny_model.backbone.logits(hidden[answer]).argmax(dim=-1)
    found = dict(zip(step.rows, step.tokens, strict=True))
    eos = min((row for row, token in enumerate(best.tolist()) if token in tiny_model.spec.eos_ids), default=99)
    assert [found[row] for row in range(min(eos, len(best)))] == best.tolist()[: min(eos, len(best))]


def test_an_answer_over_all_rows_is_the_answer_and_stats_say_how_many_were_read(tiny_model: LoadedModel) -> None:
    options = AskOptions(abstain=False, score_window=float("inf"), max_new_tokens=8, k=2)
    engine = RagEngine.open(MemoryStore(), tiny_model, chunk_len=40, options=options)
    engine.prefill([InputDocument("d", "The red door opens at nine. " * 6, "d")])
    whole = engine.answer("When does the red door open?")
    assert whole.stats.policy == "independent"
    many = engine.answer("When does the red door open?", chunk_rows=40)
    assert (many.text, many.stats.policy) == (whole.text, "independent, 40 rows a chunk")
    few = engine.answer("When does the red door open?", chunk_rows=4)
    assert few.stats.policy == "independent, 4 rows a chunk"
    assert [c.quote for c in few.citations] == [c.quote for c in whole.citations]
    for bad in (0, -1, True, 2.5):
        with pytest.raises(ValueError, match="chunk_rows"):
            engine.answer("When?", chunk_rows=bad)
    with pytest.raises(ValueError, match="vanilla"):
        engine.answer("When?", chunk_rows=4, decoder="vanilla")
