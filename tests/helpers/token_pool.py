"""Thousands of steps checked on the GPU without waiting for it.

Every rank knows the same pool of tokens for each source rank, made from one seed. A step sends a window of each pool,
so inputs are views, and a receiver looks its tokens up by the number in their first four bytes. Mismatches are counted
in a tensor on the device, which the host reads now and then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from one_sided_check import (
    Batch,
    Layer,
    bits,
    byte_rows,
    clean_ids,
    destinations,
    dtype_of,
    make_inputs,
    partial_results,
)

# Two layers that share a channel, of different widths, top_k, ids and dtypes; the second also has odd row bytes.
LAYERS = {
    "even": Layer(16, 4, (528,), "uint8", (16,), hidden_size=512),
    "odd": Layer(9, 3, (100,), "uint8", (5,), id_dtype="int64", hidden_size=96, partial_dtype="float32"),
}
KINDS = ("random", "same", "duplicates", "invalid", "none")


@dataclass(frozen=True)
class Windows:
    """What each source rank sends in one step: ``tokens[s]`` tokens of its pool from ``first[s]`` on."""

    first: tuple[int, ...]
    tokens: tuple[int, ...]
    t_hat: int


class TokenPool:
    """The tokens of one layer's source ranks, on the CPU.

    Args:
        layer: with rows of at least four bytes.
        ep_size: ranks.
        seed: the same on every rank.
        size: tokens a source.
    """

    def __init__(self, layer: Layer, ep_size: int, seed: int, size: int = 256) -> None:
        self.layer, self.ep_size, self.size = layer, ep_size, size
        # Stretches of every kind of routing and payload, so that a window holds several of them.
        stretch = 16
        parts: list[list[Any]] = [[] for _ in range(ep_size)]
        for start in range(0, size, stretch):
            number = start // stretch
            kind = KINDS[number % len(KINDS)] if number % 3 else "random"
            batch = Batch((min(stretch, size - start),) * ep_size, stretch, kind, ("random", "special")[number % 2])
            for source, made in enumerate(make_inputs(layer, batch, seed + number)):
                parts[source].append(made)

        def together(name: str) -> list[Any]:
            lists = [[getattr(part, name) for part in source] for source in parts]
            return [None if source[0] is None else torch.cat([_raw(t) for t in source]) for source in lists]

        self.rows = together("rows")
        numbers = torch.arange(size, dtype=torch.int32)[:, None].view(torch.uint8)
        for rows in self.rows:
            rows[:, :4] = numbers
        self.scales, self.weights = together("scale"), together("weights")
        self.ids = [torch.cat([part.ids for part in source]) for source in parts]
        self.clean = [clean_ids(layer, ids) for ids in self.ids]
        self.sent = [destinations(layer, ids, ep_size) for ids in self.ids]
        self.partials = torch.stack(
            [
                torch.cat(
                    [
                        partial_results(layer, rank, False, self.clean[s], self.rows[s], _typed(self.weights[s]))
                        for s in range(ep_size)
                    ]
                )
                for rank in range(ep_size)
            ]
        )

    def expected(self, source: int) -> torch.Tensor:
        """What combine returns for each of the source's tokens."""
        layer = self.layer
        total = torch.zeros(self.size, layer.hidden_size)
        for rank in range(self.ep_size):
            part = self.partials[rank, source * self.size : (source + 1) * self.size].float()
            total = torch.where(self.sent[source][:, rank, None], total + part, total)
        return total.to(dtype_of(layer.output_dtype or layer.partial_dtype))

    def counts(self, rank: int, steps: list[Windows]) -> torch.Tensor:
        """``[steps, ep_size, 3]`` int64: how many tokens ``rank`` receives from each source, and the sums of their
        numbers and of the squares of those."""
        numbers = np.arange(self.size, dtype=np.int64)
        prefix = np.zeros((self.ep_size, self.size + 1, 3), dtype=np.int64)
        for source in range(self.ep_size):
            here = self.sent[source][:, rank].numpy().astype(np.int64)
            prefix[source, 1:] = np.stack([here, here * numbers, here * numbers**2], 1).cumsum(0)
        first = np.array([step.first for step in steps])
        end = first + np.array([step.tokens for step in steps])
        sources = np.arange(self.ep_size)
        return torch.from_numpy(prefix[sources, end] - prefix[sources, first])

    def windows(self, rng: np.random.Generator, t_hat: int) -> Windows:
        """A random step: every T from 0 to T̂, full and empty ranks often."""
        kinds = rng.random(self.ep_size)
        tokens = np.where(kinds < 0.2, 0, np.where(kinds < 0.5, t_hat, rng.integers(0, t_hat + 1, self.ep_size)))
        first = rng.integers(0, self.size - tokens + 1)
        return Windows(tuple(first.tolist()), tuple(tokens.tolist()), t_hat)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return byte_rows(tensor, tensor.shape[0])


def _typed(raw: torch.Tensor | None) -> torch.Tensor | None:
    return None if raw is None else raw.view(torch.float32)


class PoolOnDevice:
    """One rank's side of a pool. All work goes to the current stream; nothing waits for it."""

    def __init__(self, pool: TokenPool, rank: int, device: torch.device) -> None:
        self.pool, self.rank, self.device = pool, rank, device
        layer = pool.layer

        def stacked(parts: list[Any]) -> Any:
            return None if parts[0] is None else torch.cat(parts).to(device)

        self.rows, self.scales, self.weights = stacked(pool.rows), stacked(pool.scales), stacked(pool.weights)
        self.clean = stacked(pool.clean)
        self.ids = pool.ids[rank].to(dtype_of(layer.id_dtype)).to(device)
        # The row of slots without a token is NaN.
        poison = torch.full((1, layer.hidden_size), torch.nan, dtype=pool.partials.dtype)
        self.partials = torch.cat([pool.partials[rank], poison]).to(device)
        self.expected = pool.expected(rank).to(device)
        # Steps with wrong rows, with wrong counts, with wrong sums; the first of them.
        self.bad = torch.zeros(3, dtype=torch.int64, device=device)
        self._never = torch.full((), 2**62, dtype=torch.int64, device=device)
        self.first_bad = self._never.clone()
        self._sources: dict[int, torch.Tensor] = {}

    def arguments(self, windows: Windows) -> dict[str, Any]:
        """Keyword arguments of dispatch: views of the pool."""
        layer, size = self.pool.layer, self.pool.size
        first, tokens = windows.first[self.rank], windows.tokens[self.rank]
        mine = slice(self.rank * size + first, self.rank * size + first + tokens)
        rows = self.rows[mine].view(dtype_of(layer.row_dtype)).view(tokens, *layer.row)
        scales = None
        if self.scales is not None:
            scales = self.scales[mine].view(dtype_of(layer.scale_dtype)).view(tokens, *(layer.scale or ()))
        return {
            "hidden_states": rows,
            "topk_ids": self.ids[first : first + tokens],
            "topk_weights": None if self.weights is None else self.weights[mine].view(torch.float32),
            "hidden_states_scale": scales,
            "runtime_max_tokens_per_rank": windows.t_hat,
        }

    def receive(self, result: Any, buffer: torch.Tensor, counts: torch.Tensor, step: int) -> None:
        """Compare what was received; write the partial results, NaN where no token is.

        Args:
            result: of dispatch.
            buffer: the combine input buffer.
            counts: ``[ep_size, 3]`` of this step, see :meth:`TokenPool.counts`.
            step: for the record.
        """
        t_hat, size, ep_size = result.tokens_per_rank, self.pool.size, self.pool.ep_size
        if t_hat == 0:
            return
        if t_hat not in self._sources:
            self._sources[t_hat] = torch.arange(ep_size * t_hat, device=self.device) // t_hat * size
        slots = ep_size * t_hat
        rows = byte_rows(result.hidden_states, slots)
        taken = (result.topk_ids != -1).any(1)
        number = rows[:, :4].contiguous().view(torch.int32)[:, 0].to(torch.int64)
        number = number.masked_fill(~taken, 0)
        known = number.clamp(0, size - 1)
        token = self._sources[t_hat] + known
        same = (known == number) & (rows == self.rows[token]).all(1)
        same &= (result.topk_ids == self.clean[token]).all(1)
        if self.weights is not None:
            same &= (byte_rows(result.topk_weights, slots) == self.weights[token]).all(1)
        if self.scales is not None:
            same &= (byte_rows(result.hidden_states_scale, slots) == self.scales[token]).all(1)
        here = torch.stack([taken.to(torch.int64), number, number * number], 1).view(ep_size, t_hat, 3).sum(1)
        self._count(0, (taken & ~same).any(), step)
        self._count(1, (here != counts).any(), step)
        buffer.copy_(self.partials[token.masked_fill(~taken, len(self.partials) - 1)])

    def check_output(self, output: torch.Tensor, windows: Windows, step: int) -> None:
        """Compare what combine returned."""
        first, tokens = windows.first[self.rank], windows.tokens[self.rank]
        expected = self.expected[first : first + tokens]
        self._count(2, (bits(output) != bits(expected)).any(), step)

    def step(self, comm: Any, windows: Windows, counts: torch.Tensor, step: int) -> None:
        """A whole step of this rank alone, for ranks that have a process each."""
        layer = self.pool.layer
        result = comm.dispatch(**self.arguments(windows))
        buffer = comm.get_combine_input_buffer(dtype_of(layer.partial_dtype))
        self.receive(result, buffer, counts, step)
        self.check_output(self.combine(comm, buffer, windows.tokens[self.rank]), windows, step)

    def combine(self, comm: Any, buffer: torch.Tensor, tokens: int) -> torch.Tensor:
        layer = self.pool.layer
        output = None
        if layer.output_dtype is not None:
            shape = (tokens, layer.hidden_size)
            output = torch.full(shape, torch.nan, dtype=dtype_of(layer.output_dtype), device=self.device)
        combined: torch.Tensor = comm.combine(buffer, output=output)
        return combined

    def padded_step(self, comm: Any, control: torch.Tensor, t_hat: int, step: int) -> None:
        """A step for a CUDA graph: T = T̂, tokens past the window have no destination, the window is read on the device.

        Args:
            comm: this rank's communicator.
            control: int64 ``[2 + 3·ep_size]``: first token, number of tokens, counts; rewritten between replays.
            t_hat: T̂.
            step: for the record.
        """
        layer, size = self.pool.layer, self.pool.size
        lane = torch.arange(t_hat, device=self.device)
        live = (lane < control[1])[:, None]
        token = (control[0] + lane).clamp(max=size - 1)
        mine = self.rank * size + token
        scales = None
        if self.scales is not None:
            kind = dtype_of(layer.scale_dtype)
            scales = self.scales[mine].view(kind).view(t_hat, *(layer.scale or ()))
        result = comm.dispatch(
            self.rows[mine].view(dtype_of(layer.row_dtype)).view(t_hat, *layer.row),
            self.ids[token].masked_fill(~live, -1),
            None if self.weights is None else self.weights[mine].view(torch.float32),
            hidden_states_scale=scales,
            runtime_max_tokens_per_rank=t_hat,
        )
        buffer = comm.get_combine_input_buffer(dtype_of(layer.partial_dtype))
        self.receive(result, buffer, control[2:].view(self.pool.ep_size, 3), step)
        output = self.combine(comm, buffer, t_hat)
        expected = self.expected[token].masked_fill(~live, 0)
        self._count(2, (bits(output) != bits(expected)).any(), step)

    def controls(self, steps: list[Windows]) -> torch.Tensor:
        """``[steps, 2 + 3·ep_size]``: for :meth:`padded_step`."""
        windows = [[step.first[self.rank], step.tokens[self.rank]] for step in steps]
        counts = self.pool.counts(self.rank, steps).view(len(steps), -1)
        return torch.cat([torch.tensor(windows, dtype=torch.int64), counts], 1).to(self.device)

    def _count(self, kind: int, bad: torch.Tensor, step: int) -> None:
        self.bad[kind] += bad
        torch.minimum(self.first_bad, self._never.masked_fill(bad, step), out=self.first_bad)

    def report(self) -> None:
        """Wait for the device; AssertionError where anything differed."""
        rows, counts, sums = self.bad.tolist()
        assert rows == counts == sums == 0, (
            f"rank {self.rank}: {rows} steps with rows that differ, {counts} with tokens lost, added or repeated, "
            f"{sums} with wrong sums; the first was step {int(self.first_bad)}"
        )
