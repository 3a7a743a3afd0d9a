"""From a model's name to its folder: bundled, local, or a snapshot of a hub repository.

Of a repository only data is fetched: safetensors, JSON, tokenizer files, templates, licence and card; no code, no
pickle.
`HF_HOME`, `HF_HUB_OFFLINE`, `HF_TOKEN` and the rest of huggingface_hub's settings hold.
"""

from __future__ import annotations

import re
from pathlib import Path

from pdllm_rag.errors import UnknownModelError

BUNDLED = {"demo": Path(__file__).parent / "demo"}
BUNDLED_ADAPTERS = {"demo-d2f": Path(__file__).parent / "demo_d2f"}  # for the canvas rows of "demo"

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SMALL = ["*.json", "merges.txt", "*.jinja", "LICENSE*", "README.md"]


def locate(name: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """Folder of a bundled model or adapter, of a local checkpoint or adapter, or of a hub repository's snapshot.

    Args:
        revision: branch, tag or commit of a hub repository; None takes its main branch.
        weights: also fetch the weights of a hub repository.

    Raises:
        UnknownModelError: none of them, or the hub does not give it.
    """
    if name in BUNDLED or name in BUNDLED_ADAPTERS:
        return (BUNDLED | BUNDLED_ADAPTERS)[name]
    folder = Path(name).expanduser()
    if any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        return folder
    if folder.exists() or not _ID.fullmatch(name):
        raise UnknownModelError(
            f"model {name!r} is neither a bundled model ({', '.join(sorted(BUNDLED))}) or adapter "
            f"({', '.join(sorted(BUNDLED_ADAPTERS))}) nor a folder with config.json or adapter_config.json nor an "
            "id like owner/name; name the bundled one, a checkpoint's folder or an id"
        )
    return _snapshot(name, revision, [*_SMALL, "*.safetensors"] if weights else _SMALL)


def _snapshot(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()
        raise UnknownModelError(
            f"model {name!r} (revision {revision or 'main'}) is no folder here and does not come from the hub: "
            f"{type(error).__name__}: {reason[0] if reason else 'no reason given'}; check the id, the network, "
            "HF_HUB_OFFLINE, and HF_TOKEN if the model is gated"
        ) from error
