"""The header that ranks exchange before each collective step, and how they find out that they disagree.

Every call begins with one all-gather of fixed-size headers. Each rank then holds the same table, so all reach the same
verdict: go on, or raise. A rank whose own arguments are wrong takes part too and says so, so its peers raise instead of
waiting for it, and the group stays usable.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from moe_layer.errors import CommunicationError, RankMismatchError

CALLS = ("dispatch", "combine", "expert_load")
BACKENDS = ("gloo", "nccl")  # that move the rows
ERROR_BYTES = 256  # room for the first line of a failed rank's message
_ERROR_WORDS = ERROR_BYTES // 8
ABSENT = -1  # for a field of a tensor that was not given

_DTYPES = {zlib.crc32(str(d).encode()): str(d) for d in vars(torch).values() if isinstance(d, torch.dtype)}


def dtype_code(dtype: torch.dtype) -> int:
    """A number for ``dtype`` that is the same in every process, whatever the torch version."""
    return zlib.crc32(str(dtype).encode())


def table_code(rank_of: Sequence[int]) -> int:
    """A checksum of a placement's rank table."""
    return zlib.crc32(array("q", rank_of).tobytes())


@dataclass(frozen=True)
class Header:
    """What a rank says about its call. Fields that a call does not use stay at their default on every rank.

    The order of the fields is the order in which disagreements are reported.
    """

    call: int
    step: int
    backend: int = 0
    num_experts: int = 0
    placement: int = 0
    tokens_per_rank: int = 0
    top_k: int = 0
    row_dtype: int = ABSENT
    row_bytes: int = 0
    has_weights: int = 0
    scale_dtype: int = ABSENT
    scale_bytes: int = 0
    hidden_size: int = 0
    partial_dtype: int = ABSENT

    def encode(self, counts: Sequence[int]) -> torch.Tensor:
        """The header as int64 words, with ``counts`` (copies for each destination rank) at its end."""
        return self._encode(counts, b"")

    def encode_failure(self, error: Exception, ep_size: int) -> torch.Tensor:
        """The header of a rank that cannot take part because of ``error``."""
        text = str(error).strip() or type(error).__name__
        return self._encode([0] * ep_size, text.splitlines()[0].encode()[:ERROR_BYTES])

    def _encode(self, counts: Sequence[int], error: bytes) -> torch.Tensor:
        words = [getattr(self, field.name) for field in fields(self)]
        words.append(len(error))
        words.extend(array("q", error.ljust(ERROR_BYTES, b"\0")))
        words.extend(counts)
        return torch.tensor(words, dtype=torch.int64)


_NUM_FIELDS = len(fields(Header))
_COUNTS_AT = _NUM_FIELDS + 1 + _ERROR_WORDS


def agree(headers: torch.Tensor, rank: int, what: str) -> torch.Tensor:
    """Check the gathered headers.

    Args:
        headers: ``[ep_size, words]`` int64, row r from rank r.
        rank: this process's rank in the group.
        what: the call and its step, for the messages.

    Returns:
        ``[ep_size, ep_size]`` int64: copies from the rank of the row to the rank of the column.

    Raises:
        CommunicationError: a rank reported a failure of its own.
        RankMismatchError: two ranks disagree; every rank raises the same message.
    """
    failed = headers[:, _NUM_FIELDS].nonzero().flatten().tolist()
    if failed:
        reports = "; ".join(f"rank {r} failed: {_error_text(headers[r])}" for r in failed)
        raise CommunicationError(f"rank {rank}: {what} was given up because {reports}")
    differs = (headers[:, :_NUM_FIELDS] != headers[0, :_NUM_FIELDS]).nonzero().tolist()
    if differs:
        other, index = min(differs, key=lambda at: (at[1], at[0]))
        field = fields(Header)[index].name
        label, show = _LABELS[field]
        first, second = (show(int(headers[r, index])) for r in (0, other))
        where = "" if field in ("call", "step") else f"{what}: "
        raise RankMismatchError(f"{where}ranks disagree about {label}: rank 0 has {first}, rank {other} has {second}")
    return headers[:, _COUNTS_AT:]


def _error_text(header: torch.Tensor) -> str:
    length = int(header[_NUM_FIELDS])
    data = array("q", header[_NUM_FIELDS + 1 : _COUNTS_AT].tolist()).tobytes()
    return data[:length].decode(errors="replace")


def _dtype(code: int) -> str:
    return "none" if code == ABSENT else _DTYPES.get(code, "an unknown dtype")


def _yes_no(value: int) -> str:
    return "some" if value else "none"


_LABELS: dict[str, tuple[str, Callable[[int], str]]] = {
    "call": ("the call to make", lambda code: CALLS[code]),
    "step": ("the number of steps done", str),
    "backend": ("the backend for the rows (gloo for CPU tensors, nccl for CUDA)", lambda code: BACKENDS[code]),
    "num_experts": ("the number of experts", str),
    "placement": ("the placement of the experts", lambda code: f"table {code:08x}"),
    "tokens_per_rank": ("runtime_max_tokens_per_rank", str),
    "top_k": ("top_k", str),
    "row_dtype": ("the dtype of hidden_states", _dtype),
    "row_bytes": ("the bytes of a row of hidden_states", str),
    "has_weights": ("topk_weights", _yes_no),
    "scale_dtype": ("the dtype of hidden_states_scale", _dtype),
    "scale_bytes": ("the bytes of a row of hidden_states_scale", str),
    "hidden_size": ("hidden_size, the width that combine returns,", str),
    "partial_dtype": ("the dtype of expert_output", _dtype),
}
