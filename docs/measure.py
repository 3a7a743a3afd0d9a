"""Measure the CPU figures of docs/numbers again, each by the command that its file holds (run by `make numbers`).

The first group takes about an hour on two otherwise idle cores, `make numbers ALL=1` some hours, and
`python docs/measure.py NAME ...` those named. What was measured on a GPU, or over texts and models that are not in this
repository, stays as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch

from pdllm_rag.bench.machine import describe
from pdllm_rag.models.precision import fastest_dtype

ROOT = Path(__file__).parent.parent
NUMBERS = Path(__file__).parent / "numbers"
FIRST = (
    "prefill",
    "qa",
    "qa_top4",
    "bench_query",
    "bench_prefill",
    "bench_store",
    "anchors_demo",
    "needle_bos",
    "reliability_kill",
    "reliability_flips",
    "reliability_mix",
    "server_load",
    "object_store",
)
# As far as they are known, from the files or by adding up what is in them.
MINUTES = {
    "prefill": 1,
    "qa": 2,
    "qa_top4": 2,
    "bench_prefill": 1,
    "bench_store": 2,
    "anchors_demo": 1,
    "needle_bos": 3,
    "reliability_kill": 4,
    "reliability_flips": 5,
    "reliability_mix": 3,
    "server_load": 8,
    "needle_passkey": 6,
    "needle_demo": 25,
    "ray_prefill": 6,
    "ray_handbook": 4,
}
ELSEWHERE = {
    "retrieval_ablation": "questions of SQuAD and Natural Questions, no part of the repository",
    "refusals_near_misses": "questions of SQuAD, Natural Questions and SQuAD 2.0, no part of the repository",
    "d2f_trials": "questions made from SQuAD and Natural Questions, and adapters of which one is bundled",
    "d2f_bundled": "questions made from SQuAD and Natural Questions, no part of the repository",
    "training_mean": "questions of SQuAD and Natural Questions, and models that are not bundled",
    "autoregressive": "SmolLM2's weights are not in this repository",
    "training_trial_d2f": "the trial's model and adapter are not bundled",
}


def machines(record: dict[str, Any]) -> list[Any]:
    """The machines that a file names: its own, or those of its results."""
    results = record.get("results", [record.get("result")])
    found = [record.get("machine"), *(result.get("machine") for result in results if isinstance(result, dict))]
    return [machine for machine in found if machine]


def commands(record: dict[str, Any]) -> list[str]:
    """The commands that made a file, in the order of its results."""
    return record["commands"] if "commands" in record else [record["command"]]


def read(name: str) -> dict[str, Any]:
    return json.loads((NUMBERS / f"{name}.json").read_text())


def on_cpu() -> Iterator[str]:
    """The files that can be made again here: the first group, then the others."""
    for name in [*FIRST, *sorted({path.stem for path in NUMBERS.glob("*.json")} - {*FIRST, *ELSEWHERE})]:
        if "NVIDIA" not in str(machines(read(name))):
            yield name


def measure(name: str, store: Path) -> None:
    """Run what made a file, over a store of the handbook that is made if it has to be, and write it anew."""
    path = NUMBERS / f"{name}.json"
    made_by = commands(read(name))
    if "--store" in made_by[0] and name != "prefill" and not store.exists():
        run(*commands(read("prefill")), store)
    print(f"{name}: {MINUTES.get(name, 'unknown')} minutes", file=sys.stderr)
    if "--json" in made_by[0]:
        results = [json.loads(run(command, store)) for command in made_by]
        record = {"results": results} if len(results) > 1 else {"result": results[0]}
    else:  # a script that writes the whole file; those among the examples know where
        (command,) = made_by
        run(command if "examples/" in command else f"{command} --out {shlex.quote(str(path))}", store)
        record = read(name)
    head: dict[str, Any] = {"commands": made_by} if len(made_by) > 1 else {"command": made_by[0]}
    head["date"] = date.today().isoformat()
    if not machines(record):
        dtype = str(fastest_dtype(torch.device("cpu"))).removeprefix("torch.")  # no command names another
        head["machine"] = describe()._asdict() | {"dtype": dtype}
    path.write_text(json.dumps({**head, **record, **head}, indent=1) + "\n")


def run(command: str, store: Path) -> str:
    """What a command prints, over this store instead of the one that it names."""
    print(command, file=sys.stderr, flush=True)
    words = shlex.split(re.sub(r"--store \S+", f"--store {shlex.quote(str(store))}", command))
    settings = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    program, *arguments = words[len(settings) :]
    done = subprocess.run(
        [sys.executable, *(["-m", "pdllm_rag.cli"] if program == "pdllm" else []), *arguments],
        cwd=ROOT,
        env={**os.environ, **settings},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of files; none: the first group")
    parser.add_argument("--all", action="store_true", help="every file that can be made here")
    given = parser.parse_args()
    possible = list(on_cpu())
    if unknown := set(given.names) - set(possible):
        parser.error(f"{', '.join(sorted(unknown))}: cannot be made here; these can: {', '.join(possible)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in given.names or (possible if given.all else FIRST):
            measure(name, Path(folder) / "kb")


if __name__ == "__main__":
    main()
