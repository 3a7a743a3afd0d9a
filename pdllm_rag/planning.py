"""What a corpus costs: bytes, hours of prefill and time per question, from unit costs that were measured.

`unit_costs.json` has the costs, each with the figure of docs/numbers that it is; `FORMULAS` says how they are put
together. It is arithmetic: a machine of another kind is as many times off as it is faster or slower.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from math import ceil
from typing import Any, NamedTuple

from pdllm_store import KVDtype, ModelFingerprint
from pdllm_store.environment import MAP_SIZE

MODELS = ("demo", "dream", "llada")
CORPORA = (10**6, 10**7, 10**8, 10**9)  # chunks, of the questions' table
ACCELERATORS = (1, 2, 4, 8, 16, 64, 256)  # of the prefill's table

FORMULAS = (
    "chunks = documents x ceil(tokens a document / (chunk length - 1)); each has a BOS row more",
    "rows kept = rows, or at most --keep of a chunk; bytes = rows kept x bytes a token of the stored dtype",
    "prefill seconds = rows / (tokens/s x accelerators), or, if longer, bytes / (bytes/s of a writer x writers)",
    "loading = candidates x bytes a chunk / bytes/s of the tier",
    "first stage = chunks x ms a chunk / shards, with as many shards as keep it within the scoring's time",
)


class Prefill(NamedTuple):
    """Hours with so many accelerators: by computing alone, with all into one store, and with a store for each."""

    accelerators: int
    computing: float
    one_store: float
    store_each: float


class Tier(NamedTuple):
    """Where a store may lie: hosts that hold it, None where it is not bounded; ms to load a question's candidates."""

    name: str
    hosts: int | None
    load_ms: float
    measured: bool


class Query(NamedTuple):
    """A question over so many chunks, its candidates' KV on NVMe; ms."""

    chunks: int
    shards: int  # of the first stage's index
    first_stage: float
    draft: float
    score: float
    load: float
    decode: float
    total: float


@dataclass(frozen=True)
class Plan:
    """What a corpus costs with one model's shape.

    Attributes:
        device: of the unit costs; an accelerator of the tables.
        tokens: rows encoded, BOS included.
        stores: of LMDB that hold the bytes, each with the map that it has by default.
        accelerator_seconds: of computing, for all documents.
        sources: of each unit cost; the assumed ones say so.
    """

    model: str
    device: str
    kv_dtype: KVDtype
    keep: int | None
    documents: int
    tokens_per_document: int
    chunks: int
    tokens: int
    bytes_per_token: int
    bytes: int
    stores: int
    bytes_per_million_documents: int
    accelerator_seconds: float
    accelerator_seconds_per_million_documents: float
    prefill: list[Prefill]
    tiers: list[Tier]
    queries: list[Query]
    sources: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """The stable JSON form."""
        tables = {name: [row._asdict() for row in getattr(self, name)] for name in ("prefill", "tiers", "queries")}
        return {**asdict(self), **tables, "formulas": list(FORMULAS)}


def make_plan(
    documents: int,
    tokens_per_document: int,
    model: str,
    *,
    kv_dtype: KVDtype = "bfloat16",
    keep: int | None = None,
    accelerators: int | None = None,
) -> Plan:
    """Plan for so many documents of so many tokens (BOS rows left out).

    Args:
        model: one of `MODELS`.
        keep: most rows of a chunk that are stored, None for all.
        accelerators: the only row of the prefill's table; None takes several.

    Raises:
        ValueError: an unknown model.
    """
    if model not in MODELS:
        raise ValueError(f"model is {model!r}, expected one of {', '.join(MODELS)}: their unit costs were measured")
    costs = unit_costs()
    own, first_stage = costs["models"][model], costs["first_stage_ms"]
    chunks_each = ceil(tokens_per_document / (own["chunk_len"] - 1))
    n_chunks, n_tokens = documents * chunks_each, documents * (tokens_per_document + chunks_each)
    rows = ceil(n_tokens / n_chunks)  # of a chunk on average
    per_token = _shape(own["shape"], kv_dtype).bytes_per_token
    stored = n_tokens if keep is None or keep >= rows else keep * n_chunks
    n_bytes = stored * per_token
    seconds = n_tokens / own["prefill_tokens_per_s"]["value"]
    writing = n_bytes / (own["write_gb_per_s"]["value"] * 1e9)
    candidate_bytes = own["candidates"] * n_bytes / n_chunks
    tiers = []
    for name, tier in costs["tiers"].items():
        read = own["read_ms"].get(name)
        ms_per_byte = read["value"] / read["bytes"] if read else 1000 / tier["bytes_per_s"]
        hosts = ceil(n_bytes / tier["bytes_a_host"]) if tier["bytes_a_host"] else None
        tiers.append(Tier(name, hosts, candidate_bytes * ms_per_byte, measured=read is not None))
    load = next(tier.load_ms for tier in tiers if tier.name == "nvme")
    draft, score, decode = (own[f"{name}_ms"]["value"] for name in ("draft", "score", "decode"))
    queries = []
    for n in CORPORA:
        searching = n * first_stage["value"] / first_stage["chunks"]
        shards = ceil(searching / score)
        parts = (searching / shards, draft, score, load, decode)
        queries.append(Query(n, shards, *parts, total=sum(parts)))
    return Plan(
        model=model,
        device=own["device"],
        kv_dtype=kv_dtype,
        keep=keep,
        documents=documents,
        tokens_per_document=tokens_per_document,
        chunks=n_chunks,
        tokens=n_tokens,
        bytes_per_token=per_token,
        bytes=n_bytes,
        stores=ceil(n_bytes / MAP_SIZE),
        bytes_per_million_documents=n_bytes * 10**6 // documents,
        accelerator_seconds=seconds,
        accelerator_seconds_per_million_documents=seconds * 1e6 / documents,
        prefill=[
            Prefill(n, seconds / n / 3600, max(seconds / n, writing) / 3600, max(seconds, writing) / n / 3600)
            for n in ((accelerators,) if accelerators else ACCELERATORS)
        ],
        tiers=tiers,
        queries=queries,
        sources=_sources(own, costs),
    )


def unit_costs() -> dict[str, Any]:
    """The content of `unit_costs.json`."""
    content: dict[str, Any] = json.loads((files("pdllm_rag") / "unit_costs.json").read_text(encoding="utf-8"))
    return content


def _sources(own: dict[str, Any], costs: dict[str, Any]) -> dict[str, str]:
    named = {"first_stage_ms": costs["first_stage_ms"], **own, **{f"read_{k}_ms": v for k, v in own["read_ms"].items()}}
    measured = {name: cost["source"] for name, cost in named.items() if isinstance(cost, dict) and "source" in cost}
    assumed = {name: f"assumed: {tier['assumed']}" for name, tier in costs["tiers"].items() if "assumed" in tier}
    return {**measured, **assumed}


def _shape(shape: dict[str, int], kv_dtype: KVDtype) -> ModelFingerprint:
    """Enough of a fingerprint to know the bytes of a token."""
    return ModelFingerprint("", "", "", "", **shape, rope="", kv_dtype=kv_dtype, bos_id=0, prefill_mask="")
