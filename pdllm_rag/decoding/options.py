"""Options of one decoder: a frozen dataclass of its own, filled from what a caller or a command line gives."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class Asked(Protocol):
    """What is asked beside the decoder, for it to refuse (`config.AskOptions`)."""

    @property
    def policy(self) -> str: ...
    @property
    def placement(self) -> str: ...
    @property
    def chunk_rows(self) -> int | None: ...
    @property
    def steps(self) -> int | None: ...


def reads_no_kv(asked: Asked, _options: object = None) -> str | None:
    """Why what is asked cannot go with a decoder that encodes chunks and question together, or None."""
    if asked.policy != "independent":
        return (
            f"policy is {asked.policy!r}, but chunks and question are encoded together and there is no cache policy; "
            "leave the policy out, or take decoder 'static_kv'"
        )
    if asked.chunk_rows is not None:
        return "chunk_rows was given, but no stored rows are read; leave it out, or take decoder 'static_kv'"
    return None


def read_options(decoder: str, options: type[T], given: Mapping[str, Any]) -> T:
    """The options of a decoder with these values, the defaults elsewhere.

    Args:
        options: a frozen dataclass whose fields are int, float, bool, str, Literal or any of them or None; it checks
            the range of its values itself.

    Raises:
        ValueError: no such option, a value of another type, or one out of range.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"decoder_options is {given!r}; expected a mapping of names to values")
    known = [field.name for field in fields(options)]  # type: ignore[arg-type]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"decoder {decoder!r} has no option {unknown[0]!r}; expected one of {', '.join(known)}")
    hints = get_type_hints(options)
    for name, value in given.items():
        if not _fits(value, hints[name]):
            raise ValueError(f"{name} of decoder {decoder!r} is {value!r}; expected {_words(hints[name])}")
    try:
        return options(**given)
    except ValueError as error:
        raise ValueError(f"decoder {decoder!r}: {error}") from None


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return any(type(value) is type(one) and value == one for one in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _words(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(one) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(one) for one in get_args(hint))
    if hint is type(None):
        return "None"
    return {bool: "True or False", int: "a whole number", float: "a number", str: "text"}[hint]
