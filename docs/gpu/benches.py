"""Run the GPU benchmarks one after another (`python docs/gpu/benches.py --out FOLDER [--only NAME ...]`).

Each is a command of its own, `pdllm bench ...`, with a time limit of its own; what it had when it was stopped is kept.
Figures go to FOLDER/NAME.json, pictures to FOLDER/NAME.png, what was printed to FOLDER/NAME.txt. Nothing is downloaded:
models are shapes with random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATHS = (ROOT, ROOT / "store", ROOT / "integrations")
QUICK = ("--heads", "32/8", "--rows", "32", "--context", "8k", "--chunk", "1024", "--against", "sdpa,varlen")

TUNE = ("--tune", "--tune-seconds", "20")

# Name: seconds that it may take, whether it draws, arguments of `pdllm bench`.
BENCHES: dict[str, tuple[int, bool, tuple[str, ...]]] = {
    "quick": (120, False, ("attention", *QUICK)),
    "attention": (580, True, ("attention",)),
    "tuning": (580, False, ("attention", "--against", "sdpa", "--context", "4k,8k,32k", "--chunk", "1024", *TUNE)),
    "prefill-dream": (240, False, ("prefill", "--shape", "dream-7b", "--chunk-len", "1024", "--batch", "16")),
    "prefill-llada": (300, False, ("prefill", "--shape", "llada-8b", "--chunk-len", "1024", "--batch", "4")),
    "decode-dream": (420, True, ("decode", "--shape", "dream-7b", "--context", "8k,16k,32k,128k")),
    "decode-llada": (420, True, ("decode", "--shape", "llada-8b", "--context", "8k,16k,32k")),
}
KEEPS_PARTS = ("attention", "decode")  # benches that write their figures after every part


def main() -> int:
    """Run what was asked for; 1 if something failed or was stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for figures, pictures and what was printed")
    chosen = [name for name in BENCHES if name != "quick"]
    parser.add_argument("--only", nargs="+", choices=tuple(BENCHES), default=chosen, help="default: all but quick")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = [name for name in args.only if not run(name, args.out, args.device)]
    if failed:
        print(f"failed or stopped: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(name: str, out: Path, device: str) -> bool:
    """Run one command; whether it ended well."""
    limit_s, draws, arguments = BENCHES[name]
    command = [sys.executable, "-m", "pdllm_rag.cli", "bench", *arguments, "--device", device]
    if arguments[0] in KEEPS_PARTS:
        command += ["--out", str(out / f"{name}.json")]
    else:
        command += ["--repeat", "3", "--json"]
    if draws:
        command += ["--plot", str(out / f"{name}.png")]
    paths = [str(path) for path in PATHS] + [os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    started = time.perf_counter()
    print(f"== {name}: pdllm {' '.join(command[3:])}", flush=True)
    with (out / f"{name}.txt").open("w") as printed:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT, timeout=limit_s
            )
            status = f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit_s} s"
    text = (out / f"{name}.txt").read_text()
    if arguments[0] not in KEEPS_PARTS and status == "exit status 0":
        found = json.loads(next(line for line in reversed(text.splitlines()) if line.startswith("{")))
        (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(text[-6000:], f"== {name}: {status}, {time.perf_counter() - started:.0f} s", sep="\n", flush=True)
    return status == "exit status 0"


if __name__ == "__main__":
    sys.exit(main())
