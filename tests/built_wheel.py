"""Look into what `make build` has built, then install the wheel into an empty venv elsewhere and ask it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
MAX_WHEEL_BYTES = 62_000_000
MODELS = [ROOT / "pdllm_rag" / "models" / name for name in ("demo", "demo_d2f")]
IMPORTS = "pdllm_store, langchain_pdllm, llama_index.llms.pdllm, llama_index.retrievers.pdllm, llama_index.core"
TEXT = "The lighthouse of Skerry Point was built in 1871 by Ingrid Halvorsen. Its lamp is lit at dusk."
QUESTION = "Who built the lighthouse of Skerry Point?"


def the_one(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{folder} has {[path.name for path in found]} for {pattern}; expected one: empty it, build")
    return found[0]


def missing_from_wheel(wheel: Path) -> list[str]:
    """Files of the bundled model and adapter, with their sizes, and licence notices that it lacks."""
    with zipfile.ZipFile(wheel) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    model = {path.relative_to(ROOT).as_posix(): path.stat().st_size for folder in MODELS for path in folder.iterdir()}
    licences = ("licenses/LICENSE", "licenses/NOTICE")
    return [name for name, size in model.items() if sizes.get(name) != size] + [
        name for name in licences if not any(held.endswith(f".dist-info/{name}") for held in sizes)
    ]


def missing_from_sdist(sdist: Path) -> list[str]:
    """What pyproject.toml names for it and it lacks."""
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = pyproject["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    return [name for name in wanted if not any(held == name or held.startswith(f"{name}/") for held in names)]


def ask_from_outside(wheel: Path, top: Path) -> dict[str, Any]:
    """What `pdllm ask --json` says in an empty venv in `top`, over one file that was prefilled there."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PDLLM_"))}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(top / "hub")}

    def run(*argv: object) -> str:
        words = [str(word) for word in argv]
        print("+", *words, flush=True)
        done = subprocess.run(words, cwd=top, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout

    run(sys.executable, "-m", "venv", "venv")
    programs = top / "venv" / "bin"
    run(programs / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    run(programs / "python", "-c", f"import {IMPORTS}")
    (top / "lighthouse.txt").write_text(TEXT)
    run(programs / "pdllm", "prefill", "lighthouse.txt", "--store", "kb")
    said: dict[str, Any] = json.loads(run(programs / "pdllm", "ask", QUESTION, "--store", "kb", "--json"))
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path, help="folder with one wheel and one sdist")
    dist = parser.parse_args().dist.resolve()
    wheel, sdist = the_one(dist, "*.whl"), the_one(dist, "*.tar.gz")
    for path in (wheel, sdist):
        print(f"{path.name}: {path.stat().st_size:,} bytes")
    if wheel.stat().st_size > MAX_WHEEL_BYTES:
        raise SystemExit(f"{wheel.name} is larger than {MAX_WHEEL_BYTES:,} bytes")
    if missing := missing_from_wheel(wheel) + missing_from_sdist(sdist):
        raise SystemExit(f"what was built lacks {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as top:
        said = ask_from_outside(wheel, Path(top))
    if not said["answer"] or [cited["doc_id"] for cited in said["citations"]] != ["lighthouse.txt"]:
        raise SystemExit(f"the installed wheel answers {said}; expected an answer out of lighthouse.txt")
    print(f"{QUESTION} {said['answer']}")


if __name__ == "__main__":
    main()
