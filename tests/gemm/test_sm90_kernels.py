"""Hopper grouped GEMMs compile without spills, to the instructions they are built for; tiles are chosen by table."""

from __future__ import annotations

from pathlib import Path

import pytest
from sass import Machine, tool_folder

from moe_layer.gemm.activation import Activation
from moe_layer.gemm.sm90_spec import SHARED_MEMORY, GroupedSpec
from moe_layer.gemm.tile_choice import Tile, all_tiles, choose_tile

pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")

SWIGLU, CLAMPED, SITU = Activation(), Activation(limit=10.0), Activation("situ")
# experts, parts, n, k, dtype, out, tokens, gather, activation, cluster
SPECS = {
    "V4.1 FC1 BF16, wide": GroupedSpec(48, 2, 2304, 5120, "bf16", "bf16", 128, True, SWIGLU, 2),
    "V4.1 FC1 BF16, 64": GroupedSpec(48, 2, 2304, 5120, "bf16", "bf16", 64, True, CLAMPED),
    "V4.1 FC1 BF16, 8": GroupedSpec(48, 2, 2304, 5120, "bf16", "bf16", 8, True, SWIGLU),
    "V4.1 FC1 FP8, wide": GroupedSpec(48, 2, 2304, 5120, "fp8", "fp8", 128, True, CLAMPED, 2),
    "V4.1 FC1 FP8, wide, alone": GroupedSpec(48, 2, 2304, 5120, "fp8", "fp8", 128, True, SWIGLU),
    "V3 FC1 FP8, 32": GroupedSpec(32, 2, 2048, 7168, "fp8", "fp8", 32, True, SWIGLU),
    "V4.1 FC2 FP8, wide": GroupedSpec(48, 1, 5120, 2304, "fp8", "bf16", 128, False, None, 2),
    "V3 FC2 FP8, 16": GroupedSpec(32, 1, 7168, 2048, "fp8", "bf16", 16, False),
    "V4.1 FC2 BF16, wide": GroupedSpec(48, 1, 5120, 2304, "bf16", "bf16", 128, False, None, 2),
    "K3 FC1 BF16, SiTU, wide": GroupedSpec(112, 2, 3072, 3584, "bf16", "bf16", 128, True, SITU, 2),
    "V4.1 FC1 FP8, 96": GroupedSpec(48, 2, 2304, 5120, "fp8", "fp8", 96, True, CLAMPED),
    "V4.1 FC1 to FP32, wide": GroupedSpec(48, 2, 2304, 5120, "bf16", "fp32", 128, True, CLAMPED),
    "V4.1 FC1 to FP32, 32": GroupedSpec(48, 2, 2304, 5120, "bf16", "fp32", 32, True, CLAMPED),
    "512 experts, odd widths": GroupedSpec(512, 2, 192, 200, "bf16", "bf16", 64, True, SWIGLU),
}


@pytest.mark.skipif(tool_folder() is None, reason="needs nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm")
@pytest.mark.parametrize("name", SPECS)
def test_kernel(name: str, tmp_path: Path) -> None:
    from moe_layer.gemm.sm90_grouped import SIGNATURE, grouped_gemm
    from moe_layer.kernel_cache import compile_artifacts

    spec = SPECS[name]
    machine = Machine(compile_artifacts(grouped_gemm, spec, SIGNATURE, "sm_90a").artifacts.CUBIN, tmp_path)
    assert machine.stack == machine.local == 0 and not machine.all(r"(LDL|STL)(\..*)?")
    matrix = "QGMMA.64x{}x32.F32.E4M3.E4M3" if spec.scaled else "HGMMA.64x{}x16.F32.BF16"
    columns = spec.tokens if spec.swap else (128 if spec.scaled else 256)
    assert len(machine.all(matrix.format(columns).replace(".", r"\."))) >= (8 if spec.swap or spec.scaled else 4)
    assert machine.all(r"LDGSTS\.E(\..*)?\.128(\..*)?"), "token rows travel by cp.async, 16 bytes a thread"
    assert machine.all(r"UTMALDG\.\dD\.MULTICAST" if spec.cluster > 1 else r"UTMALDG\.\dD"), "weights by TMA"
    assert len(machine.all(r"USETMAXREG(\..*)?")) == 2
    assert machine.all(r"STG\.E(\..*)?\.128(\..*)?") or (spec.swap and spec.out == "fp8"), "rows in 16-byte stores"


@pytest.mark.parametrize("name", SPECS)
def test_shared_memory_holds_the_stages(name: str) -> None:
    spec = SPECS[name]
    stage = spec.weight_stage_bytes + spec.token_stage_bytes + 4 * spec.scale_stage_floats + 16
    used = spec.stages * stage + spec.staging_bytes + 12 * (spec.experts + 1)
    assert spec.stages >= 4 and used <= SHARED_MEMORY


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_tiles_follow_the_mean_number_of_rows(dtype: str) -> None:
    means = [0, 1, 3, 4, 9, 10, 40, 64, 65, 200, 10_000]
    tiles = [choose_tile("sm_90a", dtype, 48 * mean, 48) for mean in means]
    assert [t.tokens for t in tiles] == sorted(t.tokens for t in tiles)
    assert tiles[0].tokens == 8 and tiles[-1] == Tile(128, 2)
    assert all(t.tokens >= min(mean, 128) for t, mean in zip(tiles, means, strict=True))
    assert set(tiles) <= set(all_tiles("sm_90a", dtype))
    assert choose_tile("sm_90a", dtype, 0, 0).tokens == 8
