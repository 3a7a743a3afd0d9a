"""Figures in tables of the docs pages have their source: the files of docs/numbers that are named at the table.

That is between the last table and it, else in its section. What does not lie in lines of like figures (docs_tables.py),
as sums, ratios and rows of unlike figures, is quoted here with its place.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from docs_tables import Kinds, Table, lines_of, shown, tables_of, without_source
from test_numbers import PAGES, ROOT, figure, named, source

from pdllm_rag.evaluation.metrics import proportion


def each(name: str, *keys: str) -> list[tuple[Any, ...]]:
    return [(name, key) for key in keys]


def interval(name: str, key: str, factor: float = 1) -> list[tuple[Any, ...]]:
    return [(name, f"{key}/{part}", factor) for part in ("value", "low", "high")]


def hits(*tasks: tuple[str, str]) -> list[float]:
    """Of needles in several files: hits, needles, and the interval of their share."""
    found, n = (int(sum(figure(name, f"{task}/{key}") for name, task in tasks)) for key in ("hits", "n"))
    share = proportion([True] * found + [False] * (n - found))
    assert share
    return [found, n, share.low, share.high]


def selecting(context: int, steps: int) -> list[tuple[Any, ...]]:
    """Scoring a context's candidates, as many steps of decoding, and their ratio."""
    parts = f"contexts/{context}/question/all_steps/warm/parts_ms"
    score, step = (f"{parts}/draft/median", f"{parts}/score/median"), f"contexts/{context}/step/static_kv/ms/median"
    return [(DREAM, score), (DREAM, step, steps), (DREAM, score, f"/{step}", 1 / steps)]


def refusals(i: int) -> list[tuple[Any, ...]]:
    """What the i-th bound refuses, of each set of questions."""
    sets = [("handbook", kind) for kind in ("answerable", "unrelated", "near_miss")]
    sets += [("near_misses", kind) for kind in ("answerable", "near_miss")]
    return [one for of, kind in sets for one in interval(f"refusals_{of}", f"result/by_min_support/{i}/{kind}")]


# What a page says, as QUOTES of test_numbers. Numbers written out in a key are not taken for quoted.
ANSWERABLE = "result/answerable"
DREAM = "gpu_decode_dream"
STEP1 = "models/step 1, 4 bits by the nearest level"
HEALTH = tuple(f"health_ms/{part}" for part in ("p50", "p99", "max"))
KILLS = ("put", "add", "replace", "delete", "re-add", "compact")
QUOTES: dict[str, dict[str, list[Any]]] = {
    "decoders.md": {
        "| one token a pass | {:.2f} ({:.2f} to {:.2f}) |": interval("d2f_bundled", "quality/0/accuracy"),
    },
    "needles.md": {
        f"| {of} | {{:.0f}}/{{:.0f}} ({{:.2f}} to {{:.2f}}) |": hits(*tasks)
        for of, tasks in {
            "passkey, chunked | 100 | 100 | 100 | 100 | 100 | 100 | 100": [
                ("needle_gpu", "result/series/0/tasks/0"),
                ("needle_128k", "result/series/0/tasks/0"),
            ],
            "number, chunked | 100 | 100 | 100 | 100 | 100 | 100 | 100": [
                ("needle_gpu", "result/series/0/tasks/1"),
                ("needle_128k", "result/series/0/tasks/1"),
            ],
            "multi, chunked | 100 | - | 100 | - | 100 | 100 | -": [("needle_key_value", "result/series/0/tasks/1")],
            "key_value, chunked | 33 | - | 34 | - | 33 | 37 | -": [("needle_key_value", "result/series/0/tasks/0")],
            "passkey, dense | 100 | 91 | 40 | 26 | - | - | -": [("needle_dense_gpu", "results/0/series/0/tasks/1")],
            "number, dense | 98 | 70 | 25 | 19 | 0/50 | 0/50 | -": [
                ("needle_dense_gpu", "results/0/series/0/tasks/0"),
                ("needle_dense_gpu", "results/1/series/0/tasks/0"),
            ],
        }.items()
    }
    | {
        f"| {{:.{digits}f}} to {{:.{digits}f}} % | {of}": [
            ("anchors_demo", f"result/masses/{text}/head/{chunk}", 100) for chunk in chunks
        ]
        for digits, of, text, chunks in ((1, "23.4", 3, (2, 7)), (2, "0.3", 4, (5, 1)), (2, "17.4", 5, (5, 6)))
    },
    "performance.md": {
        "{:.0f} % of the matrix rate |": [("gpu_prefill", "limits/compute/matmul_share", 100)],
        "{:.0f} % of the matrix rate; {:.0f} % of the above": [
            (
                "gpu_prefill",
                "limits/host/tokens_per_s/median",
                "limits/compute/flops_per_token",
                "/limits/matmul_flops_per_s",
                100,
            ),
            ("gpu_prefill", "limits/limit/host_share", 100),
        ],
        "{:.0f} % of what this disk takes from one plain file ({:.1f} GB/s, {:,.0f} tokens/s)": [
            ("gpu_prefill", "limits/limit/store_share", 100),
            ("gpu_prefill", "limits/disk/bytes_per_s/median", 1e-9),
            ("gpu_prefill", "limits/limit/tokens_per_s/disk"),
        ],
        "; {:.2f} ({:.2f} to {:.2f}) |": each(
            "frameworks", *(f"result/times/llama_index 3, async/of_engine/{part}" for part in ("median", "q1", "q3"))
        ),
        "{:.2f}x ({:,.0f} and {:,.0f} tokens/s; {:,.0f} written to disk)": each(
            "bench_prefill",
            "result/encode/ratio/median",
            "result/encode/divisor/tokens_per_s/median",
            "result/encode/dividend/tokens_per_s/median",
            "result/write/tokens_per_s/median",
        ),
        "{:.1f}x ({:.0f} and {:.0f} ms)": each(
            "bench_query",
            "result/decode/ratio/median",
            "result/decode/divisor/ms/median",
            "result/decode/dividend/ms/median",
        ),
        "{:.0f}x ({:,.0f} ms)": each(
            "bench_query", "result/long_context/ratio/median", "result/long_context/dividend/ms/median"
        ),
        "{:.0f}x ({:.1f} and {:.1f} s)": [
            ("bench_query", "result/question/ratio/median"),
            ("bench_query", "result/question/divisor/ms/median", 1e-3),
            ("bench_query", "result/question/dividend/ms/median", 1e-3),
        ],
        "{:.1f}x, with a draft made and scored (one question in four) {:.1f}x": each(
            "bench_selecting", "results/0/scoring/s_i/ratio/median", "results/0/scoring/ratio/median"
        ),
    },
    "quality.md": {
        "1.09 (1.00 to 1.13) | {:.0f} / {:.0f} ms = {:.1f}": selecting(0, 6),
        "0.77 (0.65 to 0.77) | {:.0f} / {:.0f} ms = {:.1f}": selecting(2, 32),
        **{
            f"| {bound} |{' {:.2f} ({:.2f} to {:.2f}) |' * 5}": refusals(i)
            for i, bound in ((0, "0"), (5, "0.2"), (8, "0.5 (default)"), (11, "0.8"), (13, "0.95"), (15, "0.99"))
        },
        "accuracy (exact or contained) | **{:.2f}** ({:.2f} to {:.2f}); {:.2f} when all": [
            *interval("qa", f"{ANSWERABLE}/accuracy"),
            ("qa_top4", f"{ANSWERABLE}/accuracy/value"),
        ],
        "{:.2f} / **{:.2f}**; BM25 alone {:.2f} / {:.2f}": each(
            "qa", *(f"{ANSWERABLE}/{way}recall_at_{k}/value" for way in ("", "bm25_") for k in (1, 4))
        ),
        "unrelated questions refused | **{:.0f} of {:.0f}**": [
            ("qa", "result/unrelated/refused/value", "result/unrelated/n"),
            ("qa", "result/unrelated/n"),
        ],
        "answerable questions refused | {:.0f} of {:.0f}": [
            ("qa", f"{ANSWERABLE}/false_refusals/value", f"{ANSWERABLE}/n"),
            ("qa", f"{ANSWERABLE}/n"),
        ],
        "near misses refused | **{:.0f} of {:.0f}**": [
            ("qa", "result/near_miss/refused/value", "result/near_miss/n"),
            ("qa", "result/near_miss/n"),
        ],
        "median **{:.2f} s** (scoring {:.2f}, decoding {:.2f}), 90th percentile {:.2f} s": [
            ("qa", f"result/ms/{part}", 1e-3) for part in ("median", "phases/score", "phases/decode", "p90")
        ],
        "forward passes per answer | median {:.0f}": each("qa", "result/nfe/median"),
    },
    "reliability.md": {
        "{:.0f}: put {:.0f}, add {:.0f}, replace {:.0f}, delete {:.0f}, re-add {:.0f}, compact {:.0f} |": [
            ("reliability_kill", "result/in_flight"),
            *(("reliability_kill", (f"result/undone/{kind}", f"result/done/{kind}")) for kind in KILLS),
        ],
        "| {:.0f} / {:.0f} |": [
            ("reliability_kill", tuple(f"result/{end}/{kind}" for kind in KILLS)) for end in ("undone", "done")
        ],
        "10, 29, {:.0f} |": each("reliability_kill", "result/creating"),
        "44,677, {:,.0f} |": each("reliability_mix", "result/documents_checked"),
        "| operations | {:,.0f} |": [
            (
                "reliability_mix",
                tuple(f"result/operations/{name}" for name in source("reliability_mix")["result"]["operations"]),
            )
        ],
    },
    "scale.md": {
        "| {:.0f} | 24, 4, 7 |": [
            ("ray_handbook", "runs/1 workers/working_tokens_per_s", "/runs/1 workers/working_tokens_per_s")
        ],
        "| {:.2f}, **{:.0f} %** |": [
            ("ray_handbook", "runs/2 workers/working_tokens_per_s", "/runs/1 workers/working_tokens_per_s"),
            ("ray_handbook", "runs/2 workers/working_tokens_per_s", "/runs/1 workers/working_tokens_per_s", 50),
        ],
        "16 chunks, {:.1f} % | 62": [("ray_prefill", "runs/2 workers, killed/ray/share", 100)],
        "16 chunks, {:.1f} % | 89": [("ray_prefill", "runs/2 nodes, one lost/ray/share", 100)],
    },
    "server.md": {
        **{
            said: [("server_load", f"runs/{run}/{key}") for run in (0, 1) for key in keys]
            for said, keys in {
                "| {:,.0f}, {:,.0f}, **0** | {:,.0f}, {:,.0f}, **0** |": ("statuses/200", "statuses/429"),
                "of another client | **{:.0f}** | **{:.0f}** |": ("mixed_answers",),
                "questions a second | **{:.1f}** | {:.1f} |": ("questions_per_s",),
                "95th percentile | {:.1f}, {:.1f} | {:.1f}, {:.1f} |": ("seconds_median", "seconds_p95"),
                "longest | {:.0f}, {:.0f}, {:.0f} | {:.0f}, {:.0f}, {:.0f} |": HEALTH,
                "the same | {:.0f}, {:.0f}, {:.0f} | {:.0f}, {:.0f}, {:.0f} |": [
                    key.replace("health", "control") for key in HEALTH
                ],
                "| | batch 8, {:.0f} s | batch 1, {:.0f} s |": ("seconds",),
            }.items()
        },
        "between batches {:.0f} at first, {:.0f} after a minute, {:,.0f} at the end | {:.0f} to {:.0f} |": each(
            "server_load", *(f"runs/{run}/rss_mb/{at}" for run, at in ((0, 0), (0, 6), (0, 30), (1, 3), (1, 10)))
        ),
        "{:.1f} times as many questions as one at a time, and none of {:,.0f} probes of `/health`": [
            ("server_load", "runs/0/questions_per_s", "/runs/1/questions_per_s"),
            ("server_load", ("runs/0/health_ms/probes", "runs/1/health_ms/probes")),
        ],
        "{:,.0f} of the {:,.0f} answers at batch 8 and {:.0f} of the {:.0f} at batch 1": [
            ("server_load", f"runs/{run}/{key}")
            for run in (0, 1)
            for key in ("answers_with_their_code_word", "statuses/200")
        ],
    },
    "store.md": {
        f"| {kind} | {{:.1f}} MB |": [("reuse_singlehop", f"result/stored/{of}/kv_bytes_per_1k_tokens", factor)]
        for kind, of, factor in (
            ("float32", "bfloat16", 2e-6),
            ("bfloat16", "bfloat16", 1e-6),
            ("int8", "int8", 1e-6),
        )
    },
    "training.md": {
        "| {:.3f} ({:.3f} to {:.3f}) | {:.3f} ({:.3f} to {:.3f}) | | {:.0f} |": [
            *interval("training_mean", f"{STEP1}/exact"),
            *interval("training_mean", f"{STEP1}/f1"),
            ("training_mean", f"{STEP1}/says that it is not there"),
        ],
        **{
            said.replace("x", "{:+.1f}"): interval(name, f"{difference}/f1", 100)
            for said, name, difference in (
                ("x points (x to x), against", "training_trials_more", "reading/the same in 8 bits/against bundled"),
                ("**x** (x to x), likewise", "training_trials_more", "reading/second trial, 4 bits/against bundled"),
                ("| x (x to x) |", "training_mean", "models/mean, 8 bits/against_first"),
                ("**x** (x to x) |", "training_mean", "models/mean, 4 bits, calibrated/against_first"),
            )
        },
    },
}
# Tables without a source: no measurements, ...
EXEMPT = {
    ("configuration.md", "| | where"): "an example of an option",
    ("configuration.md", "| | |"): "a default of the doctor",
    ("decoders.md", "| situation"): "rough numbers to choose by",
    ("decoders.md", "| asked by"): "rules",
    ("decoders.md", "| option"): "options and defaults",
    ("glossary.md", "| word"): "definitions",
    ("models.md", "| family"): "follows from the shapes, or is what configs say",
    ("needles.md", "| task"): "definitions",
    ("object-store.md", "| object"): "definitions",
    ("performance.md", "| part"): "sizes that the code rounds to",
    ("reliability.md", "| | long run"): "options",
    ("server.md", "| route"): "statuses of HTTP",
    ("server.md", "| variable"): "defaults",
    ("server.md", "| name"): "a status of HTTP",
    ("store-format.md", "| table"): "the format",
    ("store-format.md", "| offset"): "the format",
    ("training.md", "| command"): "a number of bits and of a paper",
    # ... measurements of others or arithmetic, ...
    ("quality.md", "| | paper"): "the paper's figures",
    ("scale.md", "| | demo, 2 cores"): "arithmetic over unit_costs.json, whose sources test_planning.py reads",
    # ... and measurements that were not kept as a file, as the pages say.
    ("decisions/0002-scoring.md", "| score"): "scripts of their own",
    ("decisions/0002-scoring.md", "| chunk length"): "scripts of their own",
    ("decisions/0003-attention-on-a-cpu.md", "| context rows"): "by hand",
    ("decisions/0007-context-in-prompts.md", "| asked"): "by hand",
    ("decoders.md", "| setting"): "a script of its own",
    ("decoders.md", "| block | new tokens"): "by hand",
    ("needles.md", "| form"): "by hand",
    # Added up over kinds of damage:
    ("reliability.md", "| part"): "test_flipped_bits_add_up",
}

# The parts of the rows of the table of flipped bits.
FLIPPED = ("KV", "row", "tree", "table root", "meta", "free list", "free page|page gap|overflow|MAC", "")


def without_quotes(page: str, text: str) -> str:
    """A page's text, whose quoted figures are left out; all else of a quote stays, numbers too."""
    for quote, figures in QUOTES.get(page, {}).items():
        said = quote.format(*(one if isinstance(one, int | float) else figure(*one) for one in figures))
        assert said in text, f"{page} should say {said!r}"
        text = text.replace(said, re.sub(r"\{[^}]*\}", "", quote))
    return text


@cache
def tables() -> list[Table]:
    """All tables with figures, without what is quoted."""
    names = {str(page.relative_to(ROOT / "docs")): page.read_text() for page in PAGES}
    found = [table for page, text in names.items() for table in tables_of(page, without_quotes(page, text))]
    return [table for table in found if lines_of(table.rows)]


@cache
def kinds(files: frozenset[str]) -> Kinds:
    return Kinds({name: source(name) for name in files})


def missing(table: Table) -> list[str]:
    return without_source(table.rows, kinds(frozenset(named(table.before) or named(table.section))))


def exemption(table: Table) -> tuple[str, str] | None:
    return next((key for key in EXEMPT if table.page == key[0] and table.header.startswith(key[1])), None)


def test_figures_of_tables_are_those_of_the_files_named_at_them() -> None:
    wrong = {table[:2]: figures for table in tables() if not exemption(table) and (figures := missing(table))}
    assert not wrong, "neither in the files named at the table, nor in QUOTES, nor is the table EXEMPT"


def test_each_exemption_is_needed() -> None:
    assert {exemption(table) for table in tables() if missing(table)} - {None} == {*EXEMPT}


def test_flipped_bits_add_up() -> None:
    (table,) = (table for table in tables() if table.header.startswith("| part | flips |"))
    outcomes = [name.strip() for name in table.header.strip("|").split("|")][2:-1]
    parts = source("reliability_flips")["result"]["parts"]
    for row, belongs in zip(table.rows, FLIPPED, strict=True):
        own = [counts for name, counts in parts.items() if re.match(belongs, name)]
        added = [sum(counts.get(outcome, 0) for counts in own) for outcome in outcomes]
        assert re.findall(r"[\d,]+(?= \|)", row) == [f"{n:,}" for n in (sum(added), *added, 0)]


RECORD = {
    "ways": [
        {"name": "ours", "ms": 12.34, "f1": {"value": 0.512}},
        {"name": "theirs", "ms": 98.7, "f1": {"value": 0.4}},
    ],
    "rate": 39_317,
}
PAGE = """# Page

## Speed

Said in [made_up.json](numbers/made_up.json):

| way | ms | F1 |
|---|---|---|
| ours, 8k | **{}** | {} |
| theirs, 3 of 4 | {} | {} points |

## Options

| option | default |
|---|---|
| `k` | `4` or 5 |
"""


@pytest.mark.parametrize(
    ("figures", "wrong"),
    [
        (("12", "0.51", "98.7", "0.40"), []),
        (("0.0123", "51.2", "0.099", "40"), []),  # seconds and points
        (("13", "0.51", "98.7", "0.40"), ["ours, 8k: 13", "theirs, 3 of 4: 98.7"]),
        (("12", "0.52", "98.7", "0.40"), ["ours, 8k: 0.52", "theirs, 3 of 4: 0.40"]),
        (("12.34", "0.51", "0.0987", "0.40"), ["ours, 8k: 12.34", "theirs, 3 of 4: 0.0987"]),  # one unit a line
    ],
)
def test_a_wrong_figure_of_a_made_up_page_is_found(figures: tuple[str, ...], wrong: list[str]) -> None:
    speed, options = tables_of("page.md", PAGE.format(*figures))
    assert "made_up.json" in speed.before
    assert without_source(speed.rows, Kinds({"made_up": RECORD})) == wrong
    assert "made_up" not in options.section
    assert without_source(options.rows, Kinds({})) == ["`k`: 5"]


@pytest.mark.parametrize(
    ("text", "value", "half"),
    [("-0.40", -0.4, 0.005), ("39,300", 39300, 50), ("1.6e-03", 1.6e-3, 5e-5), ("100", 100, 0.5), ("+0", 0, 0.5)],
)
def test_figures_are_as_exact_as_they_are_shown(text: str, value: float, half: float) -> None:
    assert shown(text) == pytest.approx((value, half), rel=1e-3)
