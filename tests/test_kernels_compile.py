"""Every Triton kernel compiles for a GPU also where there is none: the interpreter takes what the compiler refuses."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdllm_rag.attention import split_kernel, turn_kernel
from pdllm_rag.decoding import dyllm_kernels
from pdllm_rag.models import fused_kernels

F, H, I, L = "*fp32", "*bf16", "*i32", "*i64"

def compiled(kernel, types, constants, **options):
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, {**types, **dict.fromkeys(constants, "constexpr")}, places)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(kernel.__name__, found.metadata.shared)

for dtype, block_m, block_n in (("bf16", 64, 64), ("fp32", 32, 32)):
    A = f"*{dtype}"
    tile = f"tensordesc<{dtype}[{block_n},128]>"
    types = dict(q_ptr=A, k_tiles=tile, v_tiles=tile, k_ptr=A, v_ptr=A, k_scale_ptr=F, v_scale_ptr=F, out_ptr=F,
                 lse_ptr=F, items_ptr=I, blocks_ptr=I, turns_ptr=F, rows_ptr=I, mask_ptr="*u8", scale_log2="fp32",
                 q_row_stride="i32", kv_row_stride="i32")
    for turns, rows, mask in ((True, False, True), (False, True, False))[: 2 if dtype == "bf16" else 1]:
        compiled(split_kernel.split_kernel, types,
                 dict(N_HEADS=28, RATIO=7, HEAD_DIM=128, BLOCK_M=block_m, BLOCK_N=block_n, HAS_TURNS=turns,
                      HAS_ROWS=rows, HAS_MASK=mask, IS_INT8=False, HAS_OUT=mask, UPCAST=False,
                      OVERLAPS=dtype == "bf16"),
                 num_warps=4, num_stages=2)
    compiled(split_kernel.merge_kernel, dict(parts_ptr=F, part_lse_ptr=F, out_ptr=A, lse_ptr=F, row_items_ptr=I),
             dict(N_HEADS=28, HEAD_DIM=128, MAX_PARTS=8, HAS_OUT=True, OVERLAPS=True))
    compiled(turn_kernel.turn_kernel,
             dict(q_ptr=A, k_ptr=A, v_ptr=A, q_out_ptr=A, k_out_ptr=A, v_out_ptr=A, cos_ptr=F, sin_ptr=F, slots_ptr=I,
                  q_row_stride="i32", k_row_stride="i32", v_row_stride="i32", out_row_stride="i32"),
             dict(N_HEADS=28, N_KV_HEADS=4, HEAD_DIM=128, HEADS=32, KV_HEADS=4, COPIES_V=True, OVERLAPS=True))
    compiled(fused_kernels.add_norm_kernel,
             dict(x_ptr=A, delta_ptr=A, weight_ptr=A, sum_ptr=A, normed_ptr=A, eps="fp32"),
             dict(WIDTH=3584, BLOCK=4096, ADDS=True, OVERLAPS=True))
    compiled(fused_kernels.head_norm_kernel,
             dict(qkv_ptr=A, q_weight_ptr=A, k_weight_ptr=A, eps="fp32", row_stride="i32"),
             dict(N_HEADS=32, N_NORMED=40, HEAD_DIM=128, HEADS=64))
    compiled(fused_kernels.gate_kernel, dict(gate_up_ptr=A, out_ptr=A), dict(WIDTH=18944, BLOCK=2048, OVERLAPS=True))
    compiled(fused_kernels.propose_kernel,
             dict(logits_ptr=A, parts_ptr=F, best_ptr=I, row_stride="i32", n_tokens="i32", mask_id="i32"),
             dict(N_PARTS=38, BLOCK=4096))
sizes = dict(N_KV_HEADS=4, HEAD_DIM=128, KV_HEADS=4)
compiled(dyllm_kernels.renew_kernel,
         dict(k_ptr=H, v_ptr=H, keys_ptr=H, values_ptr=H, change_ptr=H, cos_ptr=F, sin_ptr=F, chosen_ptr=I,
              slots_ptr=I, kv_row_stride="i32"), sizes)
compiled(dyllm_kernels.shift_kernel,
         dict(q_ptr=H, lse_ptr=F, keys_ptr=H, change_ptr=H, contexts_ptr=H, out_ptr=H, chosen_ptr=I, slots_ptr=I,
              places_ptr=L, scale_log2="fp32", kv_row_stride="i32", n_rows="i32", room="i32"),
         dict(N_HEADS=28, RATIO=7, HEAD_DIM=128, BLOCK_M=64, BLOCK_N=32))
compiled(dyllm_kernels.compare_kernel,
         dict(out_ptr=H, exact_ptr=H, contexts_ptr=H, compared_ptr=H, exact_of_ptr=I, places_ptr=L, bias_ptr=F,
              rank_ptr=F), dict(WIDTH=3584, BLOCK=4096), num_warps=8)
compiled(dyllm_kernels.keep_kernel,
         dict(new_ptr=H, outputs_ptr=H, context_ptr=H, reference_ptr=H, chosen_ptr=I, places_ptr=L),
         dict(HIDDEN=3584, WIDTH=3584, BLOCK=4096, HAS_REFERENCE=True), num_warps=8)
compiled(dyllm_kernels.pick_kernel,
         dict(rank_ptr=F, chosen_ptr=I, take_ptr=I, exact_of_ptr=I, rooms_ptr=I, counts_ptr=I, tau="fp32",
              n_rows="i32", room="i32"), dict(BLOCK=64))
compiled(fused_kernels.propose_merge_kernel, dict(parts_ptr=F, best_ptr=I, out_ptr=I), dict(N_PARTS=38, PARTS=64))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="where triton brings its assembler"
)
def test_kernels_compile_for_compute_capability_9(tmp_path: Path) -> None:
    program = tmp_path / "compile_kernels.py"
    program.write_text(PROGRAM)
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("", "store"))
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("split_kernel") == 3
