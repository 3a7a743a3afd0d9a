"""Figures on the docs pages that are quoted with their place in docs/numbers, by page; as QUOTES of test_numbers.

Numbers written out in a quote are not taken for quoted.
"""

from __future__ import annotations

from typing import Any

from test_numbers import figure, source

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
    parts = f"contexts/{context}/{WARM}"
    score, step = (f"{parts}/draft/median", f"{parts}/score/median"), f"contexts/{context}/step/static_kv/ms/median"
    return [(DREAM, score), (DREAM, step, steps), (DREAM, score, f"/{step}", 1 / steps)]


def us(row: int, side: str = "ours, scattered 1024") -> str:
    return f"rows/{row}/sides/{side}/us/median"


def refusals(i: int) -> list[tuple[Any, ...]]:
    """What the i-th bound refuses, of each set of questions."""
    sets = [("handbook", kind) for kind in ("answerable", "unrelated", "near_miss")]
    sets += [("near_misses", kind) for kind in ("answerable", "near_miss")]
    return [one for of, kind in sets for one in interval(f"refusals_{of}", f"result/by_min_support/{i}/{kind}")]


ANSWERABLE = "result/answerable"
DREAM, ALONE, SPLIT_S = "gpu_decode_dream", "batch/0/step_ms/median", "autoregressive/kinds/split_s"
WARM = "question/all_steps/warm/parts_ms"
KERNEL, FLEX = "gpu_attention", "flex, in order"
STEP1 = "models/step 1, 4 bits by the nearest level"
HEALTH = tuple(f"health_ms/{part}" for part in ("p50", "p99", "max"))
KILLS = ("put", "add", "replace", "delete", "re-add", "compact")
QUOTES: dict[str, dict[str, list[Any]]] = {
    "decoders.md": {
        "| one token a pass | {:.2f} ({:.2f} to {:.2f}) |": interval("d2f_bundled", "quotes/quality/0/accuracy"),
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
        "moves {:.1f} TB/s, an 8192³ product of random bfloat16 runs at {:.0f} to {:.0f} TFLOP/s": [
            (KERNEL, "ceilings/copy_bytes_per_s", 1e-12),
            (DREAM, "ceilings/flops_per_s", 1e-12),
            (KERNEL, "ceilings/flops_per_s", 1e-12),
        ],
        **{
            said: [(KERNEL, us(row, side), f"/{us(row)}") for row, side in sides]
            for said, sides in {
                "takes {:.2f} times as long at 8k and {:.2f} to {:.2f} times at 32k": [
                    (row, "ours, placed 1024") for row in (0, 3, 1)
                ],
                "{:.1f} times at 8k and {:.1f} times at 32k (28/4": [(row, FLEX) for row in (0, 1)],
                "{:.0f} and {:.0f} times for 32/8": [(row, FLEX) for row in (2, 3)],
                "by hand: {:.2f} and {:.2f} times for 28/4, {:.2f} and {:.2f} for 32/8": [
                    (row, "sdpa, packed rows") for row in range(4)
                ],
                "(`enable_gqa`), {:.1f} and {:.1f} times, {:.1f} and {:.1f}.": [
                    (row, "sdpa, enable_gqa") for row in range(4)
                ],
            }.items()
        },
        "missed by {:.1f} to {:.1f} times for 28/4, {:.1f} to {:.1f} for 32/8": each(
            KERNEL, *(f"rows/{row}/sides/ours, in order/over_floor" for row in (1, 0, 3, 2))
        ),
        "it would be {:.0f}, {:.0f} and {:.0f}.": [
            (DREAM, f"contexts/{i}/step/vanilla/ms/median", f"/{ALONE}") for i in range(3)
        ],
        "is {:.1f} times that of one; it could be {:.1f} at most": [
            (DREAM, "batch/3/tokens_per_s", "/batch/0/tokens_per_s"),
            (DREAM, ALONE, "/batch/3/floor/ms", 8),
        ],
        "takes {:.2f} s (prefill {:.0f} ms, 32 graphed steps of {:.1f} ms)": [
            (DREAM, f"{SPLIT_S}/total_ms/median", 1e-3),
            (DREAM, f"{SPLIT_S}/prefill_ms/median"),
            (DREAM, f"{SPLIT_S}/step_ms/median"),
        ],
        "{:.1f} times as fast at 8k, {:.1f} at 16k, equal": [
            (DREAM, f"{SPLIT_S}/total_ms/median", f"/contexts/{i}/question/few_steps/warm/ms/median") for i in (0, 1)
        ],
        "8 candidates cost {:.0f} ms, a decode of 6 steps about {:.0f}; 32 candidates {:.0f} ms": [
            (DREAM, f"contexts/0/{WARM}/score/median"),
            (DREAM, "contexts/0/step/static_kv/ms/median", 6),
            (DREAM, f"contexts/2/{WARM}/score/median"),
        ],
        "first: {:.2f}, {:.2f} and {:.2f} s for a question": [
            (DREAM, f"contexts/{i}/prefix_cached/question_ms", 1e-3) for i in range(3)
        ],
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
        "Natural Questions' {:.2f}, {:.2f}, and of those whose paragraph was taken out {:.2f}; but of SQuAD 2.0's near"
        " misses {:.2f}": each(
            "support", *(f"held out/refused/{of}" for of in ("supported", "unrelated", "taken out", "near miss"))
        ),
        "The model bundled before had {:.2f} ({:.2f} to {:.2f}), and refused {:.0f} of 79 and {:.0f} of 16": [
            *interval("frameworks", "result/answers/engine/accuracy"),
            *each("frameworks", *(f"result/answers/engine/refused/{of}" for of in ("answerable", "near_miss"))),
        ],
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
        "31st of the readings | {:,.0f}, {:,.0f}, {:,.0f} | {:,.0f}, {:,.0f}, {:,.0f} |": each(
            "server_load", *(f"runs/{run}/rss_mb/{at}" for run in (0, 1) for at in (0, 15, 30))
        ),
        "{:.1f} times as many questions as one at a time, none of {:,.0f} probes of `/health`": [
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
        "takes {:.3f} s (quartiles {:.3f} to {:.3f}): {:,.0f} positions a second, **{:.2f}** of the rate of a large "
        "matrix product in the same run ({:.0f} TFLOP/s; attention and the adapter itself are not counted), at most "
        "{:.1f} GB": [
            *each("gpu_train_dream", "step_s/median", "step_s/q1", "step_s/q3", "positions_per_s"),
            ("gpu_train_dream", "share_of_matmul_rate"),
            ("gpu_train_dream", "matmul_flops_per_s", 1e-12),
            ("gpu_train_dream", "peak_bytes", 1e-9),
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

# The parts of the rows of the table of flipped bits.
FLIPPED = ("KV", "row", "tree", "table root", "meta", "free list", "free page|page gap|overflow|MAC", "")
