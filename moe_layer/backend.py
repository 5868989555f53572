"""Which code computes the experts on a device.

Kernels announce themselves by GPU architecture and formats::

    register_kernels("sm_90a", "moe_layer.gemm.sm90_backend:Sm90Backend", weights={"bf16"}, activations={"bf16"})

and their module is imported when a layer first needs it, so that ``import moe_layer`` needs neither a GPU nor the CuTe
DSL. What no kernel serves runs through PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module

import torch

from moe_layer.errors import UnsupportedDeviceError
from moe_layer.gemm.backend import ComputeBackend
from moe_layer.gemm.register_tiles import RegisterTiles
from moe_layer.wire import implied_activation_format


@dataclass(frozen=True)
class KernelEntry:
    """Kernels of one architecture: where they are and which formats they take."""

    arch: str
    target: str
    weights: frozenset[str]
    activations: frozenset[str]

    def load(self) -> ComputeBackend:
        """Import the backend and make one."""
        module, _, name = self.target.partition(":")
        backend: ComputeBackend = getattr(import_module(module), name)()
        return backend


_KERNELS: list[KernelEntry] = []


def register_kernels(arch: str, target: str, *, weights: Collection[str], activations: Collection[str]) -> None:
    """Announce kernels; the latest entry that fits wins.

    Args:
        arch: ``"sm_90a"``, ``"sm_100a"``, …
        target: ``"module:Class"`` of a :class:`~moe_layer.gemm.backend.ComputeBackend`.
        weights, activations: the format names it takes, in any combination.
    """
    _KERNELS.insert(0, KernelEntry(arch, target, frozenset(weights), frozenset(activations)))


LOW_BIT_WEIGHTS = {"int4", "mxfp4", "mxfp8", "nvfp4", "fp8_128x128_ue8m0", "fp8_32x32"}
ANY_WEIGHTS = {"bf16", "fp8_128x128"} | LOW_BIT_WEIGHTS
# Not those with FP32 scales, nvfp4 and fp8: BF16 rounds their values, and one in a hundred such roundings sends an FC1
# output to the next of the format's magnitudes (relative error of a layer 2e-2 and 7e-3 to 1e-2; measured). They run
# through PyTorch.
ANY_ACTIVATIONS = {"bf16", "mxfp4", "mxfp8"}
register_kernels("sm_90a", "moe_layer.gemm.widened:WidenedBackend", weights=ANY_WEIGHTS, activations=ANY_ACTIVATIONS)
register_kernels(
    "sm_90a",
    "moe_layer.gemm.low_bit_backend:LowBitBackend",
    weights=LOW_BIT_WEIGHTS,
    activations=ANY_ACTIVATIONS | {"nvfp4"},
)
register_kernels("sm_90a", "moe_layer.gemm.sm90_backend:Sm90Backend", weights={"bf16"}, activations={"bf16"})
register_kernels("sm_90a", "moe_layer.gemm.sm90_backend:Sm90Backend", weights={"fp8_128x128"}, activations={"fp8"})


def kernel_entries() -> tuple[KernelEntry, ...]:
    """All announced kernels, the preferred first."""
    return tuple(_KERNELS)


def resolve_device(device: torch.device | str | None) -> torch.device:
    """``device``, checked to exist; None means the current GPU where there is one, else the CPU.

    Raises:
        UnsupportedDeviceError: a GPU that is not there, or a kind of device that the layer does not run on.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(device)
    except RuntimeError:
        raise UnsupportedDeviceError(
            f"device {device!r} is none that PyTorch knows; use 'cpu', 'cuda' or 'cuda:N'"
        ) from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            build = "this PyTorch is built without CUDA" if torch.version.cuda is None else "no usable GPU was found"
            raise UnsupportedDeviceError(
                f"device {device} was asked for, but {build}; device='cpu' runs the PyTorch reference here"
            )
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device.index >= torch.cuda.device_count():
            raise UnsupportedDeviceError(
                f"device {device} was asked for, but this machine has {torch.cuda.device_count()} GPU(s): "
                f"cuda:0 … cuda:{torch.cuda.device_count() - 1}"
            )
    elif device.type != "cpu":
        raise UnsupportedDeviceError(f"device {device}: the layer runs on 'cuda' and on 'cpu' (PyTorch reference)")
    return device


def architecture(device: torch.device) -> str | None:
    """``"sm_90a"`` and the like for a CUDA device, None for the CPU."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def select_backend(device: torch.device | str | None, weight_format: str, activation_format: str) -> ComputeBackend:
    """The fastest backend for the device and formats: a registered kernel, else PyTorch.

    Raises:
        UnsupportedDeviceError: the device is not there; the message says what would run instead.
    """
    return backend_of(architecture(resolve_device(device)), weight_format, activation_format)


def backend_of(arch: str | None, weight_format: str, activation_format: str) -> ComputeBackend:
    """As :func:`select_backend`, for any architecture, here or not; None: the CPU."""
    for entry in _KERNELS:
        if entry.arch == arch and weight_format in entry.weights and activation_format in entry.activations:
            return entry.load()
    from moe_layer.gemm.reference import ReferenceBackend

    return ReferenceBackend()


def select_layout(
    device: torch.device | str | None,
    activation_format: str | None,
    weight_format: str,
    parts: int,
    rows: int,
    columns: int,
) -> RegisterTiles | None:
    """How the backend that :func:`select_backend` gives wants weights packed at load; None: as the format stores them.

    Args:
        activation_format: None: what the weight format implies.
        weight_format, parts, rows, columns: of a projection group, see :meth:`ComputeBackend.weight_layout`.
    """
    backend = select_backend(device, weight_format, activation_format or implied_activation_format(weight_format))
    return backend.weight_layout(weight_format, parts, rows, columns)
