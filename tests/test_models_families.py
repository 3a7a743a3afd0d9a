"""Every family loads from its real naming and computes what an independent forward computes."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import BIDIRECTIONAL, KINDS, family_mask, read_tensors, reference_logits, vocabulary, write_checkpoint
from pdllm_store import MemoryStore

from pdllm_rag import InputDocument, RagEngine
from pdllm_rag.attends import CaptureAttend, DenseAttend, SplitSAttend
from pdllm_rag.attention import causal_block
from pdllm_rag.context import Placed, gather
from pdllm_rag.decoding import CommitRule, DecodeRequest, StaticKVDecoder
from pdllm_rag.errors import ModelFormatError, UnknownModelError
from pdllm_rag.models import FAMILIES, LoadedModel, load_model
from pdllm_rag.models.families import family_of
from pdllm_rag.models.layout import Layout, library_config
from pdllm_rag.models.rope import Rope
from pdllm_rag.placement import Placement

TEXT = " ".join(f"Boat {n} sails on lake {n * n}." for n in range(12))
N_WORDS = 260  # ids below are ordinary tokens


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype=torch.float32)


def some_ids(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, N_WORDS, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(3))
def test_logits_equal_an_independent_forward(kind: str, folder: Path, model: LoadedModel, seed: int) -> None:
    ids, mask = some_ids(70, seed), family_mask(kind, 70)
    ids[-20::2] = model.spec.mask_id
    backbone = model.backbone
    ours = backbone.logits(backbone.hidden(ids, DenseAttend(backbone.rope, [70], torch.arange(70), [mask])))
    theirs = reference_logits(folder, ids, mask)
    allowed = torch.isfinite(ours)
    torch.testing.assert_close(ours[allowed], theirs[allowed], rtol=0, atol=1e-5)
    assert ours.shape == theirs.shape
    assert not allowed[:, model.spec.mask_id].any()
    assert not allowed[:, model.spec.n_tokens :].any()
    assert allowed.sum() == 70 * (model.spec.n_tokens - 1)


# -- which rows see which (E2) ------------------------------------------------------------------------------------


def final_hidden(model: LoadedModel, ids: torch.Tensor, path: str) -> torch.Tensor:
    """Hidden rows of `ids` by one of the attention paths, alone or as the first of a batch."""
    rope, n, block = model.backbone.rope, len(ids), causal_block(model.spec.family)
    if path.startswith("split"):
        kv_ids = some_ids(8, 9)
        capture = CaptureAttend(rope, [8], torch.arange(8), sketch_layer=0)
        model.backbone.encode(kv_ids, capture)
        from pdllm_store import ChunkKV

        chunk = ChunkKV(torch.stack(capture.keys), torch.stack(capture.values))
        context = gather([Placed((chunk,), Placement((0,), 32))], [n], model.backbone)
        return model.backbone.hidden(ids, SplitSAttend(rope, context, block=block, backend=path.removeprefix("split-")))
    lens = {"alone": [n], "batch": [n, n], "ragged": [n, n - 5], "masks": [n, n - 5]}[path]
    positions = torch.cat([torch.arange(length) for length in lens])
    masks = None
    if path == "masks" or block is not None:
        numbers = [torch.arange(length) // (block or length) for length in lens]
        masks = [own[:, None] >= own for own in numbers]
    packed = torch.cat([ids, *(some_ids(length, 7) for length in lens[1:])])
    return model.backbone.hidden(packed, DenseAttend(rope, lens, positions, masks))[:n]


@pytest.mark.parametrize("path", ["alone", "batch", "ragged", "masks", "split-reference", "split-flash"])
def test_the_first_row_sees_the_last_token_or_only_its_block(model: LoadedModel, kind: str, path: str) -> None:
    ids = some_ids(40)
    changed = ids.clone()
    changed[-1] = (ids[-1] + 1) % N_WORDS
    before, after = final_hidden(model, ids, path), final_hidden(model, changed, path)
    block = causal_block(model.spec.family)
    assert (block is None) == (kind in BIDIRECTIONAL)
    own = 0 if block is None else 39 // block * block  # first row of the last token's block
    assert ((before[own:] - after[own:]).abs().amax(dim=1) > 1e-4).all()
    if own:
        torch.testing.assert_close(before[:own], after[:own], rtol=0, atol=1e-6)


def test_stored_keys_of_the_first_row_know_the_last_token_or_only_their_block(model: LoadedModel) -> None:
    from pdllm_rag.encoder import ChunkEncoder

    ids = some_ids(40).numpy().astype("int32")
    changed = ids.copy()
    changed[-1] = (changed[-1] + 1) % N_WORDS
    encoder = ChunkEncoder(model, model.fingerprint("float32"))
    before, after = (next(iter(encoder.batches([one])))[0][1].k[-1] for one in (ids, changed))
    block = causal_block(model.spec.family)
    assert torch.equal(before[0], after[0]) == (block is not None)


# -- which row predicts (E3) ---------------------------------------------------------------------------------------


def test_a_masked_token_is_read_from_the_row_that_predicts_it(kind: str, folder: Path, model: LoadedModel) -> None:
    """The first token committed is the surest one of the reference's rows: those before the masks, or their own."""
    prompt, block = some_ids(4, 3), causal_block(model.spec.family)
    n_masks = {None: 32, 4: 4}.get(block, 28)  # up to the end of a block
    canvas = torch.cat([prompt, torch.full((n_masks,), model.spec.mask_id)])
    logits = reference_logits(folder, canvas, family_mask(kind, len(canvas))).clone()
    logits[:, model.spec.mask_id] = -math.inf
    logits[:, model.spec.n_tokens :] = -math.inf
    own = logits.softmax(-1)[4:].max(-1)
    left = logits.softmax(-1)[3:-1].max(-1)
    request = DecodeRequest(prompt.tolist(), Placement((), 0), max_new_tokens=n_masks)
    step = next(StaticKVDecoder(model, CommitRule(threshold=1.0)).steps([request]))
    for shifted, best in ((True, left), (False, own)):
        row = int(best.values.argmax())
        same = step.rows[0] == row and step.tokens[0] == int(best.indices[row])
        assert same == (shifted == model.spec.logit_shift)
        if same:
            assert step.confidence[0] == pytest.approx(float(best.values[row]), abs=1e-5)


# -- ids and the choice of a family --------------------------------------------------------------------------------

EXPECTED = {  # mask, bos, stops by their texts
    "llada": ("<|mdm_mask|>", "<|startoftext|>", {"<|endoftext|>"}),
    "llada-instruct": ("<|mdm_mask|>", "<|startoftext|>", {"<|endoftext|>", "<|eot_id|>"}),
    "dream": ("<|mask|>", "<|beginoftext|>", {"<|endoftext|>", "<|im_end|>"}),
    "sdar": ("<|MASK|>", "<|endoftext|>", {"<|endoftext|>", "<|im_end|>"}),
    "fast-dllm-v2": ("|<MASK>|", "<|endoftext|>", {"<|endoftext|>", "<|im_end|>"}),
    "llada2": ("<|mask|>", "<|startoftext|>", {"<|endoftext|>", "<|role_end|>"}),
}


def test_ids_come_from_the_checkpoints_files(kind: str, model: LoadedModel) -> None:
    _, added = vocabulary(kind)
    mask, bos, stops = EXPECTED[kind]
    assert (model.spec.mask_id, model.spec.bos_id) == (added[mask], added[bos])
    assert set(model.spec.eos_ids) == {added[token] for token in stops}
    assert model.fingerprint("bfloat16").prefill_mask == model.spec.family.prefill_mask


@pytest.mark.parametrize(
    ("config", "name", "mask"),
    [
        ({"model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": 1, "mask_token_id": 1}, "llada", None),
        (
            {
                "model_type": "llada",
                "architectures": ["LLaDAModelLM"],
                "d_model": 1,
                "mask_token_id": 1,
                "rope_theta": 2.8e8,
            },
            "ultra-llada",
            None,
        ),
        ({"model_type": "llada", "architectures": ["LLaDAMoEModelLM"], "hidden_size": 1}, None, None),
        ({"model_type": "Dream", "architectures": ["DreamModel"], "mask_token_id": 1}, "dream", None),
        ({"model_type": "Dream", "architectures": ["DreamForCausalLM"], "mask_token_id": 1}, None, None),
        ({"model_type": "sdar", "architectures": ["SDARForCausalLM"]}, "sdar", "block-causal-4"),
        ({"model_type": "sdar", "block_size": 8}, "sdar", "block-causal-8"),
        ({"model_type": "Fast_dLLM_Qwen", "bd_size": 16}, "fast-dllm-v2", "block-causal-16"),
        ({"model_type": "qwen2", "mask_token_id": 1, "logit_shift": True}, "qwen2-mdlm", None),
        ({"model_type": "qwen2", "mask_token_id": 1}, None, None),
    ],
    ids=str,
)
def test_a_family_is_chosen_by_what_the_config_says(config: dict[str, Any], name: str | None, mask: str | None) -> None:
    family = family_of(config)
    assert (family.name if family else None) == name
    if family:
        assert family.prefill_mask == (mask or "bidirectional")
        assert family.block_len % (causal_block(family) or 1) == 0


def test_an_unknown_kind_names_what_is_supported_and_how_to_add_one(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "dream", model_type="diffusion_gemma", architectures=["DiffusionGemma"])
    with pytest.raises(UnknownModelError, match="diffusion_gemma") as caught:
        load_model(str(folder))
    assert all(family.name in str(caught.value) for family in FAMILIES)
    assert "FAMILIES" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("llada", {"mask_token_id": 5}, ["<|mdm_mask|>", "264", "5"]),
        ("dream", {"mask_token_id": 266}, ["<|mask|>", "267", "266"]),
        ("sdar", {"bos_token_id": 4000}, ["bos", "4000"]),
        ("llada", {"eos_token_id": 264}, ["264", "mask"]),
        ("sdar", {"block_size": "four"}, ["block_size", "four"]),
        ("llada", {"alibi": True}, ["alibi", "llada"]),
        ("llada", {"block_type": "sequential"}, ["block_type", "sequential", "llama"]),
        ("dream", {"use_sliding_window": True}, ["use_sliding_window"]),
        ("llada2", {"score_function": "softmax"}, ["score_function"]),
        ("sdar", {"vocab_size": None}, ["vocab_size"]),
    ],
    ids=str,
)
def test_a_config_that_contradicts_the_tokenizer_or_the_family_is_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], told: list[str]
) -> None:
    path = write_checkpoint(tmp_path, kind) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelFormatError) as caught:
        load_model(str(tmp_path))
    assert all(word in str(caught.value) for word in told)


def test_tied_weights_need_no_head(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llada", weight_tying=True)
    assert not any(".transformer.ff_out" in name for name in read_tensors(folder))
    model, ids = load_model(str(folder), dtype=torch.float32), some_ids(20)
    hidden = model.backbone.hidden(ids, DenseAttend(model.backbone.rope, [20], torch.arange(20)))
    ours = model.backbone.logits(hidden)
    theirs = reference_logits(folder, ids, family_mask("llada", 20))
    allowed = torch.isfinite(ours)
    torch.testing.assert_close(ours[allowed], theirs[allowed], rtol=0, atol=1e-5)


def test_grouped_heads_and_one_file_without_an_index_load(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llada", shards=1, n_kv_heads=2)
    model, ids = load_model(str(folder), dtype=torch.float32), some_ids(20)
    hidden = model.backbone.hidden(ids, DenseAttend(model.backbone.rope, [20], torch.arange(20)))
    theirs = reference_logits(folder, ids, family_mask("llada", 20))[:, :N_WORDS]
    torch.testing.assert_close(model.backbone.logits(hidden)[:, :N_WORDS], theirs, rtol=0, atol=1e-5)


RELEASED = [  # config, tensors (None: experts are stacked), parameters, KV bytes per token in bfloat16
    pytest.param(
        {"model_type": "llada", "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "vocab_size": 126464,
         "mlp_hidden_size": 12288, "mask_token_id": 126336, "embedding_size": 126464, "weight_tying": False},
        291, 8_015_581_184, 512 * 1024, id="LLaDA-8B"),
    pytest.param(
        {"model_type": "Dream", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
         "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "mask_token_id": 151666},
        339, 7_615_616_512, 56 * 1024, id="Dream-7B"),
    pytest.param(
        {"model_type": "sdar", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "head_dim": 128,
         "num_key_value_heads": 8, "intermediate_size": 9728, "vocab_size": 151936, "tie_word_embeddings": False},
        399, 4_411_424_256, 144 * 1024, id="SDAR-4B"),
    pytest.param(
        {"model_type": "Fast_dLLM_Qwen", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
         "num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True},
        338, 1_543_714_304, 28 * 1024, id="Fast-dLLM-v2-1.5B"),
    pytest.param(
        {"model_type": "llada2_moe", "hidden_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16,
         "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 5120, "vocab_size": 157184, "num_experts": 256,
         "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 512, "n_group": 8, "topk_group": 4,
         "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "rope_theta": 600000},
        None, 16_255_638_528, 40 * 1024, id="LLaDA2.0-mini"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "n_tensors", "n_parameters", "kv_bytes"), RELEASED)
def test_the_released_sizes_come_out(
    config: dict[str, Any], n_tensors: int | None, n_parameters: int, kv_bytes: int
) -> None:
    """Tensors and parameters of the published checkpoints, and the KV sizes of docs/models.md."""
    import transformers

    family = family_of(config)
    assert family is not None
    library = getattr(transformers, family.module).config_class.from_dict(library_config(family, config))
    with torch.device("meta"):
        model = getattr(transformers, family.module)(library)
    layout = Layout(family, library)
    stored = model.state_dict()
    if library.tie_word_embeddings:
        del stored["lm_head.weight"]
    assert n_tensors in (None, len({layout.theirs(target) for target in stored}))
    buffers = {name for name, _ in model.named_buffers()}
    assert sum(tensor.numel() for name, tensor in stored.items() if name not in buffers) == n_parameters
    head_dim = getattr(library, "head_dim", None) or library.hidden_size // library.num_attention_heads
    assert 2 * 2 * library.num_hidden_layers * library.num_key_value_heads * head_dim == kv_bytes


# -- rotary scalings -----------------------------------------------------------------------------------------------


def test_an_enlarged_base_is_read_from_the_config_and_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    plain = load_model(str(write_checkpoint(tmp_path / "a", "llada")), dtype=torch.float32)
    ultra = load_model(str(write_checkpoint(tmp_path / "b", "llada", rope_theta=2.81e8)), dtype=torch.float32)
    assert (plain.spec.family.name, ultra.spec.family.name) == ("llada", "ultra-llada")
    assert plain.spec.family.context_len < ultra.spec.family.context_len
    assert plain.fingerprint("bfloat16").rope == "rope_theta=500000.0 rope_type='default'"
    assert ultra.fingerprint("bfloat16").rope == "rope_theta=281000000.0 rope_type='default'"
    assert torch.allclose(ultra.backbone.rope.inv_freq, 2.81e8 ** (-torch.arange(0, 8, 2) / 8))


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 32,
    "factor": 4.0,
}


@pytest.mark.parametrize(
    ("scaling", "frozen"),
    [
        ({"rope_type": "linear", "factor": 4.0}, None),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, None),
        ({"rope_type": "dynamic", "factor": 4.0}, 128),
        (LONGROPE, 32),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else str(value),
)
def test_scalings_are_the_librarys_and_those_that_follow_the_length_are_frozen(
    tmp_path: Path, scaling: dict[str, Any], frozen: int | None
) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    folder = write_checkpoint(tmp_path, "dream", rope_scaling=scaling, max_position_embeddings=128)
    model = load_model(str(folder), dtype=torch.float32)
    length = frozen or 128
    cos, sin = Qwen2RotaryEmbedding(model.backbone.model.config)(torch.zeros(1, 1), torch.arange(length)[None])
    ours = model.backbone.rope.tables(torch.arange(length))
    torch.testing.assert_close(ours[0][:, 0], cos[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(ours[1][:, 0], sin[0], rtol=0, atol=1e-5)
    name = model.fingerprint("bfloat16").rope
    assert f"rope_type={scaling['rope_type']!r}" in name
    assert ("frozen" in name) == (frozen is not None)
    if frozen:
        assert name.endswith(f"frozen={frozen}")


def test_a_partial_rotary_embedding_moves_chunks_exactly(tmp_path: Path) -> None:
    rope = load_model(str(write_checkpoint(tmp_path, "llada2")), dtype=torch.float32).backbone.rope
    assert isinstance(rope, Rope)
    assert (rope.inv_freq == 0).sum() == 4  # half of the 8 planes stand still
    x = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rope.shift(rope.shift(x, 7), 4), rope.shift(x, 11), rtol=0, atol=1e-5)


# -- the whole way -------------------------------------------------------------------------------------------------


def test_an_engine_prefills_and_answers(model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore(kv_dtype="float32")
    with RagEngine.open(store, model, chunk_len=64) as engine:
        report = engine.prefill([InputDocument("boats", TEXT, "boats.txt")])
        assert report.chunks_computed > 1
        meta = next(iter(store.iter_meta(engine.fingerprint)))
        assert meta.token_ids[0] == model.spec.bos_id
        answer = engine.answer("Where does the boat sail?", k=2, max_new_tokens=8)
        assert answer.stats.chunks.hit == 2
        assert answer.stats.nfe > 0
        again = engine.answer("Where does the boat sail?", k=2, max_new_tokens=8)
        assert again.text == answer.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_positions_beyond_the_trained_window_are_told_once_with_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from dataclasses import replace

    model = load_model(str(write_checkpoint(tmp_path, "dream")), dtype=torch.float32)
    family = replace(model.spec.family, context_len=100, max_chunk_len=100)
    model = replace(model, spec=replace(model.spec, family=family))
    with RagEngine.open(MemoryStore(kv_dtype="float32"), model, chunk_len=64) as engine:
        engine.prefill([InputDocument("boats", TEXT, "boats.txt")])
        engine.answer("Where?", k=3, max_new_tokens=4)
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "100" in told
    assert "dream" in told


def test_config_json_must_be_an_object(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llada")
    for text, told in (("[1]", "list"), ("{", "no JSON")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelFormatError, match=told):
            load_model(str(folder))
    assert json.loads((folder / "tokenizer_config.json").read_text())
