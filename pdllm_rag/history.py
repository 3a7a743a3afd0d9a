"""Which turns of a conversation the model reads beside its last one, the question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Turn = TypeVar("Turn", bound=Mapping[str, str])

MAX_TOKENS = 512  # of earlier turns, unless somebody says otherwise


def question_start(turns: Sequence[Mapping[str, str]]) -> int:
    """The index of the first turn behind the last answer: what the question, the last turn, may come with."""
    return max((at for at, turn in enumerate(turns, start=1) if turn["role"] == "assistant"), default=0)


def kept_turns(turns: Sequence[Turn], encode: Callable[[str], Sequence[int]], max_tokens: int) -> list[Turn]:
    """The last turn, and before it the system messages and the newest turns that fit, in their order.

    System messages are counted first, then the others from the newest back, up to the first that does not fit. What is
    left does not begin with an answer whose question is gone.
    """
    room = max_tokens
    earlier = list(enumerate(turns[:-1]))
    chosen: set[int] = set()
    for index, turn in sorted(earlier, key=lambda entry: (entry[1]["role"] != "system", -entry[0])):
        room -= len(encode(turn["content"]))
        if room < 0:
            break
        chosen.add(index)
    kept = [turn for index, turn in earlier if index in chosen and turn["role"] != "system"]
    while kept and kept[0]["role"] == "assistant":
        kept.pop(0)
    system = [turn for index, turn in earlier if index in chosen and turn["role"] == "system"]
    return [*system, *kept, *turns[-1:]]
