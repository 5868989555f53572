"""Every one-sided kernel compiles for every architecture, without spills, to the instructions that its protocol needs.

The orders that the protocols rest on (docs/protocols.md) are checked in the machine code: along every path from the
kernel's entry, not by counting. A path may not pass the atomic by which a rank claims its error record, since what
follows it is the report of a failure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sass import Instruction, Machine, tool_folder

pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")
if tool_folder() is None:
    pytest.skip("needs nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm", allow_module_level=True)

from moe_layer.comm import launch
from moe_layer.comm.layout import MAX_PARTS
from moe_layer.comm.spec import CombineSpec, DispatchSpec
from moe_layer.kernel_cache import ARCHITECTURES, compile_artifacts
from moe_layer.quant.encoders import Fp8Encoder, MxFp4Encoder, MxFp8Encoder, NvFp4Encoder

# DispatchSpec: ranks, top_k, experts, contiguous, hidden bytes, scale bytes, weights, bytes an id.
# CombineSpec: ranks, row bytes, bytes an element of the partial results, bytes an element of the output.
LAYERS = {
    "V4.1-Flash MXFP8, 2 ranks": (DispatchSpec(2, 6, 384, True, 5120, 160, True, 4), CombineSpec(2, 10240, 2, 2)),
    "V4.1-Flash MXFP8, 8 ranks": (DispatchSpec(8, 6, 384, True, 5120, 160, True, 4), CombineSpec(8, 10240, 2, 2)),
    "V3 BF16, 8 ranks": (DispatchSpec(8, 8, 256, True, 14336, 0, True, 4), CombineSpec(8, 14336, 2, 2)),
    "Kimi-K3 MXFP8, 2 ranks": (DispatchSpec(2, 16, 896, True, 3584, 112, True, 4), CombineSpec(2, 7168, 2, 2)),
    "V3 FP8, 2 ranks": (DispatchSpec(2, 8, 256, True, 7168, 224, True, 4), CombineSpec(2, 14336, 2, 2)),
    "Kimi-K3 MXFP8, 4 ranks": (DispatchSpec(4, 16, 896, True, 3584, 112, True, 4), CombineSpec(4, 7168, 2, 4)),
    "narrowest rows, table": (DispatchSpec(3, 1, 7, False, 16, 0, False, 8), CombineSpec(3, 16, 2, 4)),
    "widest rows, table": (DispatchSpec(2, 32, 40, False, 65536, 16, True, 8), CombineSpec(2, 65536, 4, 2)),
    "top-22, table": (DispatchSpec(6, 22, 61, False, 2064, 48, True, 4), CombineSpec(6, 4128, 2, 2)),
    "V3 FP8, 16 ranks": (DispatchSpec(16, 8, 256, True, 7168, 224, True, 4), CombineSpec(16, 14336, 2, 2)),
    "FP8 combine, 8 ranks": (DispatchSpec(8, 8, 256, True, 7168, 224, True, 4), CombineSpec(8, 14336, 1, 2)),
}
# DispatchSpecs that quantize BF16 rows: by format, of rows of so many values.
QUANTIZING = {
    "fp8": (Fp8Encoder(), 7168, 224),
    "mxfp8": (MxFp8Encoder(), 5120, 160),
    "mxfp4": (MxFp4Encoder(), 7168, 224),
    "nvfp4": (NvFp4Encoder(True), 7168, 464),
    "nvfp4, one scale": (NvFp4Encoder(False), 3584, 224),
}
LAYERS |= {
    f"quantizing to {name}, {ranks} ranks": (
        DispatchSpec(ranks, 8, 256, True, columns * 16 // encoder.vector_values, scale_bytes, True, 4, encoder=encoder),
        CombineSpec(ranks, 2 * columns, 2, 2),
    )
    for name, (encoder, columns, scale_bytes) in QUANTIZING.items()
    for ranks in (2, 8)
}
BOTH_WAYS = ("dispatch", "combine")
SENTINEL = [f"sentinel_{way}/{parts}" for way in BOTH_WAYS for parts in (1, MAX_PARTS)]
ALL = ["fence_dispatch", "fence_combine", *SENTINEL]
FP8 = ["fence_combine", "fp8_partials"]
GIVE_UP = [f"give_up/{way}" for way in BOTH_WAYS]
DISPATCH = ["fence_dispatch", *(f"sentinel_dispatch/{parts}" for parts in (1, MAX_PARTS))]
# sm_90a sees every layer; the other architectures the one with most registers at stake, and the extremes.
CHOSEN = {
    "sm_90a": {
        "V4.1-Flash MXFP8, 2 ranks": [*ALL, *GIVE_UP],
        "V4.1-Flash MXFP8, 8 ranks": ALL,
        "V3 BF16, 8 ranks": ["fence_dispatch", "fence_combine", "sentinel_dispatch/1"],
        "Kimi-K3 MXFP8, 2 ranks": ["sentinel_dispatch/1"],
        "V3 FP8, 2 ranks": ["sentinel_dispatch/1"],
        "Kimi-K3 MXFP8, 4 ranks": ALL,
        "narrowest rows, table": ["fence_dispatch", "fence_combine", "sentinel_dispatch/1", "sentinel_combine/1"],
        "widest rows, table": ALL,
        "top-22, table": ["fence_dispatch", "sentinel_dispatch/4"],
        "V3 FP8, 16 ranks": ["fence_dispatch", "fence_combine", "sentinel_combine/1"],
        "FP8 combine, 8 ranks": FP8,
        **{f"quantizing to {name}, 2 ranks": DISPATCH for name in QUANTIZING},
        **{f"quantizing to {name}, 8 ranks": DISPATCH[:2] for name in ("fp8", "nvfp4")},
    },
    **{
        arch: {
            "V4.1-Flash MXFP8, 2 ranks": GIVE_UP,
            "V4.1-Flash MXFP8, 8 ranks": ALL,
            "narrowest rows, table": ["fence_dispatch", "sentinel_combine/1"],
            "widest rows, table": ["fence_combine"],
            "FP8 combine, 8 ranks": FP8,
            **{f"quantizing to {name}, 2 ranks": DISPATCH[index % 2 :: 2] for index, name in enumerate(QUANTIZING)},
            "quantizing to nvfp4, 8 ranks": DISPATCH[:2],
        }
        for arch in ("sm_100a", "sm_103a")
    },
}
CASES = [(arch, layer, kernel) for arch, chosen in CHOSEN.items() for layer in chosen for kernel in chosen[layer]]


@dataclass(frozen=True)
class Request:
    """What the library asks the compiler for."""

    function: Any
    spec: Any
    signature: str


def requested(monkeypatch: pytest.MonkeyPatch, layer: str) -> dict[str, Request]:
    """Every kernel that the library compiles for a layer, by name."""
    dispatch, combine = LAYERS[layer]
    found: dict[str, Request] = {}

    def record(function: Any, spec: Any, signature: str, arch: str) -> Callable[..., None]:
        name = function.__name__
        if name == "give_up":
            name += "/combine" if spec.in_combine else "/dispatch"
        elif name.startswith("sentinel"):
            name += f"/{spec.parts}"
        assert name not in found
        found[name] = Request(function, spec, signature)
        return lambda *arguments: None

    monkeypatch.setattr(launch, "get_kernel", record)
    launch.dispatch_kernels(dispatch, "sm_90a")
    launch.combine_kernels(combine, "sm_90a")
    for in_combine in (False, True):
        launch.give_up_kernel(dispatch.ep_size, in_combine, "sm_90a")
    return found


def test_no_kernel_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that somebody adds must be added here, and every architecture must be served."""
    assert set(CHOSEN) == set(ARCHITECTURES)
    chosen = {kernel for layers in CHOSEN.values() for kernels in layers.values() for kernel in kernels}
    everything = {kernel for layer in LAYERS for kernel in requested(monkeypatch, layer)}
    assert chosen == everything


@pytest.mark.parametrize(("arch", "layer", "kernel"), CASES)
def test_kernel(arch: str, layer: str, kernel: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    request = requested(monkeypatch, layer)[kernel]
    compiled = compile_artifacts(request.function, request.spec, request.signature, arch)
    machine = Machine(compiled.artifacts.CUBIN, tmp_path)
    check_registers(machine, getattr(request.spec, "threads", 32))
    check_order_of_launches(machine)
    CHECKS[kernel.split("/")[0]](machine, request.spec)
    if getattr(request.spec, "encoder", None) is not None:
        check_quantizing(machine, request.spec, arch, kernel)


# --- what every kernel must be ----------------------------------------------------------------------------------------
GLOBAL = r"(LDG|STG|ATOMG|ATOM|RED|REDG|LD|ST)(\..*)?"
WIDE_LOAD, WIDE_STORE = r"LDG\.E(\.\w+)*\.128(\.\w+)*", r"STG\.E(\.\w+)*\.128(\.\w+)*"
WIDE_LOAD_SYS, WIDE_STORE_SYS = r"LDG\.E(\.\w+)*\.128\.STRONG\.SYS", r"STG\.E(\.\w+)*\.128\.STRONG\.SYS"
FLAG_STORE = r"STG\.E\.64\.STRONG\.SYS"
FENCE_SYS, FENCE_GPU = r"MEMBAR\.\w+\.SYS", r"MEMBAR\.\w+\.GPU"
ACQUIRE = r"CCTL\.IVALL"  # what an acquire adds to a load: nothing stale in L1 afterwards
REGISTERS_A_MULTIPROCESSOR = 65536


def claims_error_record(instruction: Instruction) -> bool:
    """The only compare-and-swap of these kernels is the one of a rank's error record."""
    return instruction.is_a(r"ATOMG\.E\.CAS\..*")


def check_registers(machine: Machine, threads: int) -> None:
    assert (machine.stack, machine.local) == (0, 0), f"{machine.stack} bytes of stack, {machine.local} local"
    assert not machine.all(r"(LDL|STL)(\..*)?")
    warps = -(-threads // 32)
    # Registers are handed out in eights to a thread; a block must fit a multiprocessor.
    assert warps * 32 * (-(-machine.registers // 8) * 8) <= REGISTERS_A_MULTIPROCESSOR


def check_order_of_launches(machine: Machine) -> None:
    """Programmatic launch starts a kernel before the one ahead of it has ended: nothing is touched until it has."""
    before = machine.reachable([0], lambda instruction: instruction.is_a("ACQBULK"))
    assert before
    assert not machine.all(GLOBAL, before)


def normal_path(machine: Machine) -> set[int]:
    """Everything that runs while nothing fails."""
    return machine.reachable([0], claims_error_record)


def only_fence(machine: Machine) -> int:
    """The one system-scope fence of the normal path."""
    found = machine.all(FENCE_SYS, normal_path(machine))
    assert len(found) == 1, f"{len(found)} system-scope fences"
    return found[0]


def check_acquires(machine: Machine) -> None:
    """A wait acquires, also on paths with no fence or acq_rel atomic, whose other half invalidates L1 as well."""
    path = machine.reachable([0], lambda i: claims_error_record(i) or i.is_a(rf"{FENCE_SYS}|{FENCE_GPU}"))
    assert machine.all(ACQUIRE, path)


def flags_without(machine: Machine, avoided: list[int]) -> list[int]:
    """The 64-bit words that can be sent to a peer without passing one of the instructions."""
    addresses = {machine.code[i].address for i in avoided}
    return machine.all(FLAG_STORE, machine.reachable([0], lambda instruction: instruction.address in addresses))


# --- and each protocol's own ------------------------------------------------------------------------------------------
def check_fence_dispatch(machine: Machine, spec: DispatchSpec) -> None:
    assert len(machine.all(WIDE_LOAD)) >= spec.chunks
    assert len(machine.all(WIDE_STORE_SYS)) >= spec.chunks * spec.ep_size
    # One release a rank and step, and the flag only after it; the other word is the announcement, which needs none.
    fence = only_fence(machine)
    assert len(machine.all(FLAG_STORE)) - len(flags_without(machine, [fence])) == 1
    after = machine.reachable(machine.successors(fence))
    assert not machine.all(WIDE_STORE_SYS, after), "payload after the release"
    # The counter of finished blocks is acq_rel; the counters of slots are relaxed.
    adds = machine.all(r"ATOMG\.E\.ADD\..*")
    counted = machine.reachable([0], lambda instruction: instruction.is_a(FENCE_GPU))
    assert len(adds) - len(machine.all(r"ATOMG\.E\.ADD\..*", counted)) == 1
    check_acquires(machine)


def check_fence_combine(machine: Machine, spec: CombineSpec) -> None:
    assert len(machine.all(WIDE_LOAD_SYS)) >= spec.ep_size
    assert not machine.all(WIDE_STORE_SYS), "Fence's combine pulls"
    fence = only_fence(machine)
    assert machine.all(FLAG_STORE)
    assert not flags_without(machine, [fence])
    check_acquires(machine)


def check_sentinel_dispatch(machine: Machine, spec: DispatchSpec) -> None:
    assert len(machine.all(WIDE_LOAD)) >= spec.chunks
    assert len(machine.all(WIDE_STORE_SYS)) >= spec.chunks * spec.ep_size
    assert len(machine.all(WIDE_LOAD_SYS)) >= spec.chunks * spec.ep_size
    # Data are their own flags: nothing orders anything, and nothing is handed out by atomics.
    normal = normal_path(machine)
    assert not machine.all(rf"{FENCE_SYS}|{FENCE_GPU}|{ACQUIRE}", normal)
    assert not machine.all(r"(ATOMG|RED|REDG)\..*", normal)


def check_sentinel_combine(machine: Machine, spec: CombineSpec) -> None:
    assert len(machine.all(WIDE_STORE_SYS)) >= spec.ep_size
    assert len(machine.all(WIDE_LOAD_SYS)) >= spec.ep_size
    # One warp posts the flag for a later Fence step, behind a fence of its own; no row passes that fence.
    fence = only_fence(machine)
    assert machine.all(FLAG_STORE)
    assert not flags_without(machine, [fence])
    after = machine.reachable(machine.successors(fence))
    assert not machine.all(rf"{WIDE_LOAD}|{WIDE_STORE}", after)
    assert not machine.all(r"(ATOMG|RED|REDG)\..*", normal_path(machine))


def check_quantizing(machine: Machine, spec: DispatchSpec, arch: str, kernel: str) -> None:
    """Values are converted by the hardware where it can; blocks meet by shuffles, scales through shared memory."""
    encoder = spec.encoder
    assert encoder is not None
    values = spec.chunks * encoder.vector_values
    if encoder.vector_values == 16:
        assert len(machine.all(r"F2FP\..*E4M3.*")) >= values // 2
    elif arch == "sm_90a":  # E2M1 by additions to two numbers
        assert len(machine.all(r"F(FMA|ADD)(\..*)?")) >= 2 * values
    else:
        assert len(machine.all(r"F2FP\..*E2M1.*")) >= values // 2
    assert len(machine.all(r"SHFL\.BFLY.*")) >= spec.chunks * (encoder.vectors_per_scale.bit_length() - 1)
    assert machine.all(r"LDS\.128")
    assert len(machine.all(WIDE_LOAD)) >= values // 8
    # Payload warps meet at a barrier of their own, so that the routing is not held up.
    own = [i for i in machine.all(r"BAR\.SYNC.*") if re.match(r"0x1\b", machine.code[i].operands)]
    assert bool(own) == (encoder.row_scale or kernel.startswith("sentinel"))


def check_fp8_partials(machine: Machine, spec: CombineSpec) -> None:
    assert len(machine.all(WIDE_LOAD)) >= 2 * spec.chunks
    assert machine.all(WIDE_STORE)
    assert machine.all(r"F2FP\..*E4M3.*")
    assert not machine.all(r".*\.SYS"), "local work"


def check_give_up(machine: Machine, spec: Any) -> None:
    assert machine.all(FLAG_STORE)
    if not spec.in_combine:  # the word that tells of the parameters goes after them
        assert not flags_without(machine, [only_fence(machine)])


CHECKS: dict[str, Callable[[Machine, Any], None]] = {
    "fence_dispatch": check_fence_dispatch,
    "fence_combine": check_fence_combine,
    "sentinel_dispatch": check_sentinel_dispatch,
    "sentinel_combine": check_sentinel_combine,
    "fp8_partials": check_fp8_partials,
    "give_up": check_give_up,
}
