"""The model card of a trained folder: README.md, with the front matter that the Hugging Face hub reads.

- nothing is guessed: a licence is the base's own, sources are what the user names, a score is a report's (`scores`);
- files and folders are named without where they lie.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import blake3
from safetensors import safe_open

from pdllm_rag.front_matter import parted
from pdllm_rag.models import packed
from pdllm_rag.models.hub import locate
from pdllm_rag.models.loader import read_spec, weight_files, weights_digest
from pdllm_rag.models.vocabulary import read_json
from pdllm_rag.training.texts.corpus import Corpus, data_files

logger = logging.getLogger(__name__)

README, SCORES = "README.md", "## Scores"
KINDS = {
    "adapt": "A masked-diffusion language model that reads chunks which were encoded on their own (`--model`).",
    "chunk-lora": "A LoRA adapter on every row, for chunks that were encoded on their own (`--adapter`).",
    "d2f": "A D2F adapter (LoRA) on the rows of question and answer (`--canvas-adapter`).",
    "round": "The mean of the checkpoints below, rounded to 4 bits (`--model`).",
    "prune": "A checkpoint to begin training with, cut out of the one below; nothing was trained.",
}
_WRITTEN = "Written by `pdllm train`"
_DATASET = re.compile(r"https://huggingface\.co/datasets/([\w.-]+/[\w.-]+)")
_SOURCES = 'a list such as [{"name": "SQuAD", "licence": "CC BY-SA 4.0", "url": "https://..."}], the url optional'


class Base(NamedTuple):
    """A checkpoint that was begun from: ids that the hub may know it by, and what its card says of its licence."""

    name: str
    digest: str
    ids: tuple[str, ...]
    licence: dict[str, Any]

    @classmethod
    def of(cls, model: str) -> Base:
        """Read it. Raises as `locate`, and UnreadableDocumentError for a card whose front matter is damaged."""
        folder = locate(model)
        readme = folder / README
        front = parted(readme.read_text(encoding="utf-8"), str(readme))[0] if readme.is_file() else {}
        name = folder.resolve().name if Path(model).expanduser().exists() else model
        known = name if "/" in name else front.get("base_model") or []
        ids = tuple(map(str, known if isinstance(known, list) else [known]))
        licence: dict[str, Any] = {"license": front.get("license") or "unknown"}
        licence |= {key: front[key] for key in ("license_name", "license_link") if key in front}
        return cls(name, digest_of(folder), ids, licence)


@dataclass(frozen=True)
class Origin:
    """What a result is made from, read before it is made.

    Attributes:
        kind: of `KINDS`.
        command: the words of a command line that does it again.
        data: name, samples and BLAKE3 of each file.
        sources: of the data, as `read_sources` gives them; none: not given.
    """

    kind: str
    command: tuple[str, ...]
    bases: tuple[Base, ...]
    data: tuple[tuple[str, int, str], ...] = ()
    sources: tuple[dict[str, str], ...] = ()


def read_data(paths: Sequence[str]) -> tuple[tuple[str, int, str], ...]:
    """Name, samples and BLAKE3 of each file of training data. Raises as `Corpus.read`."""
    return tuple(
        (file.name, Corpus.read([file]).n_samples, blake3.blake3(file.read_bytes()).hexdigest())
        for file in data_files(paths)
    )


def read_sources(path: Path) -> tuple[dict[str, str], ...]:
    """Where the data is from: name, licence and, where there is one, url.

    Raises:
        OSError, ValueError: it is no JSON list of such objects.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); expected {_SOURCES}") from error
    for one in found if isinstance(found, list) else [None]:
        texts = one if isinstance(one, dict) and all(isinstance(text, str) for text in one.values()) else {}
        if not {"name", "licence"} <= texts.keys() <= {"name", "licence", "url"}:
            raise ValueError(f"{path} holds {json.dumps(one or found)[:80]}; expected {_SOURCES}")
    return tuple(found)


def write_card(folder: Path, origin: Origin, settings: Mapping[str, Any], log: Path | None = None) -> None:
    """Write the card of the model or adapter in `folder`; one that somebody else has written is left as it is.

    Args:
        settings: the recipe's, by name.
        log: of the run, for its last losses.
    """
    path = folder / README
    if path.is_file() and _WRITTEN not in path.read_text(encoding="utf-8"):
        logger.warning("%s was not written by this command and is left as it is", path)
        return
    import yaml

    bases = [(base.name, base.licence["license"], base.digest) for base in origin.bases]
    parts = [
        f"# {(folder.parent if folder.name in ('result', 'start') else folder).resolve().name}",
        f"{KINDS[origin.kind]} {_WRITTEN}: what it does not say is not known.",
        table(("", ""), {**_shape(folder, origin.kind), **_losses(log)}.items()),
        "## Base\n\n" + table(("base", "licence", "BLAKE3 of weights and config"), bases),
        "## Recipe\n\n" + table(("setting", "value"), settings.items()),
        f"```\n{shlex.join(origin.command)}\n```",
        "## Data\n\n" + (_data(origin) if origin.data else "None."),
        "## Versions\n\n" + table(("package", "version"), _versions()),
        f"{SCORES}\n\nNone yet: `pdllm train card FOLDER --scores FILE.json` puts them here.",
    ]
    head = yaml.safe_dump(_front(origin, read_json(folder / "adapter_config.json"), settings), sort_keys=False)
    path.write_text(f"---\n{head}---\n\n" + "\n\n".join(parts) + "\n", encoding="utf-8")


def digest_of(folder: Path) -> str:
    """Digest of a checkpoint's weights, as stored KV is bound to it."""
    return weights_digest(weight_files(folder), read_json(folder / "config.json"))


def nameable(word: str) -> str:
    """A model's name, or a word of a command line, its path cut to the last part; a hub id stays."""
    option, equals, name = word.rpartition("=")
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not Path(name).exists()
    return f"{option}{equals}{name if is_id or '/' not in name else Path(name).name}"


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    cells = [[" ".join(str(cell).replace("|", "\\|").split()) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(headers), ["---"] * len(headers), *cells])


def _front(origin: Origin, adapter: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    licences = [base.licence for base in origin.bases]
    front: dict[str, Any] = (
        dict(licences[0]) if licences.count(licences[0]) == len(licences) else {"license": "unknown"}
    )
    if ids := sorted({one for base in origin.bases for one in base.ids}):
        front["base_model"] = ids[0] if len(ids) == 1 else ids
    if datasets := [found[1] for one in origin.sources if (found := _DATASET.match(one.get("url", "")))]:
        front["datasets"] = datasets
    front["library_name"] = "peft" if adapter and settings["rounding"] == "none" else "pdllm-rag"
    front["pipeline_tag"] = "text-generation"
    return {**front, "tags": ["masked-diffusion", *(["lora"] if adapter else [])]}


def _data(origin: Origin) -> str:
    sources = [(one["name"], one["licence"], one.get("url", "")) for one in origin.sources]
    told = table(("source", "licence", "where"), sources) if sources else "Sources and their licences were not given."
    return table(("file", "samples", "BLAKE3"), origin.data) + f"\n\n{told}"


def _shape(folder: Path, kind: str) -> dict[str, Any]:
    adapter = read_json(folder / "adapter_config.json")
    files = [folder / "adapter_model.safetensors"] if adapter else weight_files(folder)
    spec = read_spec(adapter["base_model_name_or_path"] if adapter else str(folder))[0]
    heads = f"{spec.n_heads} query and {spec.n_kv_heads} key heads of {spec.head_dim}"
    hidden = f"hidden {spec.library_config['hidden_size']}, vocabulary {spec.vocab_size:,}"
    found = {"kind": kind, "family": spec.family.name, "shape": f"{spec.n_layers} layers, {heads}, {hidden}"}
    if adapter:
        modules = ", ".join(adapter["target_modules"])
        found["adapter"] = f"rank {adapter['r']}, alpha {adapter['lora_alpha']}, on {modules}"
    else:
        found["BLAKE3 of weights and config"] = digest_of(folder)
    n_bytes = sum(file.stat().st_size for file in files)
    return {**found, "parameters": f"{sum(map(_n_parameters, files)):,}", "bytes of weights": f"{n_bytes:,}"}


def _n_parameters(file: Path) -> int:
    """Of the values that the stored ones stand for: scales of rounded matrices do not count."""
    with safe_open(file, "pt") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    return sum(
        math.prod(shape) * (2 if name.endswith(packed.SUFFIX) else 1)
        for name, shape in shapes.items()
        if not (name.endswith("_scale") and name.removesuffix("_scale") in shapes)
    )


def _losses(log: Path | None) -> dict[str, Any]:
    """The last of each kind in a run's log."""
    if log is None:
        return {}
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    last = {key: value for line in lines for key, value in line.items()}
    return {
        "last training loss": last["loss"],
        "last validation loss": last.get("validation_loss", "none: no text was held out"),
    }


def _versions() -> Iterator[tuple[str, str]]:
    yield "Python", platform.python_version()
    for name in ("pdllm-rag", "torch", "transformers", "safetensors", "peft"):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
