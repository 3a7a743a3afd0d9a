"""A decoder is chosen by name; its options are checked up front, and what it cannot go with is refused there."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest

from pdllm_rag import AskOptions, LoadedModel
from pdllm_rag.cli import ask
from pdllm_rag.cli.main import build_parser
from pdllm_rag.decoding import StaticKVDecoder, kinds
from pdllm_rag.decoding.kinds import KINDS, Kind
from pdllm_rag.decoding.options import read_options


@dataclass(frozen=True)
class SomeOptions:
    rows: int = 4
    share: float = 0.5
    cache: Literal["prefix", "dual"] = "prefix"
    factor: float | None = None
    eager: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; expected above 0 and up to 1")


class SomeDecoder(StaticKVDecoder):
    name = "some"

    def __init__(self, model: LoadedModel, rule: Any = None, options: SomeOptions = SomeOptions(), **rest: Any) -> None:
        super().__init__(model, rule, **rest)
        self.options = options


@pytest.fixture(autouse=True)
def some(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Kind(
        SomeDecoder,
        SomeOptions,
        clash=lambda asked, _options: "it has no steps" if asked.steps is not None else None,
        why_not=lambda model: "it is causal" if "block" in model.spec.family.prefill_mask else None,
        caution=lambda _model, options: "it was trained eagerly" if not options.eager else None,
    )
    monkeypatch.setitem(KINDS, "some", kind)


def test_options_of_a_decoder_reach_it_with_their_types(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdllm_rag.cli.options.DECODERS", (*KINDS,))
    line = "ask q --store s --decoder some --decoder-option rows=7 --decoder-option share=1 --decoder-option cache=dual"
    line += " --decoder-option factor=1.5 --decoder-option eager=true --policy joint"
    options = ask.options_of(build_parser().parse_args(line.split()))
    decoder = options.make_decoder(tiny_model)
    assert isinstance(decoder, SomeDecoder)
    assert decoder.options == SomeOptions(7, 1, "dual", 1.5, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"colour": 1}, "no option 'colour'; expected one of rows, share, cache, factor, eager"),
        ({"rows": "7"}, "rows of decoder 'some' is '7'; expected a whole number"),
        ({"rows": True}, "rows of decoder 'some' is True; expected a whole number"),
        ({"rows": 7.0}, "expected a whole number"),
        ({"share": "x"}, "share of decoder 'some' is 'x'; expected a number"),
        ({"share": 0}, "share is 0; expected above 0 and up to 1"),
        ({"share": float("nan")}, "expected above 0"),
        ({"cache": "both"}, "expected one of 'prefix', 'dual'"),
        ({"factor": "x"}, "expected a number or None"),
        ({"eager": 1}, "expected True or False"),
        ([("rows", 1)], "expected a mapping"),
    ],
)
def test_wrong_options_are_refused_when_they_are_given(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AskOptions(decoder="some", decoder_options=given)
    assert read_options("some", SomeOptions, {"factor": None}) == SomeOptions()


def test_what_a_decoder_cannot_go_with_is_refused_when_it_is_asked() -> None:
    with pytest.raises(ValueError, match="decoder 'some': it has no steps"):
        AskOptions(decoder="some", steps=3)
    with pytest.raises(ValueError, match="expected one of static_kv, vanilla"):
        AskOptions(decoder="magic")
    with pytest.raises(ValueError, match="decoder 'static_kv' has no option 'x'; expected one of order"):
        AskOptions(decoder_options={"x": 1})
    for changes in ({"policy": "joint"}, {"chunk_rows": 3}):
        with pytest.raises(ValueError, match=r"'vanilla'.*leave"):
            AskOptions(decoder="vanilla").with_changes(changes)
    for changes in ({"policy": "joint"}, {"chunk_rows": 3}, {"placement": "gap"}):
        AskOptions(decoder="fast_dllm", **changes)
        with pytest.raises(ValueError, match="'fast_dllm'"):
            AskOptions(decoder="fast_dllm", decoder_options={"context": "dense"}, **changes)


def test_a_model_that_a_decoder_cannot_run_on_is_refused_and_one_it_is_not_meant_for_is_told(
    tiny_model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    family = replace(tiny_model.spec.family, prefill_mask="block-causal-4")
    causal = replace(tiny_model, spec=replace(tiny_model.spec, family=family))
    with pytest.raises(ValueError, match=r"decoder 'some' does not run on .*: it is causal"):
        AskOptions(decoder="some").make_decoder(causal)
    with caplog.at_level(logging.WARNING):
        AskOptions(decoder="some", decoder_options={"eager": True}).make_decoder(tiny_model)
        assert not caplog.records
        AskOptions(decoder="some").make_decoder(tiny_model)
        assert "decoder 'some' is not meant for" in caplog.text
        assert "it was trained eagerly" in caplog.text
        AskOptions(decoder="some").make_decoder(tiny_model)
        assert len(caplog.records) == 1  # not with every question
        AskOptions(decoder="some").make_decoder(replace(tiny_model))
    assert len(caplog.records) == 2  # but of every model


def test_every_kind_has_its_own_name_and_options_that_are_valid_as_they_come() -> None:
    for name, kind in KINDS.items():
        assert kind.decoder.name == name
        assert read_options(name, kind.options, {}) == kind.options()
        kinds.check(name, {}, AskOptions())
