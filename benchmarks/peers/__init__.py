"""Other libraries' code, timed by the same harness in the same run where it is installed.

A peer is a name and a module of this package, imported when it is first run. Such a module has

    cannot(case) -> str | None      why the peer does not do a case; needs no import of the peer
    works(ranks, case)              a context manager: a :class:`~moe_layer.benchmarks.harness.Work` for each local rank
    call(problem)                   of peers of the grouped GEMMs instead: a function that computes the product

What is not installed, or does not do a case, becomes a line that says so. Apart from NCCL's and PyTorch's, the adapters
were written from the sources named in them and have not been run.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moe_layer.errors import ConfigError


@dataclass(frozen=True)
class Peer:
    """One peer.

    Attributes:
        name: as on the command line.
        kind: the benchmark that it is a peer of: ``"a2a"``, ``"gemm"`` or ``"layer"``.
        what: in a few words.
        package: what must be importable; empty for PyTorch's own.
        adapter: module of this package.
    """

    name: str
    kind: str
    what: str
    package: str
    adapter: str


PEERS = (
    Peer("nccl", "a2a", "all_to_all_single over NCCL, row counts known", "", "nccl"),
    Peer("flashinfer", "a2a", "FlashInfer's one-sided all-to-all", "flashinfer", "flashinfer_a2a"),
    Peer("deepep", "a2a", "DeepEP's normal kernels", "deep_ep", "deepep_normal"),
    Peer("deepep-ll", "a2a", "DeepEP's low-latency kernels", "deep_ep", "deepep_low_latency"),
    Peer("torch", "gemm", "torch._grouped_mm", "", "torch_grouped"),
    Peer("deepgemm", "gemm", "DeepGEMM's grouped products", "deep_gemm", "deepgemm"),
    Peer("megamoe", "layer", "DeepGEMM's MegaMoE: the layer in one kernel", "deep_gemm", "megamoe"),
    Peer("vllm", "layer", "vLLM's fused_experts, one rank", "vllm", "vllm_experts"),
    Peer("sglang", "layer", "SGLang's fused_experts, one rank", "sglang", "sglang_experts"),
)


def names(kind: str) -> tuple[str, ...]:
    """The peers of a benchmark."""
    return tuple(peer.name for peer in PEERS if peer.kind == kind)


def chosen(kind: str, given: Sequence[str]) -> tuple[str, ...]:
    """The peers of a benchmark that are named, or all of them for ``("all",)``.

    Raises:
        ConfigError: one that this benchmark does not have.
    """
    known = names(kind)
    for name in given:
        if name not in (*known, "all"):
            raise ConfigError(f"unknown peer {name!r}; known: {', '.join(known)}, all")
    return known if "all" in given else tuple(given)


def get_peer(name: str) -> Peer:
    """The peer of that name.

    Raises:
        ConfigError: there is none.
    """
    for peer in PEERS:
        if peer.name == name:
            return peer
    raise ConfigError(f"unknown peer {name!r}; known: {', '.join(peer.name for peer in PEERS)}")


def missing(name: str, device_type: str) -> str | None:
    """Why a peer cannot run here, in a line; None if it can.

    Args:
        device_type: what the benchmark runs on; all peers need ``"cuda"``.
    """
    peer = get_peer(name)
    if peer.package and importlib.util.find_spec(peer.package) is None:
        return f"{peer.package} is not installed"
    if device_type != "cuda" or not torch.cuda.is_available():
        return "runs on GPUs, and there is none here"
    if not peer.package:
        return "this PyTorch has no NCCL" if name == "nccl" and not dist.is_nccl_available() else None
    try:
        importlib.import_module(peer.package)
    except Exception as error:  # a package that is broken is one that is not there
        return f"{peer.package} does not import: {type(error).__name__}: {' '.join(str(error).split())}"
    return None


def adapter(name: str) -> Any:
    """The peer's module, see above."""
    return importlib.import_module(f"{__name__}.{get_peer(name).adapter}")


def absence(name: str, case: Any, device_type: str) -> str | None:
    """Why a case of a peer is not measured: it is not there, or does not do it. None if it is."""
    why: str | None = missing(name, device_type)
    return why if why is not None else adapter(name).cannot(case)
