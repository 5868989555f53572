"""What a Hopper grouped GEMM is specialised for: shapes, formats, tiles. Pure arithmetic, no DSL."""

from __future__ import annotations

from dataclasses import dataclass

from moe_layer.gemm.activation import Activation

WARP, WARPGROUP = 32, 128
CONSUMER_WARPGROUPS = 2
WEIGHT_ROWS = 256  # rows of the weight tile: what two warpgroups hold in registers beside 128 tokens
STAGE_ROW_BYTES = 128  # of K a stage: the widest swizzle, so that WGMMA reads shared memory without conflicts
SCALE_BLOCK = 128  # FP8: K values a token scale covers, and rows and columns a weight scale covers
SWAP_TOKENS = (8, 16, 32, 64, 96)  # token tiles with tokens as WGMMA's N
# With low-bit weights tokens are always N. Beyond the last of a format's, registers would be spilled.
LOW_BIT_TOKENS = (8, 16, 32, 48, 64, 80, 96, 112, 128, 144, 152)
LARGEST_TOKENS = {"mxfp4": 152, "nvfp4": 152, "mxfp8": 144, "int4": 96}
WIDE_TOKENS = 128  # token tile with tokens as WGMMA's M
STAGED_TOKENS = 32  # of the swapped epilogue at a time: with 64, FP8 would lose a stage
SHARED_MEMORY = 232448  # bytes a block of sm_90 may use
# Registers a thread of producers and consumers, by consumer warpgroups, of the 65536 of a multiprocessor.
REGISTERS = {2: (56, 224), 4: (56, 104)}
# Low-bit weights: up to so many tokens twice as many warps, of one m64 each, hide more of the latency of widening.
# INT4 needs more registers.
MANY_WARPS_TOKENS, MANY_WARPS_TOKENS_INT4 = 64, 32
# Up to so many tokens: steps of 16 K started together. More wait less for one another, fewer need less registers.
TOGETHER = {16: 4, 64: 2, 152: 1}
# Up to so many tokens a stage has two packed tiles: half the barriers.
TWO_TILES_TOKENS = 32
# K of a packed tile. Twice 128 bytes of BF16 tokens, so that a stage is work enough for its barriers.
WIDENED_K = 128


@dataclass(frozen=True)
class LowBitFormat:
    """How weights that are widened on their way to the tensor cores lie in a stage (gemm/register_tiles.py).

    Attributes:
        bits: of a weight.
        scale_bytes: of a row's scales for 128 of K.
        block: K values a scale covers.
    """

    bits: int
    scale_bytes: int
    block: int

    @property
    def word_bytes(self) -> int:
        """Of a stage's weights; its scales follow."""
        return WEIGHT_ROWS * WIDENED_K * self.bits // 8

    @property
    def stage_bytes(self) -> int:
        return self.word_bytes + WEIGHT_ROWS * self.scale_bytes


LOW_BIT_FORMATS = {
    "mxfp4": LowBitFormat(4, 4, 32),
    "nvfp4": LowBitFormat(4, 8, 16),
    "int4": LowBitFormat(4, 8, 32),
    "mxfp8": LowBitFormat(8, 4, 32),
}


def token_tiles(weights: str = "") -> tuple[int, ...]:
    """The rows that a token tile can have, with weights widened from a format of ``LOW_BIT_FORMATS``, or ``""``."""
    if not weights:
        return (*SWAP_TOKENS, WIDE_TOKENS)
    return tuple(tokens for tokens in LOW_BIT_TOKENS if tokens <= LARGEST_TOKENS[weights])


@dataclass(frozen=True)
class GroupedSpec:
    """One grouped GEMM: ``out[row] = epilogue(W[expert(row)] · x[row])``.

    Attributes:
        experts: local experts.
        parts: 2 for FC1 (gate and up, joined by ``activation``), 1 for FC2.
        n: output features of a part; k: their length. ``k`` values fill whole 16-byte vectors.
        dtype: ``"bf16"`` or ``"fp8"`` (E4M3 with 1×128 token scales and 128×128 weight scales) of both operands.
        out: ``"bf16"``, ``"fp32"``, ``"fp8"`` with a scale for every 128 features of a row, or ``"mxfp8"``: BF16 whose
            values are those of MXFP8.
        tokens: rows of the token tile, of :func:`token_tiles`; up to 96 with tokens as WGMMA's N (weights as M), 128
            with tokens as M. With low-bit weights tokens are always N.
        gather: rows of ``x`` are read through the slot list (FC1), else in order.
        activation: of FC1.
        cluster: blocks (1 or 2) that share each weight tile, every one with token tiles of its own: half the weights
            come from L2, which limits the wide kernels.
        group: token tiles that share a sweep over the weights, so that both stay in L2.
        weights: a format of ``LOW_BIT_FORMATS`` that is widened to ``dtype`` in registers, or ``""``: as ``dtype``.
        token_factors: with low-bit weights: an FP32 factor for each row of ``x``, which BF16 could not hold (NVFP4's
            second-level scale).
    """

    experts: int
    parts: int
    n: int
    k: int
    dtype: str
    out: str
    tokens: int
    gather: bool
    activation: Activation | None = None
    cluster: int = 1
    group: int = 16
    weights: str = ""
    token_factors: bool = False

    def __post_init__(self) -> None:
        assert not self.weights or (self.dtype == "bf16" and self.weights in LOW_BIT_FORMATS), self.weights
        assert self.tokens in token_tiles(self.weights), self.tokens

    @property
    def swap(self) -> bool:
        """Whether weights are WGMMA's M operand."""
        return self.low_bit is not None or self.tokens != WIDE_TOKENS

    @property
    def consumer_warpgroups(self) -> int:
        """Of a block, beside the producer's one."""
        limit = MANY_WARPS_TOKENS_INT4 if self.weights == "int4" else MANY_WARPS_TOKENS
        return 2 * CONSUMER_WARPGROUPS if self.weights and self.tokens <= limit else CONSUMER_WARPGROUPS

    @property
    def consumers(self) -> int:
        """Consumer threads."""
        return WARPGROUP * self.consumer_warpgroups

    @property
    def threads(self) -> int:
        return WARPGROUP + self.consumers

    @property
    def steps_together(self) -> int:
        """Low-bit weights: WGMMA's steps of 16 K that are widened and started together."""
        return next(steps for tokens, steps in TOGETHER.items() if self.tokens <= tokens)

    @property
    def low_bit(self) -> LowBitFormat | None:
        """The weights' format where it is widened in registers."""
        return LOW_BIT_FORMATS.get(self.weights)

    @property
    def out_bytes(self) -> int:
        """Of an output element."""
        return {"bf16": 2, "mxfp8": 2, "fp32": 4, "fp8": 1}[self.out]

    @property
    def element_bytes(self) -> int:
        return 2 if self.dtype == "bf16" else 1

    @property
    def scaled(self) -> bool:
        return self.dtype == "fp8"

    @property
    def k_tile(self) -> int:
        """K of a stage."""
        return STAGE_ROW_BYTES // self.element_bytes if self.low_bit is None else WIDENED_K * self.stage_units

    @property
    def stage_units(self) -> int:
        """Low-bit weights: packed tiles of 128 K in a stage."""
        few = self.tokens <= TWO_TILES_TOKENS and self.low_bit is not None and self.low_bit.bits == 4
        return 2 if few and -(-self.k // WIDENED_K) % 2 == 0 else 1

    @property
    def weight_blocks(self) -> int:
        """Blocks of 64 weight rows, WGMMA's M, of a consumer warpgroup."""
        return WEIGHT_ROWS // 64 // self.consumer_warpgroups

    @property
    def stage_lines(self) -> int:
        """Lines of 128 bytes that a token's row fills in a stage."""
        return self.k_tile * self.element_bytes // STAGE_ROW_BYTES

    @property
    def k_steps(self) -> int:
        return -(-self.k // self.k_tile)

    @property
    def tile_features(self) -> int:
        """Output features of a weight tile."""
        return WEIGHT_ROWS // self.parts

    @property
    def work_tokens(self) -> int:
        """Tokens of a unit of work: a tile for every block of the cluster."""
        return self.tokens * self.cluster

    @property
    def column_tiles(self) -> int:
        return -(-self.n // self.tile_features)

    @property
    def scale_columns(self) -> int:
        """Weight scales along K."""
        return -(-self.k // SCALE_BLOCK)

    @property
    def scale_rows(self) -> int:
        """Weight scales along a part's rows."""
        return -(-self.n // SCALE_BLOCK)

    @property
    def weight_stage_bytes(self) -> int:
        return WEIGHT_ROWS * STAGE_ROW_BYTES if self.low_bit is None else self.low_bit.stage_bytes * self.stage_units

    @property
    def token_stage_bytes(self) -> int:
        return self.tokens * STAGE_ROW_BYTES * self.stage_lines

    @property
    def scale_stage_floats(self) -> int:
        """Of a stage: a scale for each token, then two weight scales (padded to 16 bytes)."""
        return self.tokens + 4 if self.scaled else 0

    @property
    def staging_bytes(self) -> int:
        """The epilogue's share of shared memory; see sm90_epilogue."""
        if self.swap:
            return min(self.tokens, STAGED_TOKENS) * self.staging_row_bytes
        return 8 * 16 * 128

    @property
    def staging_row_bytes(self) -> int:
        """A token's row in the swapped epilogue; 16 bytes more than its features, against bank conflicts."""
        return self.tile_features * (2 if self.out == "bf16" else 4) + 16

    @property
    def stages(self) -> int:
        fixed = self.staging_bytes + 12 * (self.experts + 1) + 1024 + 512
        stage = self.weight_stage_bytes + self.token_stage_bytes + 4 * self.scale_stage_floats + 16
        return min(8, (SHARED_MEMORY - fixed) // stage)
