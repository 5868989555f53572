"""The indexing kernels, without a GPU: compiled for every architecture, chosen by size, and wrong operands refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_layer.errors import CapacityError, TensorError
from moe_layer.gemm import index_launch
from moe_layer.gemm.index_launch import CLUSTER, IndexSpec, build_index, choose, chunk_of, variants

MULTIPROCESSORS = 132
GLOBAL = r"(LDG|STG|ATOMG|ATOM|RED|REDG|LD|ST)(\..*)?"


# --- the choice of kernel ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("experts", [1, 48, 512, 513, 1024])
@pytest.mark.parametrize("top_k", [1, 6, 16, 32])
def test_every_size_has_a_kernel_whose_blocks_reach_all_selections(experts: int, top_k: int) -> None:
    for selections in (1, 31, 1024, 1025, 4096, 4097, 32768, 32769, 65537, 524288, 10_000_000, 2**31 - 1):
        spec = choose(experts, top_k, 0, selections)
        chunk = chunk_of(spec, selections, MULTIPROCESSORS)
        blocks = spec.blocks or -(-selections // chunk)
        assert blocks * chunk >= selections
        assert chunk % 32 == 0
        if spec.blocks:
            assert chunk <= spec.tile
        else:
            assert blocks <= MULTIPROCESSORS and (blocks - 1) * chunk < selections


def test_shared_memory_fits() -> None:
    """What a Hopper block may have, with the most experts and the longest table."""
    for spec in variants(index_launch.MAX_EXPERTS, 32, index_launch.MAX_TABLE).values():
        words = spec.warps * (spec.experts + 1) + spec.tile + 3 * (spec.experts + 4) + spec.table + 2 * spec.warps
        words += max(1, spec.blocks) * spec.experts + 8
        assert 4 * words <= 227 * 1024


def test_numbers_fit_their_fields() -> None:
    """A staged word is the number in the tile below 16 bits, and the expert above."""
    for experts in (1, 512, 1024):
        for spec in variants(experts, 8, 0).values():
            assert spec.tile <= 1 << 16 and spec.experts <= spec.threads and spec.experts < 1 << 15


# --- operands that are refused ----------------------------------------------------------------------------------------
def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("ids", "message"), [
    (meta(4, 2, dtype=torch.int64), r"topk_ids must be \[slots, top_k\] int32, got \[4, 2\] torch.int64"),
    (meta(4), r"topk_ids must be \[slots, top_k\] int32, got \[4\]"),
    (meta(4, 33), r"topk_ids must have 1 … 32 columns, got \[4, 33\]"),
    (meta(4, 0), r"topk_ids must have 1 … 32 columns, got \[4, 0\]"),
    (meta(4, 6).t()[:, :2], r"topk_ids must have contiguous rows, got strides \(1, 6\)"),
    (torch.zeros(4, 2, dtype=torch.int32), "topk_ids must lie on a GPU, got cpu"),
    (torch.empty_strided((2, 1), (1 << 29, 1), dtype=torch.int32, device="meta"), "rows less than 2 GiB apart"),
])  # fmt: skip
def test_wrong_ids(ids: torch.Tensor, message: str) -> None:
    with pytest.raises(TensorError, match=message):
        build_index(ids, 0, 4)


def test_too_many() -> None:
    with pytest.raises(CapacityError, match="2147483648 selections do not fit int32 row numbers"):
        build_index(meta(1 << 26, 32), 0, 4)
    ids = FakeCuda(torch.zeros(4, 2, dtype=torch.int32))
    with pytest.raises(CapacityError, match="1025 local experts; the indexing kernel counts up to 1024"):
        build_index(ids, 0, 1025)
    with pytest.raises(TensorError, match="no range of int32 ids"):
        build_index(ids, 2**31 - 2, 4)
    with pytest.raises(TensorError, match="no range of int32 ids"):
        build_index(ids, -1, 4)


class FakeCuda:
    """Answers as a tensor on a GPU, so that checks after the device's run here."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.device = torch.device("cuda", 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


def test_wrong_tables() -> None:
    ids = FakeCuda(torch.zeros(4, 2, dtype=torch.int32))
    with pytest.raises(TensorError, match=r"local_table must be \[num_experts\] int32, got \[8\] torch.int64"):
        build_index(ids, 0, 4, local_table=torch.zeros(8, dtype=torch.int64))
    with pytest.raises(TensorError, match="local_table lies on cpu, topk_ids on cuda:0"):
        build_index(ids, 0, 4, local_table=torch.zeros(8, dtype=torch.int32))
    with pytest.raises(TensorError, match="local_table must be contiguous, got stride 2"):
        build_index(ids, 0, 4, local_table=FakeCuda(torch.zeros(8, dtype=torch.int32)[::2]))
    with pytest.raises(CapacityError, match="local_table has 4097 entries; the indexing kernel holds up to 4096"):
        build_index(ids, 0, 4, local_table=FakeCuda(torch.zeros(4097, dtype=torch.int32)))


# --- what a launch passes ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["few", "block", "cluster", "grid"])
def test_arguments_of_a_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled function takes one-dimensional bytes, which tell it the device, then integers."""
    passed: list[Any] = []
    monkeypatch.setattr(index_launch, "index_kernel", lambda spec, arch: lambda *arguments: passed.extend(arguments))
    monkeypatch.setattr(index_launch, "device_arch", lambda device: "sm_90a")
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(index_launch, "_loaded", index_launch._loaded.__wrapped__)
    ids = torch.zeros(50, 12, dtype=torch.int32)[:, :6]
    offsets, slots, rows = (torch.zeros(n, dtype=torch.int32) for n in (49, 300, 300))
    spec = variants(48, 6, 0)[name]
    index_launch.launch(spec, ids, 96, None, offsets, slots, rows.view(50, 6))
    anchor, *scalars = passed
    assert (anchor.dim(), anchor.dtype) == (1, torch.uint8)
    assert len(scalars) == len(index_launch.SIGNATURE)
    assert scalars[:5] == [ids.data_ptr(), 0, offsets.data_ptr(), slots.data_ptr(), rows.data_ptr()]
    chunk, blocks = scalars[-2:]
    assert scalars[6:9] == [48, 96, 300] and chunk * blocks >= 300 and blocks == (spec.blocks or 1)


# --- machine code -----------------------------------------------------------------------------------------------------
# experts, top_k, table: a model's layer, the extremes, a table.
LAYERS = {
    "V3": (32, 8, 0),
    "Kimi-K3": (112, 16, 0),
    "balanced": (50, 6, 392),
    "most": (1024, 32, 4096),
    "one": (1, 1, 0),
}
CASES = [("sm_90a", layer, name) for layer in LAYERS for name in ("few", "block", "cluster", "grid")]
CASES += [(arch, "Kimi-K3", name) for arch in ("sm_100a", "sm_103a") for name in ("few", "block", "cluster", "grid")]


def machine(spec: IndexSpec, arch: str, folder: Path, kernel: str) -> Any:
    pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")
    from sass import Machine, tool_folder

    from moe_layer.gemm.index_kernel import build_index_kernels
    from moe_layer.kernel_cache import compile_artifacts

    if tool_folder() is None:
        pytest.skip("needs nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm")
    compiled = compile_artifacts(build_index_kernels, spec, index_launch.SIGNATURE, arch)
    return Machine(compiled.artifacts.CUBIN, folder, kernel)


@pytest.mark.parametrize(("arch", "layer", "name"), CASES)
def test_place_kernel(arch: str, layer: str, name: str, tmp_path: Path) -> None:
    spec = variants(*LAYERS[layer])[name]
    code = machine(spec, arch, tmp_path, "place_kernel")
    assert (code.stack, code.local) == (0, 0), "spills"
    assert spec.threads * -(-code.registers // 8) * 8 <= 65536
    assert len(code.all(r"MATCH\.ANY")) >= spec.steps
    before = code.reachable([0], lambda instruction: instruction.is_a("ACQBULK"))
    touched = code.all(GLOBAL, before)
    if name == "grid":
        # Ahead of the wait for the counts it reads ids and table, past L1, and writes nothing.
        assert touched and all(code.code[i].is_a(r"LDG\.E\.STRONG\.GPU") for i in touched)
    else:
        assert not touched, "global memory before the kernel ahead has ended"
    loads = code.all(r"LDG\.E\.STRONG\.GPU")
    assert len(loads) >= spec.steps
    # All ids of a tile are under way before the first is looked at.
    first_match = code.all(r"MATCH\.ANY")[0]
    assert sum(1 for i in loads if i < first_match) >= spec.steps
    sent = code.all(r"STAS(\..*)?")
    assert len(sent) == (CLUSTER if name == "cluster" else 0)
    assert bool(code.all(r"UCGABAR_ARV(\..*)?")) == (name == "cluster")
    assert not code.all(r"(ATOMG|REDG|RED)(\..*)?"), "no state outlives a launch"


@pytest.mark.parametrize(("arch", "layer"), [(a, x) for a, x, name in CASES if name == "grid"])
def test_count_kernel(arch: str, layer: str, tmp_path: Path) -> None:
    spec = variants(*LAYERS[layer])["grid"]
    code = machine(spec, arch, tmp_path, "count_kernel")
    assert (code.stack, code.local) == (0, 0), "spills"
    before = code.reachable([0], lambda instruction: instruction.is_a("ACQBULK"))
    assert not code.all(GLOBAL, before)
    # The second launch relies on it: its blocks come up only after this one's wait.
    starts = code.reachable([0], lambda instruction: instruction.is_a("PREEXIT"))
    assert code.all("ACQBULK", starts) and not code.all(GLOBAL, starts)
    assert len(code.all(r"ATOMS\..*")) >= spec.steps


def test_both_launches_of_a_grid_fit_a_multiprocessor(tmp_path: Path) -> None:
    """The second one's blocks rank their tiles beside the first one's."""
    spec = variants(*LAYERS["Kimi-K3"])["grid"]
    registers = [machine(spec, "sm_90a", tmp_path, kernel).registers for kernel in ("place_kernel", "count_kernel")]
    assert sum(-(-r // 8) * 8 * spec.threads for r in registers) <= 65536


def test_a_wider_tile_still_compiles(tmp_path: Path) -> None:
    """The steps are a parameter: what the tuning script tries."""
    spec = replace(variants(*LAYERS["V3"])["block"], steps=16)
    assert machine(spec, "sm_90a", tmp_path, "place_kernel").stack == 0
