"""Models: families as data, a loader onto the library's own modules, and one layer loop with injected attention."""

from pdllm_rag.models.backbone import Attend, Backbone
from pdllm_rag.models.families import FAMILIES, Family
from pdllm_rag.models.loader import LoadedModel, load_model
from pdllm_rag.models.spec import ModelSpec

__all__ = ["FAMILIES", "Attend", "Backbone", "Family", "LoadedModel", "ModelSpec", "load_model"]
