"""Grouped GEMMs with low-bit weights compile without spills, and their WGMMAs overlap with the widening."""

from __future__ import annotations

from pathlib import Path

import pytest
from sass import Instruction, Machine, tool_folder

from moe_layer.gemm.activation import Activation
from moe_layer.gemm.register_tiles import PACKED_FORMATS, RegisterTiles
from moe_layer.gemm.sm90_spec import LARGEST_TOKENS, LOW_BIT_FORMATS, SHARED_MEMORY, WIDENED_K, GroupedSpec
from moe_layer.gemm.tile_choice import all_tiles

pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")


def specs(weights: str) -> list[GroupedSpec]:
    """V4.1's and K3's projections; in MXFP4 every tile that the table may choose, else the smallest and the largest."""
    v41 = Activation(limit=10.0)
    made = []
    tiles = all_tiles("sm_90a", weights)
    for tile in tiles if weights == "mxfp4" else (tiles[0], tiles[-1]):
        made.append(
            GroupedSpec(48, 2, 2304, 5120, "bf16", "mxfp8", tile.tokens, True, v41, tile.cluster, weights=weights)
        )
        made.append(GroupedSpec(48, 1, 5120, 2304, "bf16", "bf16", tile.tokens, False, weights=weights))
    made.append(GroupedSpec(112, 2, 3072, 3584, "bf16", "fp32", 16, True, Activation("situ"), weights=weights))
    largest = LARGEST_TOKENS[weights]
    made.append(GroupedSpec(112, 2, 3072, 3584, "bf16", "mxfp8", largest, True, Activation("situ"), weights=weights))
    return made


def found(machine: Machine, pattern: str) -> list[Instruction]:
    return [instruction for instruction in machine.code if instruction.is_a(pattern)]


@pytest.mark.skipif(tool_folder() is None, reason="needs nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm")
@pytest.mark.parametrize("weights", LOW_BIT_FORMATS)
def test_kernels(weights: str, tmp_path: Path) -> None:
    from moe_layer.gemm.sm90_grouped import SIGNATURE, grouped_gemm
    from moe_layer.kernel_cache import compile_artifacts

    for spec in specs(weights):
        machine = Machine(compile_artifacts(grouped_gemm, spec, SIGNATURE, "sm_90a").artifacts.CUBIN, tmp_path)
        what = f"{spec}"
        assert machine.stack == machine.local == 0 and not machine.all(r"(LDL|STL)(\..*)?"), what
        products = found(machine, rf"HGMMA\.64x{spec.tokens}x16\.F32\.BF16")
        assert len(products) == spec.weight_blocks * spec.k_tile // 16, what
        assert all(p.operands.split(",")[1].strip().startswith("R") for p in products), "weights come from registers"
        # Where ptxas lets no two WGMMAs overlap, it waits for each of them, to zero, and starts each by itself.
        starts, waits = found(machine, r"WARPGROUP\.ARRIVE"), found(machine, r"WARPGROUP\.DEPBAR.*")
        assert len(starts) < len(products), what
        if weights != "int4" or spec.tokens <= 64:  # beyond, its sums of a block are scaled before the next may start
            assert sum("0x0" not in wait.operands for wait in waits) >= 2, what
        assert machine.all(r"UBLKCP.*"), "packed weights by one bulk copy a stage"
        assert machine.all(r"LDGSTS\.E(\..*)?\.128(\..*)?") and machine.all(r"LDS\.128"), what


@pytest.mark.parametrize("weights", LOW_BIT_FORMATS)
def test_shared_memory_holds_the_stages(weights: str) -> None:
    for spec in specs(weights):
        stage = spec.weight_stage_bytes + spec.token_stage_bytes + 16
        assert spec.stages >= 3
        assert spec.stages * stage + spec.staging_bytes + 12 * (spec.experts + 1) <= SHARED_MEMORY
        assert spec.weight_stage_bytes % 16 == 0 and spec.consumer_warpgroups * spec.weight_blocks == 4


def test_the_kernel_and_the_layout_agree() -> None:
    assert set(LOW_BIT_FORMATS) == set(PACKED_FORMATS)
    for name, kernel in LOW_BIT_FORMATS.items():
        tiles = RegisterTiles(name, 2, 2304, 5120)
        assert (tiles.word_bytes, tiles.stage_bytes) == (kernel.word_bytes, kernel.stage_bytes)
        spec = GroupedSpec(1, 2, 2304, 5120, "bf16", "bf16", 64, True, Activation(), weights=name)
        assert (tiles.column_tiles, tiles.k_steps) == (spec.column_tiles, -(-spec.k // WIDENED_K))


def test_an_odd_number_of_packed_tiles_along_k_takes_one_a_stage() -> None:
    spec = GroupedSpec(4, 2, 256, 384, "bf16", "bf16", 8, True, Activation(), weights="mxfp4")
    assert (spec.stage_units, spec.k_steps) == (1, 3)
    spec = GroupedSpec(4, 2, 256, 512, "bf16", "bf16", 8, True, Activation(), weights="mxfp4")
    assert (spec.stage_units, spec.k_steps) == (2, 2)
