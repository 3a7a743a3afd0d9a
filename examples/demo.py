"""The demo behind `make demo`: read a handbook once, ask it questions, and the first of them again.

The repetition shows what the store is for: in a new process every chunk is a hit and nothing is computed again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HANDBOOK = Path(__file__).parent / "handbook"
QUESTIONS = (
    "How many days of paid annual leave does a full-time employee get under the 2025 leave policy?",
    "How long is the warranty on a Gannet buoy without a service contract?",
    "Who runs the order desk in Porto?",
    "What is the capital of Peru?",
)


def pdllm(*arguments: str) -> None:
    """Run a command as a user would, and show it."""
    print(f"\n$ pdllm {' '.join(repr(a) if ' ' in a else a for a in arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "pdllm_rag.cli", *arguments], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="demo-kb")
    store = parser.parse_args().store
    pdllm("prefill", str(HANDBOOK), "--store", store)
    for question in QUESTIONS:
        pdllm("ask", question, "--store", store)
    print("\nThe first question again, in a new process: read from the store, nothing computed twice.")
    pdllm("ask", QUESTIONS[0], "--store", store)


if __name__ == "__main__":
    main()
