"""One rank's dispatch and combine as the harness times them, with checks of every output (peers: :mod:`.peers`).

Before and after the timed replays, an eager step sends fresh random rows, scales, ids and weights, computes partial
results that depend on all of them, and compares the combined output with the same sum formed at the source, bit by bit.
In the timed steps nothing computes: each rank's combine input holds one random row in every slot, so that the output
of the last step is known whatever slots the tokens took.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from moe_layer.benchmarks import peers
from moe_layer.benchmarks.a2a_case import Case
from moe_layer.benchmarks.harness import Work
from moe_layer.benchmarks.ranks import LocalRank, Ranks
from moe_layer.benchmarks.routing import copies
from moe_layer.comm import Channel, DispatchResult, ExpertParallelComm
from moe_layer.comm.rows import as_byte_rows
from moe_layer.errors import CommunicationError, ConfigError
from moe_layer.quant import get_format
from moe_layer.wire import Wire

TIMEOUT_S = 30.0  # of a wait between ranks: far beyond any step, short enough for a benchmark
# Protocol → options of a one-sided channel beyond its protocol.
ONE_SIDED: dict[str, dict[str, Any]] = {
    "sentinel": {},
    "fence": {},
    "fence+fp8": {"fp8_combine": True},
    "auto": {},
}
PORTABLE = ("collective", "loopback")
PEERS = peers.names("a2a")
# Where rows are quantized: before the step, in it by the format's own kernels, by dispatch itself, or on arrival after
# one in BF16 ("before" and "target" are the last rows of the paper's Table A.5).
QUANTIZE = ("given", "before", "fused", "target")
PRIMES = (251, 127, 83, 61, 31, 13, 7, 3)  # moduli of the checksums in partial results


@contextmanager
def prepared(ranks: Ranks, case: Case) -> Iterator[list[Work]]:
    """The work of each local rank, checked by an eager step before and after. Collective.

    Raises:
        ConfigError: a protocol that these processes cannot run.
        CommunicationError: an output that differs from the reference.
    """
    if case.protocol in PEERS:
        with peers.adapter(case.protocol).works(ranks, case) as works_of_peer:
            yield works_of_peer
        return
    channels = _channels(ranks, case)
    works = [OneRank(channel, rank, case) for channel, rank in zip(channels, ranks.local)]
    check_one_step(ranks, works)
    yield [work.work() for work in works]
    check_one_step(ranks, works)
    for channel in channels:
        channel.destroy()


def _channels(ranks: Ranks, case: Case) -> list[Channel]:
    from moe_layer.comm import create_channel

    common: dict[str, Any] = {"max_tokens_per_rank": case.tokens, "timeout_s": TIMEOUT_S}
    if case.protocol in PORTABLE:
        if len(ranks.local) > 1:
            raise ConfigError(f"protocol {case.protocol!r} needs a process a rank (launch 'process')")
        return [create_channel(ranks.group, protocol=case.protocol, device=ranks.local[0].device, **common)]
    options = {"protocol": case.protocol.partition("+")[0], **common, **ONE_SIDED[case.protocol]}
    if ranks.group is None:
        from moe_layer.comm.emulation import emulated_channels

        return list(emulated_channels([rank.device for rank in ranks.local], **options))
    from moe_layer.comm.onesided import OneSidedChannel

    return [OneSidedChannel(ranks.group, device=ranks.local[0].device, **options)]


class OneRank:
    """One rank's tensors and calls.

    Payload bytes of quantized formats are random bytes, or what becomes of normal values where the step quantizes; BF16
    rows are normal. The ids stay as drawn.
    """

    def __init__(self, channel: Channel, rank: LocalRank, case: Case) -> None:
        shape, device = case.shape, rank.device
        self.case, self.rank, self.channel = case, rank, channel
        self.placement = case.placement
        self.comm: ExpertParallelComm = channel.communicator(self.placement, shape.hidden_size)
        self.ids = case.ids(rank.rank).to(device)
        self.rank_of = self.placement.rank_table(device)
        self.sent = copies(self.ids.cpu(), self.placement).to(device)
        dtype = torch.bfloat16 if shape.activation_format == "bf16" else torch.uint8
        self.x = torch.empty(case.tokens, shape.data_bytes // dtype.itemsize, dtype=dtype, device=device)
        self.scale: torch.Tensor | None = None
        if shape.scale_bytes:
            self.scale = torch.empty(case.tokens, shape.scale_bytes, dtype=torch.uint8, device=device)
        self.z: torch.Tensor | None = None  # what the step quantizes
        if case.quantize != "given":
            self.z = torch.empty(case.tokens, shape.hidden_size, dtype=torch.bfloat16, device=device)
            self.fmt = get_format(shape.activation_format)
            self.encoder = Wire(self.fmt, in_kernel=self.comm.encodes_in_kernel).encoder(None)
            self.wire = Wire(self.fmt, in_kernel=False, quantize_at="target")
        self.weights = torch.empty(case.tokens, shape.top_k, device=device)
        self.output = torch.empty(case.tokens, shape.hidden_size, dtype=torch.bfloat16, device=device)
        self.generator = torch.Generator(device).manual_seed(case.seed * 1000 + rank.rank)
        self.buffer: torch.Tensor | None = None  # the combine input, known from the first step on
        self.expected: torch.Tensor | None = None
        # So that a difference of one survives rounding: BF16 has all integers up to 256 (sums), E4M3 up to 16 (terms).
        largest = 256 // case.ep_size if case.protocol != "fence+fp8" else 16
        self.modulus = next((prime for prime in PRIMES if prime <= largest), PRIMES[-1])

    def work(self) -> Work:
        capturable = self.rank.device.type == "cuda" and self.case.protocol not in PORTABLE
        return Work({"dispatch": self.dispatch, "combine": self.combine}, self.refresh, self.check, capturable)

    def dispatch(self) -> DispatchResult:
        if self.case.quantize == "fused":
            assert self.z is not None
            return self.comm.dispatch(
                self.z, self.ids, self.weights, runtime_max_tokens_per_rank=self.case.tokens, encoder=self.encoder
            )
        if self.case.quantize == "target":
            assert self.z is not None
            received = self.comm.dispatch(self.z, self.ids, self.weights, runtime_max_tokens_per_rank=self.case.tokens)
            q = self.arrived = self.wire.receive(received, self.case.shape.hidden_size, None)
            return replace(received, hidden_states=q.data, hidden_states_scale=q.scale)
        if self.z is not None:
            self.x, self.scale = self.encoder.quantize(self.z)
        return self.comm.dispatch(
            self.x, self.ids, self.weights, hidden_states_scale=self.scale, runtime_max_tokens_per_rank=self.case.tokens
        )

    def combine(self) -> None:
        self.buffer = self.comm.get_combine_input_buffer()
        self.comm.combine(self.buffer, output=self.output)

    def randomize(self) -> None:
        """Fresh inputs and a poisoned output."""
        self.weights.uniform_(generator=self.generator)
        self.output.fill_(float("nan"))
        if self.z is not None:
            self.z.normal_(generator=self.generator)
            self.x, self.scale = self.encoder.quantize(self.z)
            return
        if self.x.dtype == torch.uint8:
            self.x.random_(0, 256, generator=self.generator)
        else:
            self.x.normal_(generator=self.generator)
        if self.scale is not None:
            self.scale.random_(0, 256, generator=self.generator)

    def refresh(self, repeat: int) -> None:
        """As :meth:`randomize`, and a row for every slot of the combine input, another on every rank and repeat."""
        self.randomize()
        total = torch.zeros(self.output.shape, device=self.rank.device)
        for r in range(self.case.ep_size):
            row = self._row(r, repeat)
            if r == self.rank.rank and self.buffer is not None:
                self.buffer.copy_(row.expand_as(self.buffer))
            total = torch.where(self.sent[:, r, None], total + row.float(), total)
        # A combine that rewrites its input in place leaves the next step another one; eager steps alone check it.
        self.expected = None if self.case.protocol == "fence+fp8" else total.bfloat16()

    def _row(self, rank: int, repeat: int) -> torch.Tensor:
        """``[hidden]`` BF16, the same in every process."""
        generator = torch.Generator().manual_seed((self.case.seed * 1000 + rank) * 1000 + repeat)
        return torch.randn(self.case.shape.hidden_size, generator=generator).bfloat16().to(self.rank.device)

    def check(self) -> None:
        """The last step's output, to the bit."""
        self.raise_reported()
        if self.expected is not None:
            self.compare(self.expected)

    def raise_reported(self) -> None:
        report = getattr(self.channel, "raise_reported", None)  # one-sided channels: what a kernel gave up on
        if report is not None:
            report()

    def compare(self, expected: torch.Tensor) -> None:
        wrong = (self.output.view(torch.int16) != expected.view(torch.int16)).any(1).nonzero().flatten()
        if wrong.numel():
            raise CommunicationError(
                f"rank {self.rank.rank}: {wrong.numel()} of {self.case.tokens} combined rows differ from the "
                f"reference, the first is row {int(wrong[0])}"
            )

    # ---- one step with computed partial results ----

    def compute(self, received: DispatchResult) -> None:
        """Fill the combine input from what was received; slots without a token hold NaN."""
        self.raise_reported()
        self.buffer = self.comm.get_combine_input_buffer()
        valid = (received.topk_ids >= 0).any(1)
        assert received.topk_weights is not None
        rows, scale = received.hidden_states, received.hidden_states_scale
        if self.case.quantize == "target":
            rows, scale = self.fmt.to_wire(replace(self.arrived, data=rows, scale=scale))
        partial = self.partial(self.rank.rank, rows, received.topk_ids, received.topk_weights, scale)
        self.buffer.copy_(torch.where(valid[:, None], partial, float("nan")))

    def reference(self) -> torch.Tensor:
        """``[T, hidden]`` BF16: every target rank's partial result of this rank's tokens, summed in rank order."""
        total = torch.zeros(self.output.shape, device=self.rank.device)
        for r in range(self.case.ep_size):
            partial = self.partial(r, self.x, self.ids, self.weights, self.scale)
            total = torch.where(self.sent[:, r, None], total + partial.float(), total)
        return total.bfloat16()

    def partial(
        self, rank: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor | None
    ) -> torch.Tensor:
        """``[n, hidden]`` BF16: a checksum of a token's bytes, and of its ids and weights for the experts of ``rank``.

        Sums over a row's bytes modulo a small prime, so that any flipped bit shows and every sum over ranks is exact.
        """
        hidden = self.case.shape.hidden_size
        column = torch.arange(hidden, device=x.device)
        rows = as_byte_rows(x.contiguous())
        total = torch.zeros(x.shape[0], hidden, dtype=torch.int32, device=x.device)
        for chunk in range(max(1, rows.shape[1] // hidden)):
            total.add_(rows[:, (chunk * hidden + column) % rows.shape[1]], alpha=chunk + 1)
        if scale is not None:
            bytes_of_scale = as_byte_rows(scale.contiguous())
            total += bytes_of_scale[:, column % bytes_of_scale.shape[1]]
        routing = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        bits = weights.contiguous().view(torch.int32).long()
        for j in range(ids.shape[1]):
            known = ids[:, j] >= 0
            expert = torch.where(known, ids[:, j], 0).long()
            routing += torch.where(known & (self.rank_of[expert] == rank), (j + 1) * (bits[:, j] + expert), 0)
        total += (routing % self.modulus)[:, None].int()
        return (total % self.modulus).bfloat16()


def check_one_step(ranks: Ranks, works: Sequence[OneRank]) -> None:
    """Dispatch, compute and combine on every local rank, and compare with the reference.

    Ranks of one process go phase by phase with waits between: nothing that might wait for an idle GPU may be issued
    while a rank spins for one that has not been launched.
    """
    received, references = [], []
    for work in works:
        with work.rank.active():
            work.randomize()
            references.append(work.reference())  # now: what dispatch returns may be views of what it was given
    ranks.synchronize()
    for work in works:
        with work.rank.active():
            received.append(work.dispatch())
    ranks.synchronize()
    for work, result in zip(works, received):
        with work.rank.active():
            work.compute(result)
    ranks.synchronize()
    for work in works:
        with work.rank.active():
            work.combine()
    ranks.synchronize()
    for work, reference in zip(works, references):
        with work.rank.active():
            work.raise_reported()
            work.compare(reference)
