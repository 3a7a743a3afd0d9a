"""Decoders: small classes over a shared canvas and pure functions."""

from pdllm_rag.decoding.base import Canvas, Decoder, DecodeRequest, DecodeStep, Sampling
from pdllm_rag.decoding.denoise import CommitRule
from pdllm_rag.decoding.fast_dllm import FastDLLMDecoder
from pdllm_rag.decoding.static_kv import StaticKVDecoder
from pdllm_rag.decoding.vanilla import VanillaDecoder

__all__ = [
    "Canvas",
    "CommitRule",
    "DecodeRequest",
    "DecodeStep",
    "Decoder",
    "FastDLLMDecoder",
    "Sampling",
    "StaticKVDecoder",
    "VanillaDecoder",
]
