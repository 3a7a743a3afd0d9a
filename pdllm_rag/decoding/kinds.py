"""The decoders that can be asked for by name: what each takes, what it cannot go with, what it is not meant for.

To add one, add an entry to `KINDS`, its name to the command line's choices (cli/options.py), and a line to the contract
tests (tests/test_decoder_contract.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from pdllm_rag.decoding import block_causal, d2f, fast_dllm
from pdllm_rag.decoding.base import Decoder
from pdllm_rag.decoding.denoise import CommitRule
from pdllm_rag.decoding.dyllm import DyLLMDecoder, DyLLMOptions
from pdllm_rag.decoding.options import Asked, read_options, reads_no_kv
from pdllm_rag.decoding.pipeline import D2FOptions
from pdllm_rag.decoding.static_kv import StaticKVDecoder, StaticKVOptions
from pdllm_rag.decoding.vanilla import VanillaDecoder, VanillaOptions
from pdllm_rag.errors import UnfitModelError
from pdllm_rag.models.loader import LoadedModel

logger = logging.getLogger(__name__)

# A question makes a decoder of its own, so that a log would hold a caution as often as there are questions.
_told: WeakKeyDictionary[LoadedModel, set[tuple[str, str]]] = WeakKeyDictionary()


class DecoderType(Protocol):
    """A decoder's class."""

    name: str

    def __call__(self, model: LoadedModel, rule: CommitRule, options: Any, /) -> Decoder:
        """A decoder for one model."""
        ...


def _nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class Kind:
    """One kind of decoder.

    Attributes:
        decoder: its class, with a `name`.
        options: its frozen dataclass of options (see `options.read_options`).
        clash: why it, with its options, cannot go with what else is asked, or None.
        why_not: why it cannot run on a model, or None.
        caution: why it, with its options, runs on a model and was not made for it, or None.
    """

    decoder: DecoderType
    options: type[Any]
    clash: Callable[[Asked, Any], str | None] = _nothing
    why_not: Callable[[LoadedModel], str | None] = _nothing
    caution: Callable[[LoadedModel, Any], str | None] = _nothing


KINDS: dict[str, Kind] = {
    kind.decoder.name: kind
    for kind in (
        Kind(StaticKVDecoder, StaticKVOptions),
        Kind(VanillaDecoder, VanillaOptions, clash=reads_no_kv),
        Kind(fast_dllm.FastDLLMDecoder, fast_dllm.FastDLLMOptions, fast_dllm.clash, fast_dllm.why_not),
        Kind(DyLLMDecoder, DyLLMOptions),
        Kind(d2f.D2FDecoder, D2FOptions, caution=d2f.caution),
        Kind(block_causal.BlockCausalDecoder, block_causal.BlockCausalOptions, why_not=block_causal.why_not),
    )
}


def check(name: str, options: Mapping[str, Any], asked: Asked) -> None:
    """Refuse a decoder's options, or what it cannot go with.

    Raises:
        ValueError: no such decoder, an option it has not, a bad value, or a clash.
    """
    if name not in KINDS:
        raise ValueError(f"decoder is {name!r}; expected one of {', '.join(KINDS)}")
    kind = KINDS[name]
    chosen = read_options(name, kind.options, options)
    if reason := kind.clash(asked, chosen):
        raise ValueError(f"decoder {name!r}: {reason}")


def make_decoder(name: str, model: LoadedModel, rule: CommitRule, options: Mapping[str, Any]) -> Decoder:
    """The decoder of that name for a model; tells once of a model that it was not made for.

    Raises:
        ValueError: bad options; UnfitModelError: it cannot run on the model.
    """
    kind = KINDS[name]
    chosen = read_options(name, kind.options, options)
    if reason := kind.why_not(model):
        raise UnfitModelError(f"decoder {name!r} does not run on {model.spec.name}: {reason}")
    reason = kind.caution(model, chosen)
    if reason and (name, reason) not in _told.setdefault(model, set()):
        _told[model].add((name, reason))
        logger.warning("decoder %r is not meant for %s: %s", name, model.spec.name, reason)
    return kind.decoder(model, rule, chosen)
