"""Split-S attention: queries over several runs of cached keys, merged by log-sum-exp."""

from pdllm_rag.attention.api import BACKENDS, resolve, split_s_attention
from pdllm_rag.attention.blocks import block_masks, causal_block
from pdllm_rag.attention.merge import AttentionState, merge
from pdllm_rag.attention.table import ChunkTable

__all__ = [
    "BACKENDS",
    "AttentionState",
    "ChunkTable",
    "block_masks",
    "causal_block",
    "merge",
    "resolve",
    "split_s_attention",
]
