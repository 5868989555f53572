"""How a weight matrix is stored: its format, told from the suffixes and dtypes of its tensors.

The config does not decide, and neither does its ``ignore`` list (Kimi-K3's BF16 projections are not on it). Suffixes
are compared whole, never as substrings: a scale can then not be taken for that of another tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from moe_layer.errors import CheckpointError, FormatError
from moe_layer.models.checkpoint import TensorInfo


@dataclass(frozen=True)
class Scheme:
    """One way of storing a matrix.

    Attributes:
        format: registry name in :mod:`moe_layer.quant`.
        data: suffix of the data tensor, and ``dtype`` its safetensors dtype.
        packed: values per stored element.
        scale: suffixes that the block scales go by; empty for plain weights.
        scale_dtypes: dtypes they may have. E8M0 scales are bytes, whether declared U8 or F8_E8M0.
        block: rows and columns that share a scale.
        global_scale: suffix of the second-level scale, and ``input_scale`` that of the activations' one.
        reciprocal: both are stored as the reciprocal of the factor (compressed-tensors).
        shape: suffix of a tensor that holds the logical shape.
    """

    format: str
    data: str
    dtype: str
    packed: int = 1
    scale: tuple[str, ...] = ()
    scale_dtypes: tuple[str, ...] = ()
    block: tuple[int, int] = (1, 1)
    global_scale: str | None = None
    input_scale: str | None = None
    reciprocal: bool = False
    shape: str | None = None


_E8M0 = ("F8_E8M0", "U8")
_FP8_SCALES = ("weight_scale_inv", "scale", "weight_scale")

SCHEMES = (
    Scheme("bf16", "weight", "BF16"),
    Scheme("fp32", "weight", "F32"),
    Scheme("fp8_128x128", "weight", "F8_E4M3", 1, _FP8_SCALES, ("F32",), (128, 128)),
    Scheme("fp8_128x128_ue8m0", "weight", "F8_E4M3", 1, _FP8_SCALES, _E8M0, (128, 128)),
    Scheme("fp8_32x32", "weight", "F8_E4M3", 1, _FP8_SCALES, _E8M0, (32, 32)),
    Scheme("mxfp8", "weight", "F8_E4M3", 1, _FP8_SCALES, _E8M0, (1, 32)),
    # DeepSeek-V4 and V4.1, and the same in transformers' memory layout
    Scheme("mxfp4", "weight", "I8", 2, ("scale", "weight_scale_inv"), _E8M0, (1, 32)),
    # compressed-tensors: Kimi-K3, Kimi-K2-Thinking
    Scheme("mxfp4", "weight_packed", "U8", 2, ("weight_scale",), _E8M0, (1, 32)),
    Scheme("int4", "weight_packed", "I32", 8, ("weight_scale",), ("BF16",), (1, 32), shape="weight_shape"),
    Scheme(
        "nvfp4", "weight_packed", "U8", 2, ("weight_scale",), ("F8_E4M3",), (1, 16),
        global_scale="weight_global_scale", input_scale="input_global_scale", reciprocal=True,
    ),
    # ModelOpt
    Scheme(
        "nvfp4", "weight", "U8", 2, ("weight_scale",), ("F8_E4M3",), (1, 16),
        global_scale="weight_scale_2", input_scale="input_scale",
    ),
)  # fmt: skip


class HasInfo(Protocol):
    """What :func:`identify` needs of a checkpoint."""

    def info(self, name: str) -> TensorInfo: ...


@dataclass(frozen=True)
class StoredMatrix:
    """An ``[N, K]`` matrix (or a stack of them) in a checkpoint: its scheme and the names of its tensors."""

    scheme: Scheme
    rows: int
    columns: int
    data: TensorInfo
    scale: TensorInfo | None = None
    global_scale: TensorInfo | None = None
    input_scale: TensorInfo | None = None
    shape: TensorInfo | None = None

    @property
    def format(self) -> str:
        return self.scheme.format


def identify(
    checkpoint: HasInfo, base: str, tensors: Mapping[str, str], rows: int, columns: int, stack: int | None = None
) -> StoredMatrix:
    """Tell how a matrix is stored and check every shape, from headers alone.

    Args:
        base: what the matrix is called in messages.
        tensors: suffix → full name of every tensor that belongs to it.
        rows, columns: N and K of the matrix.
        stack: length of a leading dimension, where experts lie in one tensor.

    Raises:
        FormatError: a scale is missing.
        CheckpointError: the data is missing, of an unknown dtype or mis-shaped; a tensor that no format has.
    """
    lead = () if stack is None else (stack,)
    found = {suffix: checkpoint.info(name) for suffix, name in tensors.items()}
    data_names = list(dict.fromkeys(s.data for s in SCHEMES))
    present = [name for name in data_names if name in found]
    if not present:
        raise CheckpointError(f"missing tensor {base}.{' or '.join(data_names)}")
    candidates = [s for s in SCHEMES if s.data in found and s.dtype == found[s.data].dtype]
    if not candidates:
        known = sorted({s.dtype for s in SCHEMES if s.data == present[0]})
        info = found[present[0]]
        raise CheckpointError(f"{info.name} is {info.dtype}; expected one of {', '.join(known)}")

    scheme, scale = _match_scale(base, found, candidates, lead, rows, columns)
    data = found[scheme.data]
    expected = (*lead, rows, _ceil(columns, scheme.packed))
    if data.shape != expected:
        raise CheckpointError(f"{data.name} is {data}; expected {scheme.dtype} {list(expected)} ({scheme.format})")
    known_suffixes = {scheme.data, scheme.global_scale, scheme.input_scale, scheme.shape}
    if scale is not None:
        known_suffixes.add(next(s for s in scheme.scale if found.get(s) is scale))
    for suffix, info in found.items():
        if suffix not in known_suffixes:
            raise CheckpointError(
                f"extra tensor {info.name} ({info}): {scheme.format} weights have no {suffix}, ignoring it would "
                "change the result"
            )
    if scheme.shape and scheme.shape not in found:
        raise CheckpointError(f"missing tensor {base}.{scheme.shape} of {scheme.format} weights")
    return StoredMatrix(
        scheme,
        rows,
        columns,
        data,
        scale,
        _scalars(base, found, scheme.global_scale, scheme, lead, required=True),
        _scalars(base, found, scheme.input_scale, scheme, lead, required=False),
        found[scheme.shape] if scheme.shape else None,
    )


def _match_scale(
    base: str,
    found: Mapping[str, TensorInfo],
    candidates: list[Scheme],
    lead: tuple[int, ...],
    rows: int,
    columns: int,
) -> tuple[Scheme, TensorInfo | None]:
    """The scheme whose scale is there with the right dtype and shape.

    Where two block sizes give the same shape, the matrix is a single block of both, so the first is right.
    """
    plain = [s for s in candidates if not s.scale]
    if plain:
        return plain[0], None
    with_scale = [(s, found[suffix]) for s in candidates for suffix in s.scale if suffix in found]
    if not with_scale:
        names = dict.fromkeys(f"{base}.{suffix}" for s in candidates for suffix in s.scale)
        formats = dict.fromkeys(s.format for s in candidates)
        data = found[candidates[0].data]
        raise FormatError(
            f"missing scale {' or '.join(names)}: {data.name} is {data.dtype}, so it is {' or '.join(formats)} "
            "and has no value without its scales"
        )
    typed = [(s, info) for s, info in with_scale if info.dtype in s.scale_dtypes]
    if not typed:
        info = with_scale[0][1]
        dtypes = dict.fromkeys(d for s, i in with_scale if i is info for d in s.scale_dtypes)
        raise CheckpointError(f"{info.name} is {info.dtype}; expected scales of {' or '.join(dtypes)}")
    shapes: dict[str, None] = {}  # an ordered set
    for s, info in typed:
        expected = (*lead, _ceil(rows, s.block[0]), _ceil(columns, s.block[1]))
        if info.shape == expected:
            return s, info
        shapes[f"{list(expected)} ({s.format})"] = None
    info = typed[0][1]
    raise CheckpointError(
        f"{info.name} is {info}; expected {' or '.join(shapes)} for a matrix of {rows} rows and {columns} columns"
    )


def _scalars(
    base: str,
    found: Mapping[str, TensorInfo],
    suffix: str | None,
    scheme: Scheme,
    lead: tuple[int, ...],
    *,
    required: bool,
) -> TensorInfo | None:
    """An fp32 scale per matrix: shape [] or [1], or one a stacked matrix."""
    if suffix is None:
        return None
    if suffix not in found:
        if required:
            raise FormatError(f"missing scale {base}.{suffix}: {scheme.format} weights have no value without it")
        return None
    info = found[suffix]
    allowed: Iterable[tuple[int, ...]] = (lead, (*lead, 1)) if lead else ((), (1,))
    if info.dtype != "F32" or info.shape not in allowed:
        raise CheckpointError(f"{info.name} is {info}; expected F32 {' or '.join(str(list(a)) for a in allowed)}")
    return info


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
