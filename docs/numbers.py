"""Measure again every figure that the README quotes and keep the results in docs/numbers/ (run by `make numbers`).

Takes about half an hour on two otherwise idle cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUT = Path(__file__).parent / "numbers"
HANDBOOK = "examples/handbook"
QUESTIONS = "examples/handbook_questions.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="demo-kb")
    store = parser.parse_args().store
    commands = {
        "prefill": ["prefill", HANDBOOK, "--store", store],
        "qa": ["eval", "qa", "--data", QUESTIONS, "--store", store],
        "qa_top4": ["eval", "qa", "--data", QUESTIONS, "--store", store, "--score-window", "inf"],
        "bench_query": ["bench", "query", "--store", store, "--questions", QUESTIONS],
        "bench_prefill": ["bench", "prefill"],
        "bench_store": ["bench", "store"],
        "needle_demo": ["eval", "needle", "--chunk-len", "256", "--modes", "chunked,dense", "--dense-trials", "2"],
        "anchors_demo": ["eval", "anchors", "--lengths", "1k,2k", "--chunk-len", "256", "--questions", "2"],
    }
    OUT.mkdir(exist_ok=True)
    for name, arguments in commands.items():
        print(f"pdllm {' '.join(arguments)} --json", file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "pdllm_rag.cli", *arguments, "--json"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        record = {"command": f"pdllm {' '.join(arguments)} --json", "result": json.loads(done.stdout)}
        (OUT / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
