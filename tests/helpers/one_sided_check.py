"""An oracle for one-sided steps in plain PyTorch on the CPU.

Rows are compared as bytes and regardless of their order, since a protocol may give a token any slot. Partial results
are made from what a rank received, so that the sums that come back show whether the right slot was summed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from moe_layer.comm import ExpertPlacement

# Words that break others: the sentinel, NaN, infinities, −0 in FP32, BF16, E4M3 and E2M1, and neighbours.
SPECIAL_WORDS = (
    0xFFFFFFFF, 0xFFFFFFFE, 0xFFFF0000, 0x0000FFFF, 0x7FC00000, 0x7FFFFFFF, 0x7F800000, 0xFF800000, 0x80000000,
    0x80008000, 0x80808080, 0x88888888, 0x00000000, 0x00000001, 0x7FFF7FFF,
)  # fmt: skip
EXTREME_IDS = (-1, -2, -(2**31), 2**31 - 1)
WIDE_IDS = (2**32, 2**32 + 1, 2**33 + 3, -(2**63), 2**63 - 1, -(2**32))  # an int32 cast wraps some into range
VALUES = 4093  # entries of the table of partial results; a prime, so that no column repeats another


@dataclass(frozen=True)
class Layer:
    """What stays the same from step to step.

    Attributes:
        num_experts, top_k: the paper's E and k.
        row, row_dtype: shape and torch dtype of a payload row; likewise the scale's.
        weights: whether router weights travel.
        id_dtype: of topk_ids.
        hidden_size, partial_dtype: of the partial results.
        output_dtype: of the output passed to combine, or None to pass none.
        rank_of: the placement's table, or None for contiguous blocks.
    """

    num_experts: int = 8
    top_k: int = 2
    row: tuple[int, ...] = (64,)
    row_dtype: str = "bfloat16"
    scale: tuple[int, ...] | None = None
    scale_dtype: str = "uint8"
    weights: bool = True
    id_dtype: str = "int32"
    hidden_size: int = 128
    partial_dtype: str = "bfloat16"
    output_dtype: str | None = None
    rank_of: tuple[int, ...] | None = None

    def table(self, ep_size: int) -> torch.Tensor:
        """The rank of each expert; the first ranks hold one more where the division leaves a remainder."""
        if self.rank_of is not None:
            return torch.tensor(self.rank_of)
        sizes = [self.num_experts // ep_size + (r < self.num_experts % ep_size) for r in range(ep_size)]
        return torch.tensor([r for r, size in enumerate(sizes) for _ in range(size)])

    def placement(self, ep_size: int) -> ExpertPlacement:
        if self.rank_of is None:
            return ExpertPlacement.contiguous(self.num_experts, ep_size)
        return ExpertPlacement.from_table(self.rank_of, ep_size)

    @property
    def row_bytes(self) -> int:
        return torch.Size(self.row).numel() * dtype_of(self.row_dtype).itemsize

    @property
    def scale_bytes(self) -> int:
        return 0 if self.scale is None else torch.Size(self.scale).numel() * dtype_of(self.scale_dtype).itemsize

    @property
    def partial_bytes(self) -> int:
        return dtype_of(self.partial_dtype).itemsize


@dataclass(frozen=True)
class Batch:
    """One step.

    Attributes:
        tokens: T of each rank.
        t_hat: T̂.
        ids: ``random`` (distinct in a row where E allows), ``same`` (one row for all tokens), ``one rank`` (every id on
            the last rank), ``duplicates``, ``invalid`` (valid ones among −1, E, E + 1 and extremes), ``none`` (all −1).
        payload: ``random`` bytes, or ``special`` ones: rows full of the sentinel, NaN, infinities, −0.
    """

    tokens: tuple[int, ...]
    t_hat: int
    ids: str = "random"
    payload: str = "random"


@dataclass(frozen=True)
class Inputs:
    """One rank's inputs on the CPU, ids as int64."""

    rows: torch.Tensor
    scale: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor | None

    def arguments(self, layer: Layer, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of dispatch, on the device."""
        return {
            "hidden_states": self.rows.to(device),
            "topk_ids": self.ids.to(dtype_of(layer.id_dtype)).to(device),
            "topk_weights": None if self.weights is None else self.weights.to(device),
            "hidden_states_scale": None if self.scale is None else self.scale.to(device),
        }


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def make_bytes(shape: tuple[int, ...], dtype: str, payload: str, g: torch.Generator) -> torch.Tensor:
    """Random bytes as ``[n, *row]``; special payloads draw half of their words from SPECIAL_WORDS, some rows whole."""
    kind = dtype_of(dtype)
    n, length = shape[0], torch.Size(shape[1:]).numel() * kind.itemsize
    words = torch.randint(-(2**31), 2**31, (n, -(-length // 4)), generator=g, dtype=torch.int64)
    if payload == "special":
        drawn = torch.tensor(SPECIAL_WORDS)[torch.randint(0, len(SPECIAL_WORDS), words.shape, generator=g)]
        words = torch.where(torch.rand(words.shape, generator=g) < 0.5, drawn, words)
        words[torch.rand(n, generator=g) < 0.3] = 0xFFFFFFFF
    # int64 little-endian: the low four bytes of each word.
    data = words.view(torch.uint8).view(*words.shape, 8)[..., :4].reshape(n, words.shape[1] * 4)[:, :length]
    if data.numel() == 0:
        return torch.empty(shape, dtype=kind)
    return data.contiguous().view(-1).view(kind).view(shape)


def make_ids(layer: Layer, batch: Batch, tokens: int, ep_size: int, g: torch.Generator) -> torch.Tensor:
    """``[tokens, top_k]`` int64 of the batch's kind."""
    experts, k = layer.num_experts, layer.top_k
    if batch.ids == "none":
        return torch.full((tokens, k), -1)
    if batch.ids == "one rank":
        there = (layer.table(ep_size) == ep_size - 1).nonzero()[:, 0]
        return there[torch.randint(0, len(there), (tokens, k), generator=g)]
    if batch.ids in ("duplicates", "invalid") or k > experts:
        ids = torch.randint(0, experts, (tokens, k), generator=g)
        if batch.ids == "invalid":
            bad = [*EXTREME_IDS, experts, experts + 1, *(WIDE_IDS if layer.id_dtype == "int64" else ())]
            drawn = torch.tensor(bad)[torch.randint(0, len(bad), ids.shape, generator=g)]
            ids = torch.where(torch.rand(ids.shape, generator=g) < 0.5, drawn, ids)
        return ids
    rows = torch.rand(1 if batch.ids == "same" else tokens, experts, generator=g).argsort(1)[:, :k]
    return rows.expand(tokens, k).contiguous()


def make_inputs(layer: Layer, batch: Batch, seed: int) -> list[Inputs]:
    """Every rank's inputs."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for tokens in batch.tokens:
        scale = None
        if layer.scale is not None:
            scale = make_bytes((tokens, *layer.scale), layer.scale_dtype, batch.payload, g)
        weights = make_bytes((tokens, layer.top_k), "float32", batch.payload, g) if layer.weights else None
        rows = make_bytes((tokens, *layer.row), layer.row_dtype, batch.payload, g)
        made.append(Inputs(rows, scale, make_ids(layer, batch, tokens, len(batch.tokens), g), weights))
    return made


def clean_ids(layer: Layer, ids: torch.Tensor) -> torch.Tensor:
    """int32; ids out of range become −1."""
    return torch.where((ids >= 0) & (ids < layer.num_experts), ids, -1).to(torch.int32)


def destinations(layer: Layer, ids: torch.Tensor, ep_size: int) -> torch.Tensor:
    """``[T, ep_size]`` bool: which ranks hold an expert that the token selects."""
    table = layer.table(ep_size)
    clean = clean_ids(layer, ids).long()
    rank = torch.where(clean >= 0, table[clean.clamp(min=0)], -1)
    return (rank[:, :, None] == torch.arange(ep_size)).any(1)


def byte_rows(tensor: torch.Tensor | None, rows: int) -> torch.Tensor:
    """``[rows, bytes]`` uint8, where the tensor is."""
    if tensor is None:
        return torch.empty(rows, 0, dtype=torch.uint8)
    if tensor.numel() == 0:
        length = tensor.shape[1:].numel() * tensor.element_size()
        return torch.empty(rows, length, dtype=torch.uint8, device=tensor.device)
    return tensor.contiguous().view(-1).view(torch.uint8).view(rows, -1)


def records(*parts: torch.Tensor | None, rows: int, chosen: torch.Tensor) -> list[bytes]:
    """Everything of each chosen token in one string of bytes."""
    together = torch.cat([byte_rows(part, rows).cpu() for part in parts], 1)
    return [row.tobytes() for row in together[chosen].numpy()]


def values_table(dtype: torch.dtype, special: bool) -> torch.Tensor:
    """Partial results that show the order of a sum: wide exponents, −0, subnormals; NaN, ±Inf and the sentinel too."""
    g = torch.Generator().manual_seed(4093)
    values = torch.randn(VALUES, generator=g) * torch.exp2(torch.randint(-12, 12, (VALUES,), generator=g).float())
    kind = torch.rand(VALUES, generator=g)
    values = torch.where(kind < 0.04, torch.tensor(-0.0), values)
    values = torch.where((kind >= 0.04) & (kind < 0.08), torch.randn(VALUES, generator=g) * 2.0**-130, values)
    values = values.to(dtype)
    if special:
        bits = values.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
        bits[(kind >= 0.08) & (kind < 0.12)] = -1  # NaN, the sentinel
        values[(kind >= 0.12) & (kind < 0.14)] = torch.inf
        values[(kind >= 0.14) & (kind < 0.16)] = -torch.inf
    return values


def partial_results(
    layer: Layer, rank: int, special: bool, ids: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """``[n, hidden_size]``: what ``rank`` computes from tokens with these contents, the same on CPU and GPU.

    ``rows`` are bytes, see :func:`byte_rows`.
    """
    device = ids.device
    ends = torch.cat([rows[:, :32], rows[:, -32:]], 1).to(torch.int64)
    signature = (ends * torch.arange(1, 2 * ends.shape[1], 2, device=device)).sum(1)
    signature += (ids.to(torch.int64) * torch.arange(7, 7 + layer.top_k, device=device)).sum(1)
    if weights is not None:
        signature += weights.contiguous().view(torch.int32).to(torch.int64).sum(1)
    columns = torch.arange(layer.hidden_size, device=device)
    if special:
        columns = columns // 2  # both halves of a word alike, so that BF16 makes whole sentinels
    index = (signature[:, None] * 31 + columns * 509 + rank * 911) % VALUES
    return values_table(dtype_of(layer.partial_dtype), special).to(device)[index]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def check_same_bits(got: torch.Tensor, expected: torch.Tensor, label: str) -> None:
    """Bitwise, except that any NaN equals any other."""
    assert got.shape == expected.shape, f"{label}: shape {list(got.shape)}, not {list(expected.shape)}"
    assert got.dtype == expected.dtype, f"{label}: {got.dtype}, not {expected.dtype}"
    got = got.cpu()
    wrong = (bits(got) != bits(expected)) & ~(got.isnan() & expected.isnan())
    if wrong.any():
        token, column = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"{label}: {int(wrong.sum())} of {wrong.numel()} values differ, in {int(wrong.any(1).sum())} tokens; "
            f"first token {token}, column {column}: {got[token, column].item()!r}, "
            f"not {expected[token, column].item()!r}"
        )


def check_received(
    layer: Layer, batch: Batch, inputs: list[Inputs], result: Any, rank: int, ep_size: int, label: str
) -> None:
    """Compare a DispatchResult with the inputs, in any order of slots within a region."""
    t_hat, slots = batch.t_hat, ep_size * batch.t_hat
    assert result.tokens_per_rank == t_hat, label
    assert result.topk_ids.dtype == torch.int32, label
    assert tuple(result.topk_ids.shape) == (slots, layer.top_k), label
    assert result.hidden_states.dtype == dtype_of(layer.row_dtype), label
    assert tuple(result.hidden_states.shape) == (slots, *layer.row), label
    assert (result.topk_weights is None) == (not layer.weights), label
    assert (result.hidden_states_scale is None) == (layer.scale is None), label
    if result.hidden_states_scale is not None:
        assert result.hidden_states_scale.dtype == dtype_of(layer.scale_dtype), label
        assert tuple(result.hidden_states_scale.shape) == (slots, *(layer.scale or ())), label
    taken = (result.topk_ids != -1).any(1).cpu()
    received = (result.topk_ids, result.hidden_states, result.hidden_states_scale, result.topk_weights)
    region = torch.arange(slots) // max(t_hat, 1)
    for source, given in enumerate(inputs):
        got = records(*received, rows=slots, chosen=taken & (region == source))
        sent = (clean_ids(layer, given.ids), given.rows, given.scale, given.weights)
        chosen = destinations(layer, given.ids, ep_size)[:, rank]
        expected = records(*sent, rows=given.ids.shape[0], chosen=chosen)
        if Counter(got) != Counter(expected):
            raise AssertionError(f"{label}, source {source}: " + difference(layer, got, expected))


def difference(layer: Layer, got: list[bytes], expected: list[bytes]) -> str:
    """Where the nearest wrong record first differs from what was sent."""
    extra = list((Counter(got) - Counter(expected)).elements())
    missing = list((Counter(expected) - Counter(got)).elements())
    text = f"{len(got)} tokens arrived, {len(expected)} were sent, {len(missing)} of them did not arrive as sent"
    if not extra or not missing:
        return text
    ends = [4 * layer.top_k, layer.row_bytes, layer.scale_bytes, 4 * layer.top_k if layer.weights else 0]
    wrong = min(missing, key=lambda record: sum(a != b for a, b in zip(record, extra[0])))
    places = [i for i, (a, b) in enumerate(zip(wrong, extra[0])) if a != b]
    at, start = places[0], 0
    for name, length in zip(("ids", "row", "scale", "weights"), ends):
        if at < start + length:
            shown = extra[0][at : at + 8].hex(), wrong[at : at + 8].hex()
            return (
                f"{text}; e.g. {len(places)} bytes differ, first {name} byte {at - start}: {shown[0]}, not {shown[1]}"
            )
        start += length
    return text


def expected_output(layer: Layer, given: Inputs, special: bool, ep_size: int) -> torch.Tensor:
    """The sum of the ranks' partial results, ascending, from +0.0 in FP32, rounded once."""
    total = torch.zeros(given.ids.shape[0], layer.hidden_size)
    sent = destinations(layer, given.ids, ep_size)
    rows = byte_rows(given.rows, given.ids.shape[0])
    for rank in range(ep_size):
        part = partial_results(layer, rank, special, clean_ids(layer, given.ids), rows, given.weights)
        total = torch.where(sent[:, rank, None], total + part.float(), total)
    return total.to(dtype_of(layer.output_dtype or layer.partial_dtype))
