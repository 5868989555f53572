"""Launching the finalize kernel: what it is specialised for, how a step is divided, checks before a launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from moe_layer.errors import CapacityError, TensorError
from moe_layer.gemm.index import ExpertIndex
from moe_layer.kernel_cache import device_arch, get_kernel

WARP = 32
VECTOR = 8  # values of a vector: 16 bytes of BF16, 32 of FP32
VECTOR_BYTES = 16
DTYPES = (torch.bfloat16, torch.float32)
MAX_TOP_K = 32
MAX_UNITS = 2**30  # 32-bit arithmetic on units
SIGNATURE = "lllllll" + "ii"


@dataclass(frozen=True)
class FinalizeSpec:
    """What the finalize kernel is specialised for.

    Attributes:
        hidden: values of a row.
        top_k: selections a slot, at most 32.
        row_bytes, output_bytes: of a value: 2 (BF16) or 4 (FP32).
        vectors: whether rows are whole vectors, aligned to 16 bytes; else a lane takes a value at a time.
        threads: of a block.
        chunks: vectors (or values) of a row that a lane holds.
        rows: of a slot, loaded before the first of them is used.
    """

    hidden: int
    top_k: int
    row_bytes: int
    output_bytes: int
    vectors: bool
    threads: int
    chunks: int
    rows: int

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def width(self) -> int:
        """Values of a vector."""
        return VECTOR if self.vectors else 1

    @property
    def columns(self) -> int:
        """Vectors of a row."""
        return self.hidden // self.width

    @property
    def parts(self) -> int:
        """Units of a warp's work in a slot."""
        return -(-self.columns // (WARP * self.chunks))

    @property
    def looked_up(self) -> int:
        """Units that the lanes of a warp look up at a time."""
        return WARP // self.top_k

    @property
    def selection_mask(self) -> int:
        """A bit for each selection of one unit."""
        return (1 << self.top_k) - 1


# Warps resident on a multiprocessor with the kernel for few slots (about 88 registers a thread).
FEW_WARPS_PER_SM = 20


def variants(hidden: int, top_k: int, row_bytes: int, output_bytes: int, vectors: bool) -> dict[str, FinalizeSpec]:
    """The kernels for rows of one kind. FP32 vectors are twice as long: half as many of them in flight."""
    wide = row_bytes == 4 and vectors
    return {
        "few": FinalizeSpec(hidden, top_k, row_bytes, output_bytes, vectors, 128, 1, 4 if wide else 8),
        "many": FinalizeSpec(hidden, top_k, row_bytes, output_bytes, vectors, 1024, 1 if wide else 2, 2),
    }


def choose(kinds: dict[str, FinalizeSpec], slots: int, multiprocessors: int) -> FinalizeSpec:
    """The kernel for a step: the one for few slots while all of its units are resident at once."""
    few = kinds["few"]
    return few if slots * few.parts <= FEW_WARPS_PER_SM * multiprocessors else kinds["many"]


def grid_of(spec: FinalizeSpec, slots: int, multiprocessors: int) -> int:
    """Blocks: enough for every unit, at most what is resident."""
    blocks = -(-slots * spec.parts // spec.warps)
    return min(blocks, multiprocessors * max(1, FEW_WARPS_PER_SM // spec.warps))


def finalize_kernel(spec: FinalizeSpec, arch: str) -> Callable[..., None]:
    """The compiled launch function, from memory, disk or the compiler."""
    from moe_layer.gemm.finalize_kernel import finalize_rows

    return get_kernel(finalize_rows, spec, SIGNATURE, arch)


def finalize_kernels(hidden: int, top_k: int, output_bytes: int, arch: str) -> list[Callable[..., None]]:
    """Every finalize kernel of a layer whose FC2 gives BF16 rows, contiguous ones."""
    kinds = variants(hidden, top_k, 2, output_bytes, hidden % VECTOR == 0)
    return [finalize_kernel(spec, arch) for spec in kinds.values()]


def finalize(rows: torch.Tensor, index: ExpertIndex, topk_weights: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Weight and sum each slot's rows into ``output[slot]``, as :meth:`ComputeBackend.finalize`, to the bit.

    Launches on torch's current stream and waits for nothing; may be captured in a CUDA graph once the kernel has been
    loaded by a first call.

    Args:
        rows: ``[≥ rows, hidden]`` BF16 or FP32.
        topk_weights: ``[S, top_k]`` fp32; rows may lie apart, as they do in the dispatch workspace.
        output: ``[S, hidden]`` BF16 or FP32; rows may lie apart. A slot without a local row is left as it is. Must not
            overlap the operands.

    Rows of whole 16-byte vectors at 16-byte addresses everywhere go a vector at a time, others a value at a time.

    Raises:
        TensorError: a wrong dtype, shape, stride or device.
    """
    _check(rows, index, topk_weights, output)
    slots, top_k = index.rows.shape
    if slots == 0 or top_k == 0 or rows.shape[1] == 0 or rows.shape[0] == 0:
        return output
    spec = choose(variants_for(rows, top_k, output), slots, _multiprocessors(output.device))
    launch(spec, rows, index, topk_weights, output)
    return output


def variants_for(rows: torch.Tensor, top_k: int, output: torch.Tensor) -> dict[str, FinalizeSpec]:
    """The kernels for these operands."""
    hidden = rows.shape[1]
    whole = hidden % VECTOR == 0 and all(
        t.data_ptr() % VECTOR_BYTES == 0 and (t.shape[0] < 2 or t.stride(0) * t.element_size() % VECTOR_BYTES == 0)
        for t in (rows, output)
    )
    return variants(hidden, top_k, rows.element_size(), output.element_size(), whole)


def launch(
    spec: FinalizeSpec, rows: torch.Tensor, index: ExpertIndex, topk_weights: torch.Tensor, output: torch.Tensor
) -> None:
    """Launch the kernel of ``spec`` on checked operands of at least one slot and row."""
    slots = output.shape[0]
    if slots * spec.parts > MAX_UNITS:
        raise CapacityError(f"{slots} slots of {spec.parts} parts; the finalize kernel numbers up to {MAX_UNITS}")
    kernel, anchor = _loaded(spec, output.device)
    kernel(
        anchor, rows.data_ptr(), rows.stride(0) * rows.element_size(), index.rows.data_ptr(),
        topk_weights.data_ptr(), topk_weights.stride(0) * 4,
        output.data_ptr(), output.stride(0) * output.element_size(),
        slots * spec.parts, grid_of(spec, slots, _multiprocessors(output.device)),
    )  # fmt: skip


@cache
def _loaded(spec: FinalizeSpec, device: torch.device) -> tuple[Callable[..., None], torch.Tensor]:
    """(launch function, what tells a launch its device: one-dimensional bytes)."""
    return finalize_kernel(spec, device_arch(device)), torch.zeros(1, dtype=torch.uint8, device=device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check(rows: torch.Tensor, index: ExpertIndex, topk_weights: torch.Tensor, output: torch.Tensor) -> None:
    if index.rows.dim() != 2 or index.rows.dtype != torch.int32 or not index.rows.is_contiguous():
        raise TensorError(
            f"index.rows must be contiguous [slots, top_k] int32, got {list(index.rows.shape)} {index.rows.dtype} with "
            f"strides {index.rows.stride()}"
        )
    slots, top_k = index.rows.shape
    if top_k > MAX_TOP_K:
        raise TensorError(f"index.rows must have at most {MAX_TOP_K} columns, got {top_k}")
    if rows.dim() != 2 or rows.dtype not in DTYPES:
        raise TensorError(f"rows must be [rows, hidden] bfloat16 or float32, got {list(rows.shape)} {rows.dtype}")
    if topk_weights.shape != (slots, top_k) or topk_weights.dtype != torch.float32:
        raise TensorError(
            f"topk_weights must be [{slots}, {top_k}] float32, got {list(topk_weights.shape)} {topk_weights.dtype}"
        )
    if output.shape != (slots, rows.shape[1]) or output.dtype not in DTYPES:
        raise TensorError(
            f"output must be [{slots}, {rows.shape[1]}] bfloat16 or float32, got {list(output.shape)} {output.dtype}"
        )
    for name, tensor in (("rows", rows), ("topk_weights", topk_weights), ("output", output)):
        if tensor.shape[1] > 1 and tensor.numel() and tensor.stride(1) != 1:
            raise TensorError(f"{name} must have contiguous rows, got strides {tensor.stride()}")
    if slots > 1 and output.stride(0) < output.shape[1]:
        raise TensorError(f"output must have rows that do not overlap, got strides {output.stride()}")
    for name, tensor in (
        ("rows", rows), ("index.rows", index.rows), ("topk_weights", topk_weights), ("output", output),
    ):  # fmt: skip
        if tensor.device.type != "cuda" or tensor.device != output.device:
            raise TensorError(f"{name} lies on {tensor.device}, output on {output.device}; the kernel needs one GPU")
