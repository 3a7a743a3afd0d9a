"""`pdllm models`: which models there are, what one of them is, and fetching one. No weights are loaded."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pdllm_rag.cli.console import (
    byte_size,
    counted,
    fact_table,
    kib,
    print_table,
    results,
    table,
    visible,
    write_json,
)
from pdllm_rag.cli.opening import add_store, is_store_given, open_store

if TYPE_CHECKING:
    from pdllm_rag.models.spec import ModelSpec


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its subcommands."""
    parser = commands.add_parser(
        "models",
        help="list models, describe one, fetch one",
        description="List the models there are, describe one, or fetch one. No weights are loaded.",
    )
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    listing = actions.add_parser("list", help="list bundled models and supported families")
    listing.set_defaults(run=_list)
    info = actions.add_parser("info", help="describe a model from its config and tokenizer")
    info.add_argument("name", metavar="NAME", help="bundled model, checkpoint folder or hub id")
    add_store(info, help="also count this store's documents of the model", required=False, may_read_only=True)
    info.set_defaults(run=_info)
    pull = actions.add_parser(
        "pull",
        help="fetch a model from the Hugging Face hub",
        description="Fetch config, tokenizer and safetensors weights of a hub repository into the hub's cache, and "
        "check that they are of a supported family. No code and no pickle is fetched.",
    )
    pull.add_argument("name", metavar="NAME", help="hub id, such as GSAI-ML/LLaDA-8B-Instruct")
    pull.add_argument("--revision", metavar="REV", help="branch, tag or commit (default: the main branch)")
    pull.set_defaults(run=_pull)
    for action in (listing, info, pull):
        action.add_argument("--json", action="store_true", help="print one JSON object")


def _list(args: argparse.Namespace) -> int:
    from pdllm_rag.models.families import FAMILIES
    from pdllm_rag.models.loader import BUNDLED, read_spec

    bundled = {name: read_spec(name)[0].family for name in sorted(BUNDLED)}
    if args.json:
        write_json(
            {
                "bundled": [
                    {"name": name, "family": f.name, "model_type": f.model_type, "licence": f.licence}
                    for name, f in bundled.items()
                ],
                "families": [
                    {"name": f.name, "title": f.title, "model_type": f.model_type, "licence": f.licence}
                    for f in FAMILIES
                ],
            }
        )
        return 0
    console = results()
    models = table("bundled model", "family", "licence")
    for name, family in bundled.items():
        models.add_row(name, family.name, family.licence)
    print_table(console, models)
    console.print()
    families = table("family", "model_type", "title", "licence")
    for family in FAMILIES:
        families.add_row(family.name, family.model_type, family.title, family.licence)
    print_table(console, families)
    console.print()
    console.print("Any checkpoint folder of a supported family will do: --model FOLDER")
    return 0


def _pull(args: argparse.Namespace) -> int:
    from pdllm_rag.models.loader import locate, read_spec, weight_files

    folder = locate(args.name, revision=args.revision)
    spec, _, _ = read_spec(str(folder))
    n_bytes = sum(file.stat().st_size for file in weight_files(folder))
    if args.json:
        write_json({"name": args.name, "family": spec.family.name, "folder": str(folder), "weights_bytes": n_bytes})
    else:
        results().print(f"{visible(args.name)} ({spec.family.name}), {byte_size(n_bytes)} of weights, is in")
        results().print(visible(str(folder)))
    return 0


def _info(args: argparse.Namespace) -> int:
    from pdllm_rag.models.loader import read_spec

    spec, tokenizer, config = read_spec(args.name)
    facts = _facts(spec, tokenizer.digest) | {"weights_bytes": _weights_bytes(args.name)}
    if is_store_given(args):
        facts["store"] = _in_store(args, tokenizer.digest, config)
    if args.json:
        write_json(facts)
    else:
        _show(facts)
    return 0


def _weights_bytes(name: str) -> int | None:
    """Size of the weight files, None where they are not here."""
    from pdllm_rag.models.loader import locate

    files = list(locate(name, weights=False).glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) if files else None


def _facts(spec: ModelSpec, tokenizer_digest: str) -> dict[str, Any]:
    import torch
    from pdllm_store import KV_DTYPES, ModelFingerprint

    from pdllm_rag.models.precision import fastest_dtype

    family = spec.family
    per_token = {
        kv_dtype: ModelFingerprint(
            family=family.name,
            weights_digest="",
            adapter_digest="",
            tokenizer_digest=tokenizer_digest,
            n_layers=spec.n_layers,
            n_kv_heads=spec.n_kv_heads,
            head_dim=spec.head_dim,
            rope="",
            kv_dtype=kv_dtype,
            bos_id=spec.bos_id,
            prefill_mask=family.prefill_mask,
        ).bytes_per_token
        for kv_dtype in KV_DTYPES
    }
    dtype = fastest_dtype(torch.device("cpu"))
    units = "has" if dtype == torch.bfloat16 else "has no"
    return {
        "name": spec.name,
        "family": family.name,
        "title": family.title,
        "model_type": family.model_type,
        "licence": family.licence,
        "n_layers": spec.n_layers,
        "n_heads": spec.n_heads,
        "n_kv_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "mask_id": spec.mask_id,
        "bos_id": spec.bos_id,
        "eos_ids": list(spec.eos_ids),
        "logit_shift": spec.logit_shift,
        "compute_dtype": str(dtype).removeprefix("torch."),
        "compute_dtype_reason": f"this CPU {units} units for bfloat16 (AVX512-BF16 or AMX)",
        "kv_bytes_per_token": per_token,
        "chunk_len": family.chunk_len,
        "max_chunk_len": family.max_chunk_len,
        "context_len": family.context_len,
        "window": family.window,
    }


def _in_store(args: argparse.Namespace, tokenizer_digest: str, config: dict[str, Any]) -> dict[str, Any]:
    """The model's documents in a store."""
    from pdllm_rag.models.loader import locate, weight_files, weights_digest

    with open_store(args) as store:
        digest = weights_digest(weight_files(locate(args.name)), config)
        own = [
            fingerprint
            for fingerprint in store.fingerprints()
            if (fingerprint.weights_digest, fingerprint.tokenizer_digest) == (digest, tokenizer_digest)
        ]
        n_documents = sum(len(store.documents(fingerprint)) for fingerprint in own)
        return {"path": store.path, "weights_digest": digest, "documents": n_documents}


def _show(facts: dict[str, Any]) -> None:
    eos_ids = ", ".join(map(str, facts["eos_ids"]))
    rows = [
        ("model", str(facts["name"])),
        ("family", f"{facts['family']}: {facts['title']}"),
        ("model_type", facts["model_type"]),
        ("licence", facts["licence"]),
        ("weights", "not here" if facts["weights_bytes"] is None else byte_size(facts["weights_bytes"])),
        ("layers", str(facts["n_layers"])),
        (
            "heads",
            f"{facts['n_heads']} query, {facts['n_kv_heads']} key/value, {facts['head_dim']} dims each",
        ),
        ("vocabulary", f"{facts['vocab_size']:,}"),
        ("token ids", f"mask {facts['mask_id']}, BOS {facts['bos_id']}, EOS {eos_ids}"),
        ("logit shift", "row i-1 predicts token i" if facts["logit_shift"] else "none"),
        ("computes in", f"{facts['compute_dtype']}: {facts['compute_dtype_reason']}"),
        ("KV a token", ", ".join(f"{kib(n)} in {dtype}" for dtype, n in facts["kv_bytes_per_token"].items())),
        ("chunk", f"{facts['chunk_len']} tokens, at most {facts['max_chunk_len']}"),
        ("context", f"trained on up to {facts['context_len']:,} tokens, window {facts['window']:,}"),
    ]
    if held := facts.get("store"):
        rows.append(("digest", held["weights_digest"]))
        rows.append(("store", f"{held['path']}, {counted(held['documents'], 'document')} of this model"))
    print_table(results(), fact_table(rows))
