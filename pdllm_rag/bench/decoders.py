"""What a denoising step of each decoder costs against vanilla's, and how many steps it takes: two ratios, told apart.

- random weights are never sure of a token, so commits are forced: `tokens_per_step` of a block's rows a step, the same
  for all decoders. The policy ratio is then what one assumes (how many fewer steps than one token each), and the
  step-time ratio is what is measured; on a real model the first is measured by `decoder_quality`;
- steps are timed by the decoder's own generator, from one pass's last event to the next one's, what the host does
  included. They come in units that repeat (a block, a refresh). A long run is cut after whole units; an answer's time
  is that of its first unit, which also gathers the context, and of as many more as it takes, each like the mean of
  those after the first;
- vanilla computes prompt and answer anew at each step, all the answer's masks in sight, as published.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import torch

from pdllm_rag.bench.ceilings import describe_device
from pdllm_rag.bench.decode_sides import check_family, endless, random_ids, random_kv
from pdllm_rag.bench.machine import Spread, describe
from pdllm_rag.decoding import CommitRule, Decoder, DecodeRequest
from pdllm_rag.decoding.dyllm import DyLLMDecoder, DyLLMOptions
from pdllm_rag.decoding.kinds import make_decoder
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.placement import Placement

LEAST_UNITS = 2  # of a run, however long they take


@dataclass(frozen=True)
class SpeedSizes:
    """Sizes of a run.

    Attributes:
        question_rows: of a prompt; the others are its context's.
        answer_rows: a multiple of the family's block.
        repeat: rounds, in each of which every contender has one run.
        max_s: no further unit is begun after so many seconds of a run.
    """

    question_rows: int = 64
    answer_rows: int = 256
    repeat: int = 2
    max_s: float = 1.0

    def __post_init__(self) -> None:
        if min(self.question_rows, self.answer_rows, self.repeat) < 1 or not self.max_s >= 0:
            raise ValueError(f"{self}; expected max_s of 0 or more and the others of 1 or more")


class Forced(NamedTuple):
    """How a contender's commits are forced.

    tokens_per_step: of each sequence. rule: commits that many of a block. salient: share of the rows that a decoder is
    to compute anew, for one whose work depends on the weights.
    """

    tokens_per_step: int
    rule: CommitRule
    salient: float


@dataclass(frozen=True)
class Contender:
    """A decoder under forced commits.

    Attributes:
        make: the decoder; see `by_name` for one that commits by the rule.
        unit: passes after which its passes repeat, from those of a block.
        dense: the context is part of the prompt that it computes, not stored KV.
    """

    make: Callable[[LoadedModel, Forced], Decoder]
    unit: Callable[[int], int]
    dense: bool = True


def by_name(name: str, **options: Any) -> Callable[[LoadedModel, Forced], Decoder]:
    """A decoder of `decoding.kinds` with options, which commits by the forced rule."""
    return lambda model, forced: make_decoder(name, model, forced.rule, options)


def _dyllm(model: LoadedModel, forced: Forced) -> Decoder:
    """Every row of a threshold above 1 is salient, and the capacity leaves room for the forced share."""
    return DyLLMDecoder(model, forced.rule, DyLLMOptions(tau=2.0, capacity=forced.salient))


BASELINE = "vanilla"
CONTENDERS: dict[str, Contender] = {
    BASELINE: Contender(by_name("vanilla", canvas="whole"), lambda _: 1),
    "fast_dllm prefix": Contender(by_name("fast_dllm", cache="prefix"), lambda block: block),
    "fast_dllm dual": Contender(by_name("fast_dllm", cache="dual"), lambda block: block),
    "dyllm": Contender(_dyllm, lambda block: block),
    "d2f": Contender(by_name("d2f"), lambda block: block),
    "static_kv, stored context": Contender(by_name("static_kv"), lambda block: block, dense=False),
    "fast_dllm dual, stored context": Contender(by_name("fast_dllm", cache="dual"), lambda block: block, dense=False),
    "dyllm, stored context": Contender(_dyllm, lambda block: block, dense=False),
    "d2f, stored context": Contender(by_name("d2f"), lambda block: block, dense=False),
}


class Run(NamedTuple):
    """Seconds of a run's units, and the passes in them; `ended` if they are the whole answer's."""

    units_s: list[float]
    n_passes: int
    ended: bool

    def whole(self, n_passes: int) -> Run:
        """The run of a whole answer: of so many passes, if this one was cut; more units like those after the first."""
        if self.ended:
            return self
        first, *others = self.units_s
        n_units = n_passes * len(self.units_s) / self.n_passes
        return Run([first, (n_units - 1) * fmean(others)], n_passes, True)


def bench_decoders(
    model: LoadedModel,
    *,
    cases: Sequence[tuple[int, int]] = ((1024, 16), (8192, 1)),
    tokens_per_step: Sequence[int] = (1, 2, 4),
    salient: float = 0.25,
    contenders: Mapping[str, Contender] = CONTENDERS,
    sizes: SpeedSizes | None = None,
    on_part: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure decoders with a model of any weights.

    In the figures `step_ms` is the mean over an answer's passes; `step_ratio` is the baseline's over it, `policy_ratio`
    one pass a token over the passes taken, and `speed_up` their product.

    Args:
        cases: tokens of a prompt, and sequences decoded together.
        salient: see `Forced`.
        contenders: by name, the baseline among them.
        on_part: gets all figures so far, after each case and number of tokens.

    Raises:
        ValueError: a block-causal family, or sizes that do not fit it or each other.
    """
    sizes = sizes or SpeedSizes()
    check_family(model)
    block_len = model.spec.family.block_len
    if sizes.answer_rows % block_len or any(block_len % count for count in tokens_per_step):
        raise ValueError(
            f"answer_rows is {sizes.answer_rows} and tokens_per_step {list(tokens_per_step)}; expected multiples and "
            f"divisors of {block_len}, the block of {model.spec.name}"
        )
    if any(prompt <= sizes.question_rows for prompt, _ in cases):
        raise ValueError(f"prompts are {[p for p, _ in cases]}; expected more than {sizes.question_rows} tokens")
    device = model.backbone.device
    figures: dict[str, Any] = {
        "machine": {**describe(model)._asdict(), **describe_device(device, model.backbone.dtype)},
        "model": model.spec.name,
        "repeat": sizes.repeat,
        "sizes": {**asdict(sizes), "block_len": block_len, "salient": salient, "layers": model.backbone.n_layers},
        "speed": [],
    }
    model = endless(model)
    for prompt_len, n_sequences in cases:
        requests = [_request(model, prompt_len, sizes, seed=seed) for seed in range(n_sequences)]
        for count in tokens_per_step:
            forced = Forced(count, CommitRule(threshold=1.0, steps=block_len // count), salient)
            found = _compare(model, requests, forced, contenders, sizes)
            figures["speed"].append(
                {"prompt": prompt_len, "sequences": n_sequences, "tokens_per_step": count, "contenders": found}
            )
            if on_part:
                on_part(figures)
    return figures


def run(decoder: Decoder, requests: Sequence[DecodeRequest], unit: int, max_s: float) -> Run:
    """Decode to the end, or to the first whole unit after `max_s` seconds."""
    stamps = [time.perf_counter()]  # the beginning, and the last event of every pass
    ended = True
    with closing(decoder.steps(requests)) as events:  # type: ignore[type-var]
        for step in events:
            if step.nfe == len(stamps):
                n_units, rest = divmod(len(stamps) - 1, unit)
                if n_units >= LEAST_UNITS and not rest and stamps[-1] - stamps[0] > max_s:
                    ended = False
                    break
                stamps.append(0.0)
            stamps[step.nfe] = time.perf_counter()
    bounds = stamps[::unit] if (len(stamps) - 1) % unit == 0 else [*stamps[::unit], stamps[-1]]
    return Run([b - a for a, b in pairwise(bounds)], len(stamps) - 1, ended)


def _compare(
    model: LoadedModel,
    requests: Sequence[DecodeRequest],
    forced: Forced,
    contenders: Mapping[str, Contender],
    sizes: SpeedSizes,
) -> dict[str, Any]:
    """Every contender's runs, in turns; ratios are within a round."""
    prompts = {True: [request.as_prompt() for request in requests], False: requests}
    block_passes = model.spec.family.block_len // forced.tokens_per_step
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    backends = {}
    for _ in range(sizes.repeat):
        for name, contender in contenders.items():
            decoder, given = contender.make(model, forced), prompts[contender.dense]
            backends[name] = decoder.backend
            unit = contender.unit(block_passes)
            run(decoder, given, 1, 0.0)  # compiles kernels, and captures; large captures are not kept for long
            runs[name].append(run(decoder, given, unit, sizes.max_s))
            del decoder
            gc.collect()
            if model.backbone.device.type == "cuda":
                torch.cuda.empty_cache()
    whole = {name: [one.whole(sizes.answer_rows // forced.tokens_per_step) for one in runs[name]] for name in runs}
    step_ms = {name: [1000 * sum(one.units_s) / one.n_passes for one in whole[name]] for name in whole}
    found = {}
    for name, own in whole.items():
        n_tokens = len(requests) * sizes.answer_rows
        step_ratio = Spread.of([a / b for a, b in zip(step_ms[BASELINE], step_ms[name], strict=True)])
        policy_ratio = sizes.answer_rows / own[0].n_passes
        found[name] = {
            "backend": backends[name],
            "passes_timed": runs[name][0].n_passes,
            "nfe": own[0].n_passes,
            "step_ms": Spread.of(step_ms[name]).as_dict(),
            "tokens_per_s": Spread.of([n_tokens / sum(one.units_s) for one in own]).as_dict(),
            "step_ratio": step_ratio.as_dict(),
            "policy_ratio": policy_ratio,
            "speed_up": step_ratio.median * policy_ratio,
        }
    return found


def _request(model: LoadedModel, prompt_len: int, sizes: SpeedSizes, *, seed: int) -> DecodeRequest:
    """A prompt: one chunk with its KV, and a question."""
    n_context = prompt_len - sizes.question_rows
    ids = random_ids(model, prompt_len, seed=seed)
    return DecodeRequest(
        ids[n_context:],
        Placement((0,), n_context),
        sizes.answer_rows,
        chunk_ids=[ids[:n_context]],
        chunk_kv=[random_kv(model, n_context, seed=seed)],
    )
