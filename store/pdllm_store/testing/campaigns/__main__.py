"""Run one campaign: `python -m pdllm_store.testing.campaigns kill|flips|mix`. The stores lie in $TMPDIR."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from typing import Any

import lmdb
import torch

from pdllm_store.location import file_system_type
from pdllm_store.testing.campaigns import BrokenGuaranteeError, flips, kill, mix


def main() -> None:
    """Print the figures; exit with 1 and a sentence if a guarantee was broken."""
    parser = argparse.ArgumentParser(prog="python -m pdllm_store.testing.campaigns", description=__doc__)
    commands = parser.add_subparsers(dest="campaign", required=True)
    kill_ = commands.add_parser("kill", help="kill a writer at random moments and check what it left")
    kill_.add_argument("--kills", type=int, default=1000)
    flips_ = commands.add_parser("flips", help="flip single bits of the data file and read everything")
    flips_.add_argument("--flips", type=int, default=5000)
    mix_ = commands.add_parser("mix", help="let several processes read and write the same documents")
    mix_.add_argument("--processes", type=int, default=4)
    mix_.add_argument("--seconds", type=float, default=180.0)
    for command in (kill_, flips_, mix_):
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a pool of threads would not survive the forks
    try:
        _print(_run(arguments), as_json=arguments.json)
    except BrokenGuaranteeError as error:
        if error.figures is not None:
            _print({**error.figures, "broken": str(error).splitlines()}, as_json=arguments.json)
        sys.exit(f"{arguments.campaign}: {error}")


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.campaign == "kill":
        return kill(kills=arguments.kills, seed=arguments.seed)._asdict()
    if arguments.campaign == "flips":
        return flips(flips=arguments.flips, seed=arguments.seed)._asdict()
    return mix(processes=arguments.processes, seconds=arguments.seconds, seed=arguments.seed)._asdict()


def _print(result: dict[str, Any], *, as_json: bool) -> None:
    if not as_json:
        for name, figure in result.items():
            print(f"{name:18} {figure}")
        return
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "file_system": file_system_type(tempfile.gettempdir()),
        "lmdb": ".".join(str(part) for part in lmdb.version()),
        "python": sys.version.split()[0],
    }
    command = f"python -m pdllm_store.testing.campaigns {' '.join(sys.argv[1:])}"
    print(json.dumps({"command": command, "machine": machine, "result": result}, indent=1))


if __name__ == "__main__":
    main()
