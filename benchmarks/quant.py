"""The quantizers beside the rate of a copy (``moe-layer bench quant``).

A case is one format, one way, ``[T, K]`` tokens of a model's routed width. Its bytes are what it must read and write,
elements and scales once each; the floor is those bytes at the rate of a copy, measured in the same run, and an empty
kernel. Steps take turns over so many tensors that together they exceed the L2 cache (at most :data:`MOST_TENSORS`;
below that, tokens come from L2, as they do behind the kernel that made them). Before and after, rows of the result are
compared with the PyTorch reference on the CPU, bit by bit.

The rows "at the source" and "at the target" of the paper's Table A.5 are ``moe-layer bench a2a --quantize
before,target``, and ``fused`` is what this library does for few tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any, ClassVar

import torch

from moe_layer.benchmarks.bench import LocalBench
from moe_layer.benchmarks.ceilings import launch_us
from moe_layer.benchmarks.harness import Options, Work, measure
from moe_layer.benchmarks.ranks import Ranks
from moe_layer.benchmarks.shapes import Shape
from moe_layer.benchmarks.stages import Machine
from moe_layer.errors import ConfigError, MoELayerError
from moe_layer.quant import QuantizedTensor, get_format

FORMATS = ("fp8", "mxfp8", "mxfp4", "nvfp4")
WAYS = ("quantize", "dequantize")
SCALES = ("row", "given")
TOKENS = (1, 4, 16, 64, 128, 512, 1024, 4096, 8192, 32768)
CPU_TOKENS = (1, 16)
ROTATION_BYTES = 256 << 20  # several times the L2 cache of any GPU
COPY_BYTES = 64 << 20  # of a tensor; PyTorch copies 512 MiB at two thirds of the rate (measured: docs/performance.md)
MOST_TENSORS = 100  # as many as steps
CHECKED_ROWS = 64


class QuantizerError(MoELayerError, RuntimeError):
    """A quantizer's bits were wrong."""


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        format: registry name of an activation format with scales.
        way: ``"quantize"`` (BF16 in) or ``"dequantize"`` (BF16 out).
        columns: K.
        tokens: T.
        scale: of two-level formats: ``"row"``, each row's own, or ``"given"``, one for all; ``""`` for the others.
    """

    format: str
    way: str
    columns: int
    tokens: int
    scale: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        fmt = get_format(self.format)
        scales = fmt.scale_row_bytes(self.columns) + (4 if self.scale == "row" else 0)
        return self.tokens * (2 * self.columns + fmt.row_bytes(self.columns) + scales)


def cases_of(
    shapes: Sequence[Shape], formats: Sequence[str], ways: Sequence[str], tokens: Sequence[int], scales: Sequence[str]
) -> Iterator[Case]:
    """Every combination, once for each width that the shapes have.

    Raises:
        ConfigError: an unknown way or kind of scale, or a format that has no scales or cannot carry activations.
        FormatError: no such format.
    """
    for given, known in ((ways, WAYS), (scales, SCALES)):
        for name in given:
            if name not in known:
                raise ConfigError(f"{name!r} is none of {', '.join(known)}")
    for name in formats:
        if get_format(name).block is None or not get_format(name).is_activation_format:
            raise ConfigError(f"format {name!r} is none that rows are quantized to; try {', '.join(FORMATS)}")
    for columns in dict.fromkeys(shape.hidden_size for shape in shapes):
        for name in formats:
            for scale in scales if get_format(name).two_level else ("",):
                for way in ways:
                    for count in tokens:
                        yield Case(name, way, columns, count, scale)


def measure_machine(ranks: Ranks) -> Machine:
    """Rates of the device of ``ranks``' one local rank; copies take turns over tensors as the cases do."""
    device = ranks.local[0].device
    nbytes, count = (COPY_BYTES, ROTATION_BYTES // COPY_BYTES) if ranks.is_cuda else (COPY_BYTES // 8, 2)
    tensors = torch.randint(0, 256, (count, 2, nbytes), dtype=torch.uint8, device=device)
    turns = cycle(range(count))

    def copy() -> None:
        target, source = tensors[next(turns)]
        target.copy_(source)

    timing = measure(ranks, [Work({"copy": copy})], Options(warmup=count, steps=4 * count, repeats=5))
    return Machine(2 * nbytes / timing.step_us / 1e3, launch_us(ranks) if ranks.is_cuda else 0.0)


class Problem:
    """A case's tensors and its step."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.fmt = case, get_format(case.format)
        count = max(1, min(MOST_TENSORS, -(-ROTATION_BYTES // case.nbytes))) if device.type == "cuda" else 2
        self.generator = torch.Generator(device).manual_seed(case.tokens)
        shape = (case.tokens, case.columns)
        self.rows = [torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(count)]
        self.scale = torch.tensor(1e-3, device=device) if case.scale == "given" else None
        self._draw()
        self.stored = [self._quantize(x) for x in self.rows] if case.way == "dequantize" else []
        self._turns = cycle(range(count))
        self._last: tuple[int, QuantizedTensor | torch.Tensor] | None = None

    def _quantize(self, x: torch.Tensor) -> QuantizedTensor:
        return self.fmt.quantize(x, global_scale=self.scale)

    def _draw(self) -> None:
        for x in self.rows:
            x.normal_(generator=self.generator)
            x.mul_(torch.empty(len(x), 1, device=x.device).log_normal_(generator=self.generator))

    def step(self) -> None:
        turn = next(self._turns)
        if self.case.way == "quantize":
            self._last = turn, self._quantize(self.rows[turn])
        else:
            self._last = turn, self.fmt.dequantize(self.stored[turn], torch.bfloat16)

    def refresh(self, repeat: int) -> None:
        """New values; what the last step left is poisoned."""
        self._draw()
        for x, q in zip(self.rows, self.stored):
            fresh = self._quantize(x)
            for mine, new in ((q.data, fresh.data), (q.scale, fresh.scale), (q.global_scale, fresh.global_scale)):
                if mine is not None and new is not None:
                    mine.copy_(new)
        if self._last is not None:
            for tensor in _tensors(self._last[1]):
                tensor.view(torch.uint8).fill_(0xA5)

    def check(self) -> None:
        """The last step's result, some rows of it, to the bit.

        Raises:
            QuantizerError: other bits than the reference's.
        """
        assert self._last is not None
        turn, result = self._last
        some = torch.linspace(0, self.case.tokens - 1, min(CHECKED_ROWS, self.case.tokens)).long()
        x = self.rows[turn][some.to(self.rows[turn].device)].cpu()
        scale = None if self.scale is None else self.scale.cpu()
        expected: QuantizedTensor | torch.Tensor = self.fmt.quantize_reference(x, global_scale=scale)
        if self.case.way == "dequantize":
            assert isinstance(expected, QuantizedTensor)
            expected = self.fmt.dequantize_reference(expected, torch.bfloat16)
        for got, want in zip(_tensors(result), _tensors(expected)):
            mine = got.view(torch.uint8).cpu()
            if want.dim():
                mine = mine[some]
            if not torch.equal(mine, want.view(torch.uint8)):
                raise QuantizerError(f"{self.case}: the bits are not those of the PyTorch reference")


def _tensors(result: QuantizedTensor | torch.Tensor) -> list[torch.Tensor]:
    """What a step wrote; a scale that was given is not."""
    if isinstance(result, torch.Tensor):
        return [result]
    over = result.global_scale if result.global_scale is not None and result.global_scale.dim() else None
    return [t for t in (result.data, result.scale, over) if t is not None]


def run_case(ranks: Ranks, case: Case, machine: Machine, options: Options) -> dict[str, Any]:
    """Time and check a case on ``ranks``' one local rank; its results.

    Raises:
        QuantizerError: wrong bits.
    """
    problem = Problem(case, ranks.local[0].device)
    timing = measure(ranks, [Work({case.way: problem.step}, problem.refresh, problem.check)], options)
    gbps, floor = case.nbytes / timing.step_us / 1e3, machine.floor_us(case.nbytes)
    return {
        **timing.as_results(), "gbps": gbps, "of_copy": gbps / machine.copy_gbps, "floor_us": floor,
        "ratio": timing.step_us / floor, "tensors": len(problem.rows),
    }  # fmt: skip


class QuantBench(LocalBench):
    """One run."""

    kind: ClassVar[str] = "quant"

    def __init__(self, cases: Sequence[Case], device_type: str | None, options: Options) -> None:
        super().__init__(device_type)
        self.cases, self.options = list(cases), options
        self._machine: Machine | None = None

    def measure_ceilings(self) -> tuple[dict[str, Any] | None, str | None]:
        with self.active():
            self._machine = measure_machine(self.ranks)
        return asdict(self._machine), None

    def parameters(self, case: Case) -> dict[str, Any]:
        return {**asdict(case), "nbytes": case.nbytes, "steps": self.options.steps, "repeats": self.options.repeats}

    def results(self, case: Case) -> dict[str, Any]:
        assert self._machine is not None
        with self.active():
            return run_case(self.ranks, case, self._machine, self.options)
