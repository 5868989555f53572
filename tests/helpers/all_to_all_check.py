"""Dispatch and combine checked against an oracle in plain Python and NumPy, for any transport.

Every rank makes all ranks' inputs from one seed, so each knows what it must receive. Payload rows, scales and weights
are random bytes: any bit pattern must arrive as it left. Buffers that the transport reuses are filled with 0xFF first
(NaN in every float format), and so are the slots of the expert output that hold no token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch

from moe_layer.comm import ExpertPlacement

HUGE_IDS = (-1, -2, -(2**31), 2**31 - 1)


@dataclass(frozen=True)
class Case:
    """A step.

    Attributes:
        tokens: T of each rank.
        num_experts, top_k: the paper's E and k.
        ids: ``random`` (distinct in a row), ``same`` (one row for all tokens), ``duplicates``, ``invalid`` (valid ones
            among −1, E, E + 1 and extremes), ``none`` (all −1).
        rank_of: the placement's table, or None for contiguous blocks.
        row, row_dtype: shape and torch dtype name of a payload row; likewise the scale's.
        weights: whether weights travel.
        id_dtype: of topk_ids.
        hidden_size, partial_dtype: of the expert output.
        output_dtype: of the ``output`` passed to combine, or None for none.
        t_hat: runtime_max_tokens_per_rank, or None.
    """

    tokens: tuple[int, ...]
    num_experts: int = 8
    top_k: int = 2
    ids: str = "random"
    rank_of: tuple[int, ...] | None = None
    row: tuple[int, ...] = (32,)
    row_dtype: str = "bfloat16"
    scale: tuple[int, ...] | None = None
    scale_dtype: str = "float32"
    weights: bool = True
    id_dtype: str = "int32"
    hidden_size: int = 24
    partial_dtype: str = "bfloat16"
    output_dtype: str | None = None
    t_hat: int | None = None

    @property
    def table(self) -> list[int]:
        """The rank of each expert."""
        if self.rank_of is not None:
            return list(self.rank_of)
        # The first ranks hold one more where the division leaves a remainder.
        ranks = len(self.tokens)
        sizes = [self.num_experts // ranks + (r < self.num_experts % ranks) for r in range(ranks)]
        return [r for r, size in enumerate(sizes) for _ in range(size)]


MAX_TOKENS = 24
# T of rank r is the r-th entry, for as many ranks as a test has; one of four ranks has no token.
RAGGED = (5, 17, 0, 9)
FULL = (MAX_TOKENS,) * 4

CASES = {
    "ragged": Case(RAGGED),
    "no token on the first rank": Case((0, 13, 0, 6)),
    "no token anywhere": Case((0, 0, 0, 0)),
    "one token in all": Case((0, 0, 1, 0), t_hat=1),
    "T = T̂ = the maximum": Case(FULL),
    "T̂ below the maximum": Case(RAGGED, t_hat=17),
    "top_k 1": Case(RAGGED, top_k=1),
    "top_k 10": Case(RAGGED, num_experts=16, top_k=10),
    "top_k 32": Case(RAGGED, num_experts=40, top_k=32),
    "more selections than experts": Case(RAGGED, num_experts=3, top_k=7, ids="duplicates"),
    "experts not divisible": Case(RAGGED, num_experts=7, top_k=3),
    "fewer experts than ranks": Case(RAGGED, num_experts=2, top_k=2),
    "all tokens alike": Case(RAGGED, ids="same"),
    "duplicate ids": Case(RAGGED, top_k=6, ids="duplicates"),
    "ids out of range": Case(RAGGED, top_k=3, ids="invalid"),
    "64-bit ids out of range": Case(RAGGED, top_k=3, ids="invalid", id_dtype="int64"),
    "no destination at all": Case(RAGGED, ids="none"),
    "int64 ids": Case(RAGGED, id_dtype="int64"),
    "no weights": Case(RAGGED, weights=False),
    "fp8 with scales": Case(RAGGED, row=(256,), row_dtype="float8_e4m3fn", scale=(2,)),
    "fp8 with e8m0 scales": Case(RAGGED, row_dtype="float8_e5m2", scale=(3,), scale_dtype="float8_e8m0fnu"),
    "odd row and scale bytes": Case(RAGGED, row=(13,), row_dtype="uint8", scale=(3,), scale_dtype="uint8"),
    "rows of 2, 4 and 8 byte words": Case(RAGGED, row=(3,), row_dtype="float16", scale=(5,), scale_dtype="float32"),
    "rows of one byte": Case(RAGGED, row=(), row_dtype="uint8"),
    "rows of two dimensions": Case(RAGGED, row=(3, 5), row_dtype="int16", scale=(2, 2)),
    "scale rows of no byte": Case(RAGGED, scale=(0,)),
    "long rows": Case(RAGGED, row=(7168,), hidden_size=7168),
    "fp32 rows and partials": Case(RAGGED, row_dtype="float32", top_k=4, partial_dtype="float32"),
    "bf16 to fp32 output": Case(RAGGED, top_k=4, output_dtype="float32"),
    "fp32 to bf16 output": Case(RAGGED, top_k=4, partial_dtype="float32", output_dtype="bfloat16"),
    "fp16 output": Case(RAGGED, top_k=4, output_dtype="float16"),
    "width other than the rows'": Case(RAGGED, row=(32,), hidden_size=7),
}


def for_ranks(case: Case, ep_size: int) -> Case:
    """``case`` with the T of ``ep_size`` ranks."""
    return replace(case, tokens=case.tokens[:ep_size])


def open_comm(channel: Any, case: Case) -> Any:
    """A communicator of ``channel`` for ``case``."""
    ep_size = len(case.tokens)
    if case.rank_of is None:
        placement = ExpertPlacement.contiguous(case.num_experts, ep_size)
    else:
        placement = ExpertPlacement.from_table(case.rank_of, ep_size)
    return channel.communicator(placement, case.hidden_size)


@dataclass(frozen=True)
class Inputs:
    """One rank's inputs and its experts' partial results."""

    rows: torch.Tensor
    scale: torch.Tensor | None
    ids: np.ndarray
    weights: torch.Tensor | None


def make_inputs(case: Case, num_tokens: int, rng: np.random.Generator) -> Inputs:
    """Random inputs of a rank with ``num_tokens`` tokens."""
    scale = None if case.scale is None else random_bits(rng, (num_tokens, *case.scale), case.scale_dtype)
    weights = random_bits(rng, (num_tokens, case.top_k), "float32") if case.weights else None
    return Inputs(
        random_bits(rng, (num_tokens, *case.row), case.row_dtype), scale, make_ids(case, num_tokens, rng), weights
    )


def make_ids(case: Case, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """``[num_tokens, top_k]`` ids of the case's kind."""
    shape = (num_tokens, case.top_k)
    if case.ids == "none":
        return np.full(shape, -1, dtype=np.int64)
    if case.ids in ("duplicates", "invalid"):
        ids = rng.integers(0, case.num_experts, shape)
        if case.ids == "invalid":
            extremes = [*HUGE_IDS, case.num_experts, case.num_experts + 1]
            if case.id_dtype == "int64":
                extremes += [2**32, 2**32 + 1, -(2**63), 2**63 - 1]  # an int32 cast would wrap the first two into range
            ids = np.where(rng.random(shape) < 0.5, rng.choice(np.array(extremes), shape), ids)
        return ids
    rows = 1 if case.ids == "same" else num_tokens
    ids = np.array([rng.permutation(case.num_experts)[: case.top_k] for _ in range(rows)], dtype=np.int64)
    return np.broadcast_to(ids.reshape(rows, case.top_k), shape).copy()


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor of random bytes."""
    kind: torch.dtype = getattr(torch, dtype)
    data = rng.integers(0, 256, int(np.prod(shape)) * kind.itemsize, dtype=np.uint8)
    if data.size == 0:
        return torch.empty(shape, dtype=kind)
    return torch.from_numpy(data).view(kind).view(shape)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """``[n, bytes]`` of ``tensor``'s rows."""
    if tensor.numel() == 0:
        return np.empty((tensor.shape[0], 0), dtype=np.uint8)
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().reshape(tensor.shape[0], -1)


def destinations(case: Case, ids: np.ndarray) -> list[list[int]]:
    """For each rank, the tokens of ``ids`` that go there, in token order."""
    table = case.table
    ranks = [{table[e] for e in row if 0 <= e < case.num_experts} for row in ids.tolist()]
    return [[i for i, here in enumerate(ranks) if r in here] for r in range(len(case.tokens))]


def make_partials(case: Case, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """``[num_tokens, hidden_size]`` partial results that show the order of a sum: wide exponents, −0 and subnormals."""
    shape = (num_tokens, case.hidden_size)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))
    values = np.where(rng.random(shape) < 0.05, -0.0, values)
    values = np.where(rng.random(shape) < 0.05, rng.standard_normal(shape) * 2.0**-128, values)
    return values.astype(np.float32 if case.partial_dtype == "float32" else ml_dtypes.bfloat16)


def check_step(comm: Any, case: Case, seed: int, device: str = "cpu") -> None:
    """Run the step on this rank and raise AssertionError where anything differs from the oracle."""
    rng = np.random.default_rng(seed)
    ep_size, me = len(case.tokens), comm.ep_rank
    inputs = [make_inputs(case, n, rng) for n in case.tokens]
    # partials[r][s]: what rank r computes for the tokens of rank s.
    partials = [[make_partials(case, n, rng) for n in case.tokens] for _ in range(ep_size)]
    routes = [destinations(case, inputs[s].ids) for s in range(ep_size)]
    label = f"rank {me}, seed {seed}, {case}"

    mine = inputs[me]
    result = comm.dispatch(
        mine.rows.to(device),
        torch.from_numpy(mine.ids).to(getattr(torch, case.id_dtype)).to(device),
        None if mine.weights is None else mine.weights.to(device),
        hidden_states_scale=None if mine.scale is None else mine.scale.to(device),
        runtime_max_tokens_per_rank=case.t_hat,
    )
    t_hat = comm.channel.max_tokens_per_rank if case.t_hat is None else case.t_hat
    assert result.tokens_per_rank == t_hat, label
    slots = check_received(case, result, inputs, routes, me, label)

    buffer = comm.get_combine_input_buffer(getattr(torch, case.partial_dtype))
    assert buffer.shape == (ep_size * t_hat, case.hidden_size), label
    assert buffer.dtype == getattr(torch, case.partial_dtype), label
    poison(buffer)
    for source in range(ep_size):
        for slot, token in slots[source].items():
            row = np.ascontiguousarray(partials[me][source][token])
            buffer[slot] = torch.from_numpy(row.view(np.uint8)).view(buffer.dtype).to(device)
    output = None
    if case.output_dtype is not None:
        # Every second row of a wider tensor: an output need not be contiguous.
        wide = torch.empty(
            2 * case.tokens[me], case.hidden_size, dtype=getattr(torch, case.output_dtype), device=device
        )
        poison(wide)
        output = wide[::2]
    combined = comm.combine(buffer, output=output)
    assert output is None or combined is output, label

    expected = np.zeros((case.tokens[me], case.hidden_size), dtype=np.float32)
    for rank in range(ep_size):
        for token in routes[me][rank]:
            expected[token] = expected[token] + partials[rank][me][token].astype(np.float32)
    names = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
    kind = case.output_dtype or case.partial_dtype
    assert combined.dtype == getattr(torch, kind), label
    with np.errstate(over="ignore"):  # fp16 may overflow to Inf, on both sides
        rounded = expected.astype(names[kind])
    np.testing.assert_array_equal(bits(combined), rounded.view(np.uint8).reshape(bits(combined).shape), err_msg=label)


def check_steps(channel: Any, cases: list[Case], seed: int, device: str = "cpu") -> None:
    """The cases, one after the other, as layers that share ``channel``, sized for MAX_TOKENS."""
    comms = [open_comm(channel, case) for case in cases]
    for step, (comm, case) in enumerate(zip(comms, cases), start=1):
        for buffer in channel.workspace.buffers():
            poison(buffer)
        check_step(comm, case, seed + step, device)
        assert channel.step == step


def check_received(
    case: Case, result: Any, inputs: list[Inputs], routes: list[list[list[int]]], me: int, label: str
) -> list[dict[int, int]]:
    """Compare a DispatchResult with the inputs; return, for each source rank, slot → token.

    Slots may lie anywhere in their region, but tokens stand in their own order.
    """
    t_hat = result.tokens_per_rank
    ids = result.topk_ids.cpu().numpy()
    num_slots = len(case.tokens) * t_hat
    assert result.topk_ids.dtype == torch.int32, label
    assert ids.shape == (num_slots, case.top_k), label
    assert tuple(result.hidden_states.shape) == (num_slots, *case.row), label
    assert result.hidden_states.dtype == getattr(torch, case.row_dtype), label
    assert (result.topk_weights is None) == (not case.weights), label
    assert (result.hidden_states_scale is None) == (case.scale is None), label

    received = {"rows": bits(result.hidden_states)}
    if result.topk_weights is not None:
        received["weights"] = bits(result.topk_weights)
    if result.hidden_states_scale is not None:
        assert tuple(result.hidden_states_scale.shape) == (num_slots, *(case.scale or ())), label
        received["scale"] = bits(result.hidden_states_scale)
    slots = []
    for source, given in enumerate(inputs):
        occupied = [s for s in range(source * t_hat, (source + 1) * t_hat) if (ids[s] != -1).any()]
        tokens = routes[source][me]
        assert len(occupied) == len(tokens), f"{label}: {len(occupied)} tokens from rank {source}, not {len(tokens)}"
        for slot, token in zip(occupied, tokens):
            where = f"{label}: token {token} of rank {source} in slot {slot}"
            for position, (sent, got) in enumerate(zip(given.ids[token], ids[slot])):
                valid = 0 <= sent < case.num_experts
                assert got == (sent if valid else -1), f"{where}: id {position} is {got}, sent as {sent}"
            for name, rows in received.items():
                np.testing.assert_array_equal(rows[slot], bits(getattr(given, name))[token], err_msg=f"{where}: {name}")
        slots.append(dict(zip(occupied, tokens)))
    return slots


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with 0xFF bytes."""
    if tensor.numel():
        tensor.view(torch.uint8).fill_(0xFF)
