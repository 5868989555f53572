"""What the router's kernels are specialised for, and how the sum over the hidden dimension is divided.

The hidden dimension is cut into segments of ``segment`` K steps (64 values each), segments into groups of ``span``. A
logit is the sum over groups of the sums over their segments, each begun at +0 and taken in order; a segment is one
chain of WGMMAs. The division depends on the model alone, so a logit's bits do not depend on the number of tokens:
with few tokens a block computes a segment (all multiprocessors stream weights), with many a group (few partial sums).
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
WARPGROUP = 128
K_STEP = 64  # BF16 values in a row of the 128-byte swizzle
STEP_BYTES = 2 * K_STEP
MMA_ROWS = 64
# Blocks that few tokens are spread over: the multiprocessors of an H100 or H200, on any GPU, for equal bits.
BLOCKS = 132
GROUPS = 4
SHARED_MEMORY = 200 * 1024  # of 227 KiB: barriers and alignment need the rest
MAX_EXPERTS = 1024
MAX_TOP_K = 32
MAX_TERMS = 3
# Beyond this many tokens the partial sums of all segments cost more than idle multiprocessors (estimated: at 256 tokens
# they are 7 MB of Kimi-K3).
NARROW_TOKENS = 256
NARROW_TILES = (8, 16, 64, 128)
WIDE_TOKENS, WIDE_ROWS, WIDE_CLUSTER = 128, 128, 2
TOKEN_WARPS = 4  # tokens of a block of the choice kernel where a warp takes a token
COLUMNS = 128  # experts that a warp's lanes hold four each of


def _divide(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class RouterModel:
    """What the kernels need to know of a model; see :class:`moe_layer.config.MoEConfig`.

    Attributes:
        experts, hidden, top_k: ``n_routed_experts``, ``hidden_size``, ``num_experts_per_tok``.
        n_group, topk_group, group_score: as there.
        scoring: ``softmax``, ``sigmoid`` or ``sqrtsoftplus``.
        normalized, scale: of the weights: ``norm_topk_prob``, ``routed_scaling_factor``.
        biased: whether there is a correction bias.
    """

    experts: int
    hidden: int
    top_k: int
    n_group: int
    topk_group: int
    group_score: str
    scoring: str
    normalized: bool
    scale: float
    biased: bool

    @property
    def supported(self) -> bool:
        """Whether there are kernels for it (on Hopper); rows are loaded by TMA, in units of 16 bytes."""
        return self.experts <= MAX_EXPERTS and self.top_k <= MAX_TOP_K and self.hidden % 8 == 0


@dataclass(frozen=True)
class LogitsSpec:
    """A logits kernel.

    Attributes:
        experts, hidden: of the weights, ``[terms, experts, hidden]`` BF16.
        terms: BF16 terms of a weight, 1 … 3.
        tokens: of a tile, WGMMA's N.
        rows: experts of a tile: 64 for each consumer warpgroup.
        segment: K steps of a segment.
        span: segments that a block sums.
        cluster: blocks, of neighbouring token tiles, that share their weight tiles.
    """

    experts: int
    hidden: int
    terms: int
    tokens: int
    rows: int
    segment: int
    span: int
    cluster: int

    @property
    def k_steps(self) -> int:
        return _divide(self.hidden, K_STEP)

    @property
    def parts(self) -> int:
        """Partial sums of a logit."""
        return _divide(self.k_steps, self.segment * self.span)

    @property
    def consumers(self) -> int:
        return self.rows // MMA_ROWS

    @property
    def threads(self) -> int:
        return self.consumers * WARPGROUP + WARP

    @property
    def columns(self) -> int:
        """Floats of a token's partial sums: whole quads of whole warps."""
        return _divide(self.experts, COLUMNS) * COLUMNS

    @property
    def row_tiles(self) -> int:
        """Tiles of experts; with those past the last expert, which are zeros, ``columns`` are all written."""
        return self.columns // self.rows

    @property
    def stage_bytes(self) -> int:
        return (self.terms * self.rows + self.tokens) * STEP_BYTES

    @property
    def stages(self) -> int:
        return min(self.segment * self.span, SHARED_MEMORY // self.stage_bytes)

    @property
    def refills(self) -> bool:
        """Whether a stage is used more than once."""
        return self.stages < self.segment * self.span


@dataclass(frozen=True)
class ChoiceSpec:
    """A choice kernel: as :class:`moe_layer.router.Router` chooses.

    Attributes:
        experts, top_k, n_group, topk_group, group_score, scoring, normalized, scale: of the model.
        biased, image_biased: whether there are a correction bias, and another one for image tokens with their mask.
        parts, span: partial sums of a logit, and how many of them make a group.
        warps: that work on a token.
    """

    experts: int
    top_k: int
    n_group: int
    topk_group: int
    group_score: str
    scoring: str
    normalized: bool
    scale: float
    biased: bool
    image_biased: bool
    parts: int
    span: int
    warps: int

    @property
    def columns(self) -> int:
        return _divide(self.experts, COLUMNS) * COLUMNS

    @property
    def quads(self) -> int:
        """Times four experts that a lane holds."""
        return self.columns // COLUMNS // self.warps

    @property
    def block_tokens(self) -> int:
        return 1 if self.warps > 1 else TOKEN_WARPS

    @property
    def threads(self) -> int:
        return WARP * self.warps * self.block_tokens

    @property
    def list_length(self) -> int:
        """Of a warp's candidates: whole quads."""
        return _divide(self.top_k, 4) * 4


def segments(experts: int, hidden: int) -> tuple[int, int]:
    """``(segment, span)`` of a model."""
    steps = _divide(hidden, K_STEP)
    tiles = _divide(experts, MMA_ROWS)
    wanted = max(1, BLOCKS // tiles)
    if wanted > GROUPS:
        wanted -= wanted % GROUPS  # even groups
    segment = _divide(steps, wanted)
    return segment, _divide(_divide(steps, segment), GROUPS)


def logits_specs(model: RouterModel, terms: int) -> dict[int, LogitsSpec]:
    """Every logits kernel of a model, by the largest number of tokens in a tile; the last one is for many tokens."""
    experts, hidden = model.experts, model.hidden
    segment, span = segments(experts, hidden)
    found = {n: LogitsSpec(experts, hidden, terms, n, MMA_ROWS, segment, 1, 1) for n in NARROW_TILES}
    found[0] = LogitsSpec(experts, hidden, terms, WIDE_TOKENS, WIDE_ROWS, segment, span, WIDE_CLUSTER)
    return found


def choose_logits(model: RouterModel, terms: int, tokens: int) -> LogitsSpec:
    """The logits kernel for a step of so many tokens."""
    specs = logits_specs(model, terms)
    if tokens > NARROW_TOKENS:
        return specs[0]
    return specs[next((n for n in NARROW_TILES if n >= tokens), NARROW_TILES[-1])]


def choice_spec(model: RouterModel, logits: LogitsSpec, *, image_biased: bool) -> ChoiceSpec:
    """The choice kernel that reads a logits kernel's partial sums: few tokens by several warps each."""
    wide = logits.cluster > 1
    return ChoiceSpec(
        model.experts, model.top_k, model.n_group, model.topk_group, model.group_score, model.scoring,
        model.normalized, model.scale, model.biased, image_biased, logits.parts,
        1 if wide else segments(model.experts, model.hidden)[1], 1 if wide else logits.columns // COLUMNS,
    )  # fmt: skip
