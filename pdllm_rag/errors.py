"""Errors a caller can handle. Every message says what happened, what was got, what was expected, what to do.

PdllmError                        (pdllm_store.errors)
|-- StoreError                    (pdllm_store.errors, with its own tree)
|-- ModelError
|   |-- UnknownModelError         no bundled, local or hub model of that name
|   `-- ModelFormatError          the model's files are damaged, incomplete or of an unsupported kind
|-- DocumentError
|   |-- EmptyDocumentError        read without trouble, but there is no text in it
|   `-- UnreadableDocumentError   missing, too large, binary, encrypted, broken or of an unknown encoding
|-- RequestError
|   |-- FirstStageError           the user's own first stage gave what the store does not hold
|   |-- UnfitModelError           a decoder or policy means nothing for the model
|   |-- UnmatchedContextError     a prompt holds context that is in no stored chunk, which the caller forbade
|   |-- ContextWindowError        question, chunks and answer do not fit the model's window
|   `-- GenerationCancelled       the caller stopped the generation
|-- ClusterError                  Ray is not installed, cannot be reached, or gave up
|-- NumericsError                 the model gave logits that are not finite
`-- TrainingError                 a training run diverged, or cannot be gone on with
"""

from pdllm_store.errors import PdllmError

__all__ = [
    "ClusterError",
    "ContextWindowError",
    "DocumentError",
    "EmptyDocumentError",
    "FirstStageError",
    "GenerationCancelled",
    "ModelError",
    "ModelFormatError",
    "NumericsError",
    "PdllmError",
    "RequestError",
    "TrainingError",
    "UnfitModelError",
    "UnknownModelError",
    "UnmatchedContextError",
    "UnreadableDocumentError",
]


class ModelError(PdllmError):
    """Base of the errors about finding and loading a model."""


class UnknownModelError(ModelError):
    """No bundled model, local folder or hub id of that name."""


class ModelFormatError(ModelError):
    """The model's files are damaged, incomplete or of a kind that is not supported."""


class DocumentError(PdllmError):
    """Base of the errors about one document; the others of a batch are not concerned."""


class EmptyDocumentError(DocumentError):
    """The document was read, but it holds no text."""


class UnreadableDocumentError(DocumentError):
    """The document is missing, too large, binary, encrypted, broken or in an unknown encoding."""


class RequestError(PdllmError):
    """Base of the errors about one question."""


class FirstStageError(RequestError):
    """The user's own first stage gave something malformed, or something that the store does not hold."""


class UnmatchedContextError(RequestError):
    """A prompt holds context that is in no stored chunk, and the caller wanted none."""


class UnfitModelError(RequestError, ValueError):
    """A decoder or policy was asked for that means nothing for the model."""


class ContextWindowError(RequestError):
    """Question, chunks and answer do not fit the model's window."""


class GenerationCancelled(RequestError):
    """The caller stopped the generation before it was done."""


class NumericsError(PdllmError):
    """The model gave logits that are not finite."""


class TrainingError(PdllmError):
    """A training run diverged, or its folder holds another run."""


class ClusterError(PdllmError):
    """Ray is not installed, its cluster cannot be reached, or it gave a run up."""
