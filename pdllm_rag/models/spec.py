"""What one checkpoint is: its family, its ids and its shape, checked against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdllm_rag.errors import ModelFormatError, UnknownModelError
from pdllm_rag.models.families import FAMILIES, Family, family_of
from pdllm_rag.models.tokenizer import Tokenizer

_SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class ModelSpec:
    """Ids and shape of a checkpoint.

    Attributes:
        eos_ids: ids that end an answer.
        vocab_size: rows of the embedding; ids from `n_tokens` on are never produced.
    """

    name: str
    family: Family
    mask_id: int
    bos_id: int
    eos_ids: tuple[int, ...]
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    n_tokens: int
    logit_shift: bool

    @classmethod
    def from_files(cls, name: str, config: Mapping[str, Any], tokenizer: Tokenizer) -> ModelSpec:
        """Read a spec from config.json and the tokenizer.

        Raises:
            UnknownModelError: no family knows this kind of checkpoint.
            ModelFormatError: config and tokenizer disagree, or an id is missing or out of range.
        """
        family = family_of(config)
        if family is None:
            known = ", ".join(f"{f.model_type} with {'+'.join(f.required_keys)} ({f.name})" for f in FAMILIES)
            raise UnknownModelError(
                f"model {name!r} has model_type {config.get('model_type')!r}; supported are: {known}. "
                "To add a family, add an entry to pdllm_rag.models.families.FAMILIES"
            )
        mask_id = _agreed(name, "mask", config.get("mask_token_id"), tokenizer.special_id("mask_token"))
        bos_id = _agreed(name, "bos", config.get("bos_token_id"), tokenizer.special_id("bos_token"))
        eos_ids = _eos_ids(name, config, tokenizer)
        absent = [key for key in _SHAPE if not isinstance(config.get(key), int)]
        if absent:
            raise ModelFormatError(f"model {name!r}: config.json lacks whole numbers for {', '.join(absent)}")
        vocab_size = int(config["vocab_size"])
        n_tokens = min(vocab_size, tokenizer.size)
        for kind, token_id in (("mask", mask_id), ("bos", bos_id), *(("eos", e) for e in eos_ids)):
            if not 0 <= token_id < n_tokens:
                raise ModelFormatError(
                    f"model {name!r}: {kind} id is {token_id}, expected 0..{n_tokens - 1} (vocabulary); "
                    "config.json and the weights do not belong together"
                )
        if mask_id == bos_id or mask_id in eos_ids:
            raise ModelFormatError(f"model {name!r}: mask id {mask_id} is also bos or eos; expected an id of its own")
        n_heads = int(config["num_attention_heads"])
        return cls(
            name=name,
            family=family,
            mask_id=mask_id,
            bos_id=bos_id,
            eos_ids=eos_ids,
            n_layers=int(config["num_hidden_layers"]),
            n_heads=n_heads,
            n_kv_heads=int(config.get("num_key_value_heads") or n_heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // n_heads),
            vocab_size=vocab_size,
            n_tokens=n_tokens,
            logit_shift=bool(config.get("logit_shift", family.logit_shift)),
        )


def _eos_ids(name: str, config: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    declared = config.get("eos_token_id")
    ids = list(declared) if isinstance(declared, (list, tuple)) else [declared]
    ids.append(tokenizer.special_id("eos_token"))
    known = tuple(dict.fromkeys(int(i) for i in ids if i is not None))
    if not known:
        raise ModelFormatError(f"model {name!r}: no eos id in config.json or the tokenizer; expected at least one")
    return known


def _agreed(name: str, kind: str, from_config: int | None, from_tokenizer: int | None) -> int:
    found = {i for i in (from_config, from_tokenizer) if i is not None}
    if len(found) != 1:
        raise ModelFormatError(
            f"model {name!r}: {kind} id is {from_config} in config.json and {from_tokenizer} in the tokenizer; "
            "expected one id. Correct the file that is wrong"
        )
    return int(found.pop())
