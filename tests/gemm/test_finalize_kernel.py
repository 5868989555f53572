"""The finalize kernel, without a GPU: compiled for every architecture, chosen by size, and wrong operands refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_layer.errors import CapacityError, TensorError
from moe_layer.gemm import finalize_launch
from moe_layer.gemm.finalize_launch import (
    FinalizeSpec,
    choose,
    finalize,
    grid_of,
    launch,
    variants,
    variants_for,
)
from moe_layer.gemm.index import ExpertIndex

MULTIPROCESSORS = 132
GLOBAL = r"(LDG|STG|ATOMG|ATOM|RED|REDG|LD|ST)(\..*)?"


# --- the choice of kernel ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("hidden", [1, 7, 8, 264, 3584, 5120, 7168])
def test_units_cover_a_row(hidden: int) -> None:
    for vectors in (True, False) if hidden % 8 == 0 else (False,):
        for spec in variants(hidden, 8, 2, 2, vectors).values():
            width = 8 if vectors else 1
            assert spec.parts * spec.chunks * 32 * width >= hidden
            assert (spec.parts - 1) * spec.chunks * 32 * width < hidden


@pytest.mark.parametrize("top_k", range(1, 33))
def test_a_look_up_fits_a_warp(top_k: int) -> None:
    for spec in variants(7168, top_k, 2, 2, True).values():
        assert spec.looked_up >= 1 and spec.looked_up * top_k <= 32
        assert spec.selection_mask.bit_count() == top_k


def test_few_slots_are_spread_and_many_fill_the_gpu() -> None:
    kinds = variants(7168, 8, 2, 2, True)
    assert choose(kinds, 8, MULTIPROCESSORS) == kinds["few"]
    assert grid_of(kinds["few"], 8, MULTIPROCESSORS) == 8 * 28 // 4
    assert choose(kinds, 32768, MULTIPROCESSORS) == kinds["many"]
    assert grid_of(kinds["many"], 32768, MULTIPROCESSORS) == MULTIPROCESSORS
    for slots in (1, 5, 100, 300, 4096, 32768):
        spec = choose(kinds, slots, MULTIPROCESSORS)
        assert 1 <= grid_of(spec, slots, MULTIPROCESSORS) <= -(-slots * spec.parts // spec.warps)


def test_vectors_only_where_everything_is_aligned() -> None:
    def vectors(rows: torch.Tensor, output: torch.Tensor) -> bool:
        kinds = variants_for(rows, 2, output)
        assert kinds["few"].vectors == kinds["many"].vectors
        return kinds["few"].vectors

    base = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert base.data_ptr() % 16 == 0
    assert vectors(base[:, :40], base)
    assert vectors(base[:, 8:16], base[:, 16:24].float())
    assert not vectors(base[:, :42], base)  # not whole vectors
    assert not vectors(base[:, 1:9], base)  # not at a multiple of 16 bytes
    assert not vectors(base, base[:, 4:])
    assert not vectors(torch.zeros(4, 68, dtype=torch.bfloat16)[:, :64], base)  # rows 136 bytes apart
    assert vectors(torch.zeros(1, 68, dtype=torch.bfloat16)[:, :64], base)  # a single row has no next


# --- operands that are refused ----------------------------------------------------------------------------------------
def operands(**changed: torch.Tensor) -> tuple[Any, ...]:
    """Valid ones but for the device, four slots of two selections, 16 wide; ``changed`` replaces some."""
    rows = changed.get("rows", torch.zeros(8, 16, dtype=torch.bfloat16))
    index_rows = changed.get("index_rows", torch.zeros(4, 2, dtype=torch.int32))
    weights = changed.get("weights", torch.zeros(4, 4)[:, 2:])
    output = changed.get("output", torch.zeros(4, 16, dtype=torch.bfloat16))
    empty = torch.zeros(1, dtype=torch.int32)
    return rows, ExpertIndex(empty, empty, index_rows), weights, output


@pytest.mark.parametrize(("changed", "message"), [
    ({"index_rows": torch.zeros(4, 2, dtype=torch.int64)}, r"index.rows must be contiguous \[slots, top_k\] int32"),
    ({"index_rows": torch.zeros(4, 4, dtype=torch.int32)[:, :2]}, r"index.rows must be contiguous .* strides \(4, 1\)"),
    ({"rows": torch.zeros(8, 16, dtype=torch.float16)}, r"rows must be \[rows, hidden\] bfloat16 or float32"),
    ({"rows": torch.zeros(16)}, r"rows must be \[rows, hidden\]"),
    ({"rows": torch.zeros(16, 8).t()}, r"rows must have contiguous rows, got strides \(1, 8\)"),
    ({"weights": torch.zeros(4, 3)}, r"topk_weights must be \[4, 2\] float32, got \[4, 3\]"),
    ({"weights": torch.zeros(4, 2).bfloat16()}, r"topk_weights must be \[4, 2\] float32, got \[4, 2\] torch.bfloat16"),
    ({"weights": torch.zeros(2, 4).t()}, r"topk_weights must have contiguous rows, got strides \(1, 4\)"),
    ({"output": torch.zeros(4, 15)}, r"output must be \[4, 16\] bfloat16 or float32, got \[4, 15\]"),
    ({"output": torch.zeros(4, 16).half()}, r"output must be .* got \[4, 16\] torch.float16"),
    ({"output": torch.zeros(16, 4).t()}, r"output must have contiguous rows, got strides \(1, 4\)"),
    ({"output": torch.zeros(1, 16).expand(4, 16)}, r"output must have rows that do not overlap, got strides \(0, 1\)"),
    ({}, "rows lies on cpu, output on cpu; the kernel needs one GPU"),
])  # fmt: skip
def test_wrong_operands(changed: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(TensorError, match=message):
        finalize(*operands(**changed))


def test_too_many_units() -> None:
    spec = FinalizeSpec(1 << 20, 1, 2, 2, True, 1024, 1, 2)
    output = torch.empty(1 << 20, 1 << 20, dtype=torch.bfloat16, device="meta")
    with pytest.raises(CapacityError, match="1048576 slots of 4096 parts; the finalize kernel numbers up to"):
        launch(spec, output, operands()[1], output, output)


# --- what a launch passes ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["few", "many"])
def test_arguments_of_a_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled function takes one-dimensional bytes, which tell it the device, then integers."""
    passed: list[Any] = []
    monkeypatch.setattr(
        finalize_launch, "finalize_kernel", lambda spec, arch: lambda *arguments: passed.extend(arguments)
    )
    monkeypatch.setattr(finalize_launch, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(finalize_launch, "_loaded", finalize_launch._loaded.__wrapped__)
    monkeypatch.setattr(finalize_launch, "_multiprocessors", lambda device: MULTIPROCESSORS)
    output = torch.zeros(4, 32)[:, :16]
    rows, index, weights, _ = operands()
    spec = variants(16, 2, 2, 4, True)[name]
    launch(spec, rows, index, weights, output)
    anchor, *scalars = passed
    assert (anchor.dim(), anchor.dtype) == (1, torch.uint8)
    assert len(scalars) == len(finalize_launch.SIGNATURE)
    assert scalars[:3] == [rows.data_ptr(), 32, index.rows.data_ptr()]
    assert scalars[3:] == [weights.data_ptr(), 16, output.data_ptr(), 128, 4 * spec.parts, 1]


# --- machine code -----------------------------------------------------------------------------------------------------
KINDS = {
    "V3": (7168, 8, 2, 2, True),
    "V4.1-Flash, fp32 rows": (5120, 6, 4, 2, True),
    "Kimi-K3, fp32 partial results": (3584, 16, 2, 4, True),
    "narrow": (8, 1, 4, 4, True),
    "odd": (5119, 32, 2, 2, False),
    "odd fp32": (7, 22, 4, 4, False),
}
CASES = [("sm_90a", kind, name) for kind in KINDS for name in ("few", "many")]
CASES += [(arch, "V3", name) for arch in ("sm_100a", "sm_103a") for name in ("few", "many")]


@pytest.mark.parametrize(("arch", "kind", "name"), CASES)
def test_kernel(arch: str, kind: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")
    from sass import Machine, tool_folder

    from moe_layer.gemm.finalize_kernel import finalize_rows
    from moe_layer.kernel_cache import compile_artifacts

    if tool_folder() is None:
        pytest.skip("needs nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm")
    spec = variants(*KINDS[kind])[name]
    compiled = compile_artifacts(finalize_rows, spec, finalize_launch.SIGNATURE, arch)
    code = Machine(compiled.artifacts.CUBIN, tmp_path)
    assert (code.stack, code.local) == (0, 0), "spills"
    # As many blocks as the launch counts on are resident together.
    blocks = max(1, finalize_launch.FEW_WARPS_PER_SM // spec.warps)
    assert blocks * spec.threads * -(-code.registers // 8) * 8 <= 65536
    before = code.reachable([0], lambda instruction: instruction.is_a("ACQBULK"))
    assert before and not code.all(GLOBAL, before), "memory before the kernel ahead has ended"
    # A product and a sum at a time, subnormals kept: the reference's bits.
    assert not code.all(r"FFMA(\..*)?|FMUL\.FTZ(\..*)?|FADD\.FTZ(\..*)?|HFMA2\.BF16.*")
    arithmetic = spec.rows * spec.chunks * spec.width
    assert len(code.all(r"FMUL2?(\..*)?")) + len(code.all(r"FADD2?(\..*)?")) >= arithmetic
    if spec.vectors:
        # The loop over looked-up units may be unrolled, so that all of this is there more than once.
        round_loads = spec.rows * spec.chunks * spec.width * spec.row_bytes // 16
        wide = code.all(r"LDG\.E(\.\w+)*\.128(\.\w+)*")
        assert wide and len(wide) % round_loads == 0
        stored = code.all(r"STG\.E(\.\w+)*\.128(\.\w+)*")
        assert stored and len(stored) % (spec.chunks * spec.width * spec.output_bytes // 16) == 0
        # All rows of a round are under way before the first is multiplied.
        multiplied = [i for i in code.all(r"FMUL2?(\..*)?") if i > wide[0]]
        assert multiplied and wide[round_loads - 1] < multiplied[0]
