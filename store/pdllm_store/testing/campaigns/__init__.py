"""Long trials of a store on disk: killed writers, flipped bits, many processes at once.

Each campaign is a function that returns its figures and raises `BrokenGuaranteeError` with a sentence when the store
did not keep a promise. `python -m pdllm_store.testing.campaigns kill|flips|mix` runs one; docs/reliability.md says what
each of them does and found.
"""

from pdllm_store.testing.campaigns.flips import FlipsResult, flips
from pdllm_store.testing.campaigns.guarantee import BrokenGuaranteeError
from pdllm_store.testing.campaigns.kill import KillResult, kill
from pdllm_store.testing.campaigns.mix import MixResult, mix

__all__ = ["BrokenGuaranteeError", "FlipsResult", "KillResult", "MixResult", "flips", "kill", "mix"]
