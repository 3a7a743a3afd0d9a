"""An autoregressive checkpoint cut down to where training begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pdllm_rag.errors import ModelFormatError
from pdllm_rag.models import load_model
from pdllm_rag.models.tokenizer import Tokenizer
from pdllm_rag.training.pruning import MASK, prune

ALPHABET = 256
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("o", "r")]
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unused>")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, byte-level BPE with a few merges, no mask."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("base")
    words = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    backend = Backend(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, bos_token_id=1, eos_token_id=2, pad_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_what_is_kept_is_as_it_was(base: Path, tmp_path: Path) -> None:
    rows = len(SPECIALS) + ALPHABET + 2
    prune(base, tmp_path, mask_in_place_of="<unused>", layers=[0, 2, 3], vocabulary=rows, bos="<|endoftext|>")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    for new, old in enumerate([0, 2, 3]):
        name = "self_attn.q_proj.weight"
        assert torch.equal(after[f"model.layers.{new}.{name}"], before[f"model.layers.{old}.{name}"])
    assert not any(name.startswith("model.layers.3.") for name in after)
    embedding, whole = after["model.embed_tokens.weight"], before["model.embed_tokens.weight"]
    mask = SPECIALS.index("<unused>")
    others = [row for row in range(rows) if row != mask]
    assert torch.equal(embedding[others], whole[others])
    torch.testing.assert_close(embedding[mask], whole[others].mean(dim=0))


def test_the_result_loads_as_a_diffusion_model_with_its_mask_and_bos(base: Path, tmp_path: Path) -> None:
    prune(base, tmp_path, mask_in_place_of="<unused>", layers=[1, 2], bos="<|endoftext|>")
    model = load_model(str(tmp_path), dtype=torch.float32)
    assert (model.spec.mask_id, model.spec.bos_id, model.spec.n_layers) == (3, 0, 2)
    assert model.spec.logit_shift
    assert model.tokenizer.token_id(MASK) == 3
    assert 3 not in model.tokenizer.encode(f"a {MASK} in a text stays text")


def test_a_shorter_vocabulary_spells_the_same_text(base: Path, tmp_path: Path) -> None:
    prune(base, tmp_path, mask_in_place_of="<unused>", vocabulary=len(SPECIALS) + ALPHABET + 1)
    long, short = Tokenizer(base), Tokenizer(tmp_path)
    text = "in the other"
    assert len(short.encode(text)) > len(long.encode(text))
    assert max(short.encode(text)) < short.size == len(SPECIALS) + ALPHABET + 1
    assert short.decode(short.encode(text)) == text


def test_what_cannot_be_kept_is_refused(base: Path, tmp_path: Path) -> None:
    for layers in ([], [2, 1], [0, 4], [1, 1]):
        with pytest.raises(ValueError, match="layers to keep"):
            prune(base, tmp_path, mask_in_place_of="<unused>", layers=layers)
    with pytest.raises(ValueError, match="no token '<nothing>'"):
        prune(base, tmp_path, mask_in_place_of="<nothing>")
    with pytest.raises(ValueError, match="beyond the 3"):
        prune(base, tmp_path, mask_in_place_of="<unused>", vocabulary=3)
    with pytest.raises(ValueError, match="begin chunks"):
        prune(base, tmp_path, mask_in_place_of="<unused>", bos="<none>")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "gpt2", "num_hidden_layers": 2}))
    with pytest.raises(ModelFormatError, match="gpt2"):
        prune(tmp_path / "other", tmp_path / "out", mask_in_place_of="<unused>")
