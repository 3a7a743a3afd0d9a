"""How fast an adapter is trained: whole steps on random weights, against the rate of a large matrix product.

Operations counted: twice two for each weight of the layers and each position (forward, and backward to the activations;
frozen weights have no gradient), the same of the head for each prediction. Attention and the adapter itself are not
counted, so the share of the matrix rate is a lower bound.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from pdllm_rag.bench.ceilings import measure_ceilings
from pdllm_rag.bench.machine import Spread, describe, take_turns
from pdllm_rag.bench.shapes import layer_parameters
from pdllm_rag.models.loader import LoadedModel
from pdllm_rag.training.adapters import LoraShape, adapted, trained
from pdllm_rag.training.items import Block, Item, Shape
from pdllm_rag.training.masters import ROUNDINGS, Masters
from pdllm_rag.training.noise import DiffusionNoise
from pdllm_rag.training.objectives import Reading
from pdllm_rag.training.rows import Batch, lay_out

CHUNK_LEN, QUESTION_LEN, ANSWER_LEN = 256, 32, 96


def bench_training(model: LoadedModel, *, n_rows: int, shape: Shape, lora: LoraShape, steps: int) -> dict[str, Any]:
    """Steps of `pdllm train chunk-lora` over random tokens."""
    backbone = model.backbone
    device, spec = backbone.device, model.spec
    ceilings = measure_ceilings(device, backbone.dtype)
    student = adapted(backbone.model, lora).train()
    objective = Reading(backbone.over(student))
    masters = Masters(trained(student), ROUNDINGS["none"], decay=0.0, betas=(0.9, 0.95))
    batch = _batch(model, shape, n_rows).to(device)

    def step() -> None:
        objective(batch).loss.backward()  # type: ignore[no-untyped-call]
        masters.step(1e-5, clip=1.0)

    ms = take_turns({"step": step}, steps, device=device)["step"]
    n_predicted = int((batch.weights > 0).sum())
    head = spec.vocab_size * backbone.model.config.hidden_size
    flops = 4 * layer_parameters(model) * batch.ids.numel() + 4 * head * batch.predicting.numel()
    took = Spread.of([one / 1000 for one in ms])
    return {
        "machine": describe(model)._asdict(),
        "model": spec.name,
        "repeat": steps,
        "n_rows": n_rows,
        "positions": batch.ids.numel(),
        "predictions": n_predicted,
        "lora": lora.__dict__,
        "step_s": took.as_dict(),
        "positions_per_s": batch.ids.numel() / took.median,
        "flops_per_step": flops,
        "matmul_flops_per_s": ceilings.flops_per_s,
        "share_of_matmul_rate": flops / took.median / ceilings.flops_per_s,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def _batch(model: LoadedModel, shape: Shape, n_rows: int) -> Batch:
    rng = random.Random(0)
    spec = model.spec

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(spec.n_tokens) for _ in range(n))

    chunks = tuple(tokens(CHUNK_LEN) for _ in range(shape.context_len // CHUNK_LEN))
    room = shape.canvas_len // (QUESTION_LEN + ANSWER_LEN)
    question = range(1, QUESTION_LEN - 1)
    blocks = tuple(
        Block(tokens(QUESTION_LEN + ANSWER_LEN), QUESTION_LEN, ANSWER_LEN, question, None, "qa", 1.0)
        for _ in range(room)
    )
    item = Item(chunks, blocks, "chunks", "sequential", CHUNK_LEN)
    return Batch.of([lay_out([item], shape, spec, DiffusionNoise(), rng) for _ in range(n_rows)])
