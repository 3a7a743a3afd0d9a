"""What one checkpoint is: its family, its ids and its shape, checked against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdllm_rag.errors import ModelFormatError, UnknownModelError
from pdllm_rag.models.families import FAMILIES, Family, family_of
from pdllm_rag.models.layout import library_config
from pdllm_rag.models.tokenizer import Tokenizer

MAX_UNUSED_ROWS = 1024  # of an embedding that was padded for speed; more mean another model's tokenizer

_SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class ModelSpec:
    """Ids and shape of a checkpoint.

    Attributes:
        eos_ids: ids that end an answer.
        vocab_size: rows of the embedding; ids from `n_tokens` on are never produced.
        library_config: config.json under the library's names.
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
    library_config: Mapping[str, Any] = field(repr=False, compare=False)

    @classmethod
    def from_files(cls, name: str, config: Mapping[str, Any], tokenizer: Tokenizer) -> ModelSpec:
        """Read a spec from config.json and the tokenizer.

        Raises:
            UnknownModelError: no family knows this kind of checkpoint.
            ModelFormatError: config and tokenizer disagree, or an id is missing or out of range.
        """
        try:
            family = family_of(config)
            library = library_config(family, config) if family else {}
        except ValueError as error:
            raise ModelFormatError(f"model {name!r}: {error}") from error
        if family is None:
            known = ", ".join(
                "+".join((f.model_type, *f.architectures[:1], *f.required_keys)) + f" ({f.name})" for f in FAMILIES
            )
            raise UnknownModelError(
                f"model {name!r} has model_type {config.get('model_type')!r} and architectures "
                f"{config.get('architectures')}; supported are: {known}; to add a family, add an entry to "
                "pdllm_rag.models.families.FAMILIES (docs/models.md)"
            )
        mask_id = _mask_id(name, family, config, tokenizer)
        bos_id = _bos_id(name, family, config, tokenizer)
        eos_ids = _eos_ids(name, family, config, tokenizer)
        absent = [key for key in _SHAPE if not isinstance(library.get(key), int)]
        if absent:
            raise ModelFormatError(f"model {name!r}: config.json lacks whole numbers for {', '.join(absent)}")
        vocab_size = int(library["vocab_size"])
        if not vocab_size - MAX_UNUSED_ROWS <= tokenizer.size <= vocab_size:
            raise ModelFormatError(
                f"model {name!r}: the tokenizer has {tokenizer.size} tokens and config.json {vocab_size} rows; "
                f"expected at most {MAX_UNUSED_ROWS} fewer tokens than rows and no more. It is another model's"
            )
        for kind, token_id in (("mask", mask_id), ("bos", bos_id), *(("eos", e) for e in eos_ids)):
            if not 0 <= token_id < tokenizer.size:
                raise ModelFormatError(
                    f"model {name!r}: {kind} id is {token_id}, expected 0..{tokenizer.size - 1} (vocabulary); "
                    "config.json and the tokenizer do not belong together"
                )
        if mask_id == bos_id or mask_id in eos_ids:
            raise ModelFormatError(f"model {name!r}: mask id {mask_id} is also bos or eos; expected an id of its own")
        n_heads = int(library["num_attention_heads"])
        return cls(
            name=name,
            family=family,
            mask_id=mask_id,
            bos_id=bos_id,
            eos_ids=eos_ids,
            n_layers=int(library["num_hidden_layers"]),
            n_heads=n_heads,
            n_kv_heads=int(library.get("num_key_value_heads") or n_heads),
            head_dim=int(library.get("head_dim") or library["hidden_size"] // n_heads),
            vocab_size=vocab_size,
            n_tokens=tokenizer.size,
            logit_shift=bool(config.get("logit_shift", family.logit_shift)),
            library_config=library,
        )


def _mask_id(name: str, family: Family, config: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    if family.mask_token is None:
        return _agreed(name, "mask", config.get("mask_token_id"), tokenizer.special_id("mask_token"))
    expected = tokenizer.token_id(family.mask_token)
    declared = (config.get("mask_token_id"), tokenizer.special_id("mask_token"))
    if expected is None or any(token_id not in (None, expected) for token_id in declared):
        texts = [None if token_id is None else tokenizer.token(token_id) for token_id in declared]
        raise ModelFormatError(
            f"model {name!r}: family {family.name} has the mask {family.mask_token!r}, id {expected} in the tokenizer, "
            f"but config.json says {declared[0]} ({texts[0]!r}) and the tokenizer's mask_token is {declared[1]} "
            f"({texts[1]!r}); expected one id. The tokenizer or config.json is another model's"
        )
    return expected


def _bos_id(name: str, family: Family, config: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    own = tokenizer.special_id("bos_token")
    declared = None if family.bos_from_tokenizer and own is not None else config.get("bos_token_id")
    return _agreed(name, "bos", declared, own)


def _eos_ids(name: str, family: Family, config: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    declared = config.get("eos_token_id")
    ids = list(declared) if isinstance(declared, (list, tuple)) else [declared]
    ids += [tokenizer.special_id("eos_token"), *map(tokenizer.token_id, family.stop_tokens)]
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
