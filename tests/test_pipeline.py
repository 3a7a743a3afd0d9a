"""The state machine of pipelined blocks: every state it can reach, against D2F's own loop written out plainly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from pdllm_rag.decoding.pipeline import OPENING, D2FOptions, Phase, advance

ORDER = list(Phase)
PROMPT, BLOCK, N_BLOCKS = 3, 4, 3
OPTIONS = [
    D2FOptions(add_threshold=add, activate_threshold=activate, window=window)
    for add, activate, window in itertools.product((0.0, 0.25, 0.7, 1.0), (0.0, 0.5, 0.95), (None, 1, 2))
]


def plain_loop_turn(blocks: list[dict[str, object]], limit: int, options: D2FOptions) -> None:
    """One turn of the published loop between two passes, on dictionaries of its own kind."""

    def share(block: dict[str, object]) -> float:
        return (block["rows"] - block["masks"]) / block["rows"]  # type: ignore[operator, return-value]

    for block in blocks:  # the pass has written the keys and values of finished blocks
        if block["state"] == "done":
            block["state"] = "cached"
    for block in blocks:  # a full block is finished once all before it are
        if block["state"] == "active":
            if block["masks"]:
                break
            block["state"] = "done"
    n_active = sum(block["state"] == "active" for block in blocks)
    if len(blocks) < limit and share(blocks[-1]) >= options.add_threshold and n_active < (options.window or 99):
        blocks.append({"state": "active", "full": False, "rows": BLOCK, "masks": BLOCK})
    for before, block in itertools.pairwise(blocks):
        block["full"] = block["full"] or share(before) >= options.activate_threshold


def as_phase(block: dict[str, object]) -> Phase:
    if block["state"] == "active":
        return Phase.ACTIVE if block["full"] else Phase.SEMI
    return Phase(block["state"])


def outcomes(phases: Sequence[Phase], masks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """What a pass may leave: an active block fills a row at least, a semi one perhaps none."""
    choices = [
        range(left + 1) if phase is Phase.SEMI else range(max(left, 1))
        for phase, left in zip(phases, masks, strict=True)
    ]
    return itertools.product(*choices)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_reachable_state_is_the_plain_loops_and_keeps_the_order(options: D2FOptions) -> None:
    n_rows = [PROMPT, *[BLOCK] * N_BLOCKS]
    first = advance(OPENING, n_rows, [0, *n_rows[1:]], options)
    seen, todo = set(), [(first, (0, BLOCK))]
    assert first == (Phase.DONE, Phase.ACTIVE)
    while todo:
        phases, masks = todo.pop()
        if (phases, masks) in seen:
            continue
        seen.add((phases, masks))
        assert any(phase is Phase.ACTIVE and left for phase, left in zip(phases, masks, strict=True)) or not any(masks)
        for left in outcomes(phases, masks):
            for limit in range(1, N_BLOCKS + 1):  # an end-of-answer token may have come in any block
                kept = (*left, *[BLOCK] * N_BLOCKS)[: limit + 1]
                after = advance(phases, n_rows[: limit + 1], kept, options)
                loop = [
                    {"state": phase.value if not phase.is_open else "active", "full": phase is not Phase.SEMI,
                     "rows": n_rows[i], "masks": kept[i]}
                    for i, phase in enumerate(phases[: limit + 1])
                ]  # fmt: skip
                plain_loop_turn(loop, limit + 1, options)
                assert after == tuple(map(as_phase, loop))
                assert len(after) <= len(phases) + 1
                shape = [(phase is Phase.CACHED) * 2 + (phase is Phase.DONE) for phase in after]
                assert shape == sorted(shape, reverse=True)  # kept ones, then finished ones, then open ones
                for old, new in zip(phases, after, strict=False):
                    assert ORDER.index(new) >= ORDER.index(old)
                    assert (new is Phase.CACHED) == (old in (Phase.DONE, Phase.CACHED))
                grown = (*left, *[BLOCK] * (len(after) - len(left)))[: len(after)]
                if limit == N_BLOCKS:
                    todo.append((after, grown))
    assert len(seen) > 8
    n_open = max(sum(phase.is_open for phase in phases) for phases, _ in seen)
    assert n_open <= (options.window or N_BLOCKS)
    if options.window is None and options.add_threshold < 0.5:
        assert n_open == N_BLOCKS


def test_a_block_is_added_at_its_threshold_and_not_below() -> None:
    options = D2FOptions(add_threshold=0.1, activate_threshold=0.5)
    rows = [1, 10, 10]
    phases = advance(OPENING, rows, [0, 10, 10], options)
    phases = advance(phases, rows, [0, 10, 10], options)
    assert phases == (Phase.CACHED, Phase.ACTIVE)
    phases = advance(phases, rows, [0, 9, 10], options)  # 1 - 9 / 10 is below 0.1 in floating point
    assert phases == (Phase.CACHED, Phase.ACTIVE, Phase.SEMI)
    phases = advance(phases, rows, [0, 6, 10], options)
    assert phases[2] is Phase.SEMI
    phases = advance(phases, rows, [0, 5, 10], options)
    assert phases[2] is Phase.ACTIVE


def test_a_later_block_that_is_full_waits_for_the_ones_before_it() -> None:
    rows, phases = [1, 4, 4], (Phase.CACHED, Phase.ACTIVE, Phase.SEMI)
    phases = advance(phases, rows, [0, 2, 0], D2FOptions())
    assert phases == (Phase.CACHED, Phase.ACTIVE, Phase.SEMI)
    phases = advance(phases, rows, [0, 0, 0], D2FOptions())
    assert phases == (Phase.CACHED, Phase.DONE, Phase.DONE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"add_threshold": -0.1}, "add_threshold is -0.1; expected a share"),
        ({"activate_threshold": 1.5}, "activate_threshold is 1.5"),
        ({"add_threshold": float("nan")}, "add_threshold is nan"),
        ({"block_len": 0}, "block_len is 0; expected 1 or more"),
        ({"window": 0}, "window is 0; expected 1 or more"),
    ],
)
def test_options_out_of_range_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        D2FOptions(**changes)  # type: ignore[arg-type]
