"""Every quantizer kernel compiles for every architecture: no spills, whole vectors, few instructions a value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sass import Machine, tool_folder

pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")
if tool_folder() is None:
    pytest.skip("needs nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm", allow_module_level=True)

from quant_kernels import decoders_of, encoders_of

from moe_layer.kernel_cache import compile_artifacts
from moe_layer.quant import available_formats, get_format, launch

BF16, FP32 = torch.bfloat16, torch.float32
ENCODED = [(name, dtype, False) for name in ("fp8", "mxfp8", "mxfp4", "nvfp4") for dtype in (BF16, FP32)]
ENCODED += [("nvfp4", BF16, True), ("nvfp4", FP32, True)]
DECODED = [(name, dtype) for name in ("fp8", "mxfp8", "mxfp4", "nvfp4") for dtype in (BF16, FP32)]
# Every kernel for the longest rows of the models; where a block holds a row, and for short last scale blocks, others.
ENCODER_CASES = [("sm_90a", 7168, *case) for case in ENCODED]
ENCODER_CASES += [("sm_90a", 320, "fp8", BF16, False), ("sm_90a", 16384, "nvfp4", BF16, False)]
ENCODER_CASES += [("sm_90a", 32768, "nvfp4", BF16, False), ("sm_90a", 128, "nvfp4", BF16, False)]
ENCODER_CASES += [("sm_100a", 7168, *case) for case in ENCODED if case[1] == BF16]
ENCODER_CASES += [("sm_103a", 16384, *case) for case in ENCODED if case[1] == FP32]
DECODER_CASES = [("sm_90a", 7168, *case) for case in DECODED]
DECODER_CASES += [("sm_100a", 7168, *case) for case in DECODED if case[1] == BF16]
DECODER_CASES += [("sm_103a", 320, *case) for case in DECODED if case[1] == FP32]

# Instructions in all of the kernel for a value, rare branches and slow divisions with them, on sm_90a. At 85 % of an
# H200's copy rate about 24 can be issued a BF16 value of an 8-bit format, 20 of a 4-bit one, 40 an FP32 value.
MOST_ENCODING = {
    ("fp8", 2): 16, ("mxfp8", 2): 12, ("mxfp4", 2): 10, ("nvfp4", 2): 14,
    ("fp8", 4): 30, ("mxfp8", 4): 12, ("mxfp4", 4): 12, ("nvfp4", 4): 30,
}  # fmt: skip
MOST_DECODING = {2: 11, 4: 15}  # in kernels for many rows


def compiled(spec: Any, arch: str, folder: Path) -> Machine:
    function, signature = launch.source(spec)
    machine = Machine(compile_artifacts(function, spec, signature, arch).artifacts.CUBIN, folder)
    assert machine.stack == 0 and machine.local == 0 and not machine.all(r"(LDL|STL)(\..*)?"), "spills"
    assert spec.threads * spec.blocks_per_sm * machine.registers <= 65536
    waits = machine.all("ACQBULK")
    assert waits, "waits for the kernel before it"
    early = machine.reachable([0], avoiding=lambda i: i.is_a("ACQBULK"))
    assert not machine.all(r"(LDG|STG)(\..*)?", early), "touches memory before its predecessor is done"
    return machine


def instructions(machine: Machine) -> int:
    return len(machine.code) - len(machine.all("NOP"))


@pytest.mark.parametrize(("arch", "columns", "name", "dtype", "given"), ENCODER_CASES)
def test_encoders(arch, columns, name, dtype, given, tmp_path):
    specs = encoders_of(get_format(name), dtype, columns, given=given)
    assert set(specs) == ({"row"} if name == "nvfp4" and not given else {"few", "many"})
    for kind, spec in specs.items():
        if kind == "few" and (arch != "sm_90a" or dtype == FP32):
            continue  # the same code, in smaller blocks
        machine = compiled(spec, arch, tmp_path)
        loads = spec.chunks * spec.vector_bytes // 16
        assert len(machine.all(r"LDG\.E(\.\w+)*\.128(\.\w+)*")) == loads
        assert len(machine.all(r"LDG\..*")) == loads + (spec.chunks if given else 0)
        assert len(machine.all(r"STG\.E(\.\w+)*\.128(\.\w+)*")) == spec.chunks
        assert len(machine.all(r"BAR\..*")) == (1 if spec.warps_per_row > 1 else 0)
        if arch == "sm_90a":
            values = spec.chunks * spec.encoder.vector_values
            assert instructions(machine) <= values * MOST_ENCODING[name, dtype.itemsize], instructions(machine) / values
        elif name in ("mxfp4", "nvfp4"):
            assert len(machine.all(r"F2FP\.SATFINITE\.E2M1.*")) >= 16 * spec.chunks, "converts by instruction"


@pytest.mark.parametrize(("arch", "columns", "name", "dtype"), DECODER_CASES)
def test_decoders(arch, columns, name, dtype, tmp_path):
    specs = decoders_of(get_format(name), dtype, columns)
    for kind, spec in specs.items():
        if kind == "few" and (arch != "sm_90a" or dtype == FP32):
            continue
        machine = compiled(spec, arch, tmp_path)
        assert len(machine.all(r"STG\..*")) == len(machine.all(r"STG\.E(\.\w+)*\.128(\.\w+)*")) == spec.chunks
        assert len(machine.all(r"LDG\..*")) == spec.chunks * (3 if name == "nvfp4" else 2)
        first_store = machine.all(r"STG\..*")[0]
        assert all(load < first_store for load in machine.all(r"LDG\..*")), "all loads are in flight at once"
        if arch == "sm_90a" and kind == "many":
            assert instructions(machine) <= spec.chunks * spec.values * MOST_DECODING[dtype.itemsize]


def test_which_formats_have_kernels():
    with_kernels = {"fp8", "mxfp8", "mxfp4", "nvfp4"}
    for name in available_formats():
        fmt = get_format(name)
        for dtype in (BF16, FP32):
            assert (fmt.kernel_encoder(dtype) is not None) == (name in with_kernels)
        assert (fmt.kernel_decoder() is not None) == (name in with_kernels)


@pytest.mark.parametrize("columns", [16, 32, 48, 128, 320, 2304, 7168, 16384, 32768])
@pytest.mark.parametrize(("name", "dtype", "given"), ENCODED)
def test_every_value_has_a_thread(name, dtype, given, columns):
    fmt = get_format(name)
    encoder = fmt.kernel_encoder(dtype, per_row_global_scale=not given)
    assert encoder is not None
    if columns % encoder.vector_values:
        return
    for spec in encoders_of(fmt, dtype, columns, given=given).values():
        assert spec.vectors * encoder.vector_values == columns and spec.threads % 32 == 0 and spec.threads <= 1024
        entries = spec.padded_vectors // encoder.vectors_per_scale
        shape = fmt.scale_shape(1, columns)
        assert shape is not None and fmt.scale_dtype is not None
        assert entries * encoder.scale_entry_bytes == shape[1] * fmt.scale_dtype.itemsize
        for rows in (1, 2, 3, 127, 4096):
            threads = spec.grid(rows) * spec.threads
            if spec.warps_per_row:
                assert spec.threads_per_row * spec.chunks >= spec.vectors
                assert 0 <= spec.grid(rows) * spec.rows - rows < spec.rows
            else:
                assert 0 <= threads * spec.chunks - rows * spec.padded_vectors < spec.threads * spec.chunks
