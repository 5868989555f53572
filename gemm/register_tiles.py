"""Low-bit weights in the order in which the threads of a Hopper grouped GEMM load them into registers.

On sm_90 low-bit weights are widened to BF16 on their way into WGMMA's register operand. Which thread holds which
element of that operand is fixed by the instruction, so weights are arranged once, at load, such that a thread's own
codes for 64 of K are one 16-byte vector of shared memory (two with 8-bit codes) and a whole stage of the main loop is
one contiguous copy. The arrangement is a permutation of bits, made straight from the checkpoint's bytes, and has an
exact inverse: :meth:`RegisterTiles.unpack` returns those bytes.

**Tile.** 256 tile rows × 128 of K are a stage: its words, then its scales. Tile row t is feature
``column · 256 + t`` of a single part, and of gate and up (8 rows of the one, 8 of the other), with g = ⌊t / 8⌋, part
g mod 2, feature ``column · 128 + ⌊g / 2⌋ · 8 + t mod 8``: a thread's two rows of an operand are then gate and up of the
same feature. Rows past N and columns past K hold zeros under a scale of 1.

**Operand.** Of m64 block b, thread i of a warpgroup (warp w, lane l, q = l mod 4) owns the tile rows
r = 64 b + 16 w + ⌊l / 4⌋ (h = 0) and r + 8 (h = 1), and of a k16 step four pairs: p = 2 z + h is row h,
k = 8 z + 2 q and the next. The words of :mod:`~moe_layer.gemm.register_words` hold them.

**Words.** 4-bit codes: one word a thread and step, ``[half of 64 K][block][thread][step: 4]``, 16 KiB. 8-bit codes: two
words (pairs 0 and 1, pairs 2 and 3), ``[half of 64 K][block][vector: 2][thread][step: 2][word: 2]``, 32 KiB.

FP8 with E8M0 scales for blocks of 32×32 or 128×128 is arranged as MXFP8, each scale as often as it has rows and
blocks of 32 there; unpacking takes the first of each.

**Scales.** ``[block][warp][⌊lane / 4⌋][h][of the 128 K, in order]``, see :mod:`~moe_layer.gemm.register_scales`: E8M0 4
bytes a row, NVFP4's E4M3 8 bytes, INT4's BF16, which stay as they are, 8 bytes.

Marlin (W4A16 GEMM on Ampere) is where fetching weights in the order of the matrix instruction's operand is known from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from moe_layer.errors import FormatError, TensorError, UnrepresentableError
from moe_layer.gemm import register_scales, register_words
from moe_layer.gemm.register_scales import E2M1_SCALES, E4M3_SCALES, NVFP4_FACTOR
from moe_layer.gemm.sm90_spec import WEIGHT_ROWS, WIDENED_K
from moe_layer.quant import get_format

BLOCKS, WARPS, LANE_ROWS, QUADS = 4, 4, 8, 4  # m64 blocks of a tile, warps of a warpgroup, lanes of a warp: 8 × 4
STEP = 16  # of K a WGMMA
PACKED_FORMATS = ("int4", "mxfp4", "mxfp8", "nvfp4")
# FP8 with a power of two for a block of rows and columns is MXFP8 whose scales repeat.
BLOCK_FORMATS = {"fp8_32x32": "mxfp8", "fp8_128x128_ue8m0": "mxfp8"}
_BIT_ORDER = {"mxfp4": register_words.E2M1_BITS, "nvfp4": register_words.E2M1_BITS, "mxfp8": register_words.E4M3_BITS}
_E8M0 = {"mxfp4": E2M1_SCALES, "mxfp8": E4M3_SCALES}
_MAGNITUDE = {"mxfp4": 0x77, "nvfp4": 0x77, "mxfp8": 0x7F}  # the bits of a byte that ±0 has not
_ZERO = {"int4": 0x88}  # a byte of zero codes, where it is not 0
_ONE = {"mxfp4": 127, "mxfp8": 127, "nvfp4": 0x38, "int4": 1.0}  # a scale of 1, in its stored dtype
E4M3_NAN = 0x7F
# Of codes that are rearranged at a time. A dozen small operations are launched for each chunk: with a quarter of this
# an expert of V4.1 takes 3.6 ms, not 1.4 (H200). Temporaries are three times as much: an expert of most models.
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class RegisterTiles:
    """The arrangement of one projection group of an expert; see the module's docstring.

    Attributes:
        format: one of :data:`PACKED_FORMATS`, or of :data:`BLOCK_FORMATS`, arranged as MXFP8 with repeated scales.
        parts: 2 for gate and up, 1 for down.
        rows, columns: N and K of a part.

    Raises:
        FormatError: a format that is not low-bit.
        TensorError: no rows, no columns, or another number of parts.
    """

    format: str
    parts: int
    rows: int
    columns: int

    def __post_init__(self) -> None:
        known = (*PACKED_FORMATS, *BLOCK_FORMATS)
        if self.format not in known:
            raise FormatError(f"{self.format} weights have no register tiles; {', '.join(known)} have")
        if self.parts not in (1, 2) or self.rows < 1 or self.columns < 1:
            raise TensorError(
                f"register tiles of {self.parts} parts of {self.rows} × {self.columns} weights; expected 1 or 2 parts "
                "of at least one row and column"
            )

    # ---- sizes ----

    @property
    def kernel_format(self) -> str:
        """The format that the arrangement is in, as a kernel sees it."""
        return BLOCK_FORMATS.get(self.format, self.format)

    @property
    def tile_features(self) -> int:
        """Output features of a weight tile, of each part."""
        return WEIGHT_ROWS // self.parts

    @property
    def column_tiles(self) -> int:
        return -(-self.rows // self.tile_features)

    @property
    def k_steps(self) -> int:
        return -(-self.columns // WIDENED_K)

    @property
    def word_bytes(self) -> int:
        """Of a stage's words."""
        return WEIGHT_ROWS * self._row_bytes

    @property
    def scale_row_bytes(self) -> int:
        """Of a tile row's scales in a stage."""
        return get_format(self.kernel_format).scale_row_bytes(WIDENED_K)

    @property
    def stage_bytes(self) -> int:
        return self.word_bytes + WEIGHT_ROWS * self.scale_row_bytes

    def shape(self, num_experts: int) -> tuple[int, int, int, int]:
        """Of the packed weights of several experts, uint8."""
        return num_experts, self.column_tiles, self.k_steps, self.stage_bytes

    @property
    def _row_bytes(self) -> int:
        """Of a tile row's codes in a stage."""
        return get_format(self.kernel_format).row_bytes(WIDENED_K)

    @property
    def _four_bit(self) -> bool:
        return self._row_bytes == WIDENED_K // 2

    # ---- packing ----

    def pack(
        self, data: torch.Tensor, scale: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Arrange one expert. Waits for the device.

        Args:
            data: ``[parts, N, data_columns(K)]`` as the format stores it; scale: ``[parts, N, scale_columns(K)]``.
            out: ``[column_tiles, k_steps, stage_bytes]`` uint8 to write to, or None. After an error, undefined.

        Returns:
            packed: uint8 ``[column_tiles, k_steps, stage_bytes]``, on ``data``'s device.
            shift: int32 ``[parts]``: MX formats: multipliers hold ``scale · 2**-shift``; 0 for the others.

        Raises:
            TensorError: a wrong dtype or shape.
            FormatError: a NaN scale (INT4's are not looked at), a negative one of NVFP4.
            UnrepresentableError: what the arrangement cannot hold so that products are exact: MX scales some 130
                binades apart, E4M3 elements that are NaN, zero scales of elements that are not; a −0 scale; a row of
                odd length whose last byte has more than one code.
        """
        fmt = get_format(self.format)
        self._check("data", data, (self.parts, self.rows, fmt.data_columns(self.columns)), fmt.data_dtype)
        scales = fmt.scale_shape(self.rows, self.columns)
        assert scales is not None and fmt.scale_dtype is not None
        self._check("scale", scale, (self.parts, *scales), fmt.scale_dtype)
        shape = self.shape(1)[1:]
        if out is None:
            out = torch.empty(shape, dtype=torch.uint8, device=data.device)
        self._check("out", out, shape, torch.uint8)
        if self.kernel_format != self.format:
            return replace(self, format=self.kernel_format).pack(data, self._repeated(scale), out=out)
        data = data.view(torch.uint8)
        shift = self._shift(data, scale)
        self._pack_scales(scale, shift, out[..., self.word_bytes :])
        nan = torch.zeros((), dtype=torch.bool, device=data.device)
        for tiles, rows in self._chunks():
            codes = self._padded(data[:, rows], tiles)
            if self.format == "mxfp8":
                nan |= ((codes & E4M3_NAN) == E4M3_NAN).any()
            out[tiles, :, : self.word_bytes] = self._words(codes)
        if self.format == "mxfp8" and bool(nan):
            raise UnrepresentableError(f"{self.format}: NaN elements")
        return out, shift

    def unpack(self, packed: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The inverse of :meth:`pack`: (data, scale) of one expert, the checkpoint's own bytes.

        Args:
            packed: uint8 ``[column_tiles, k_steps, stage_bytes]``.
            shift: int32 ``[parts]``.

        Raises:
            TensorError: a wrong dtype or shape.
        """
        self._check("packed", packed, self.shape(1)[1:], torch.uint8)
        self._check("shift", shift, (self.parts,), torch.int32)
        fmt = get_format(self.format)
        if self.kernel_format != self.format:
            data, repeated = replace(self, format=self.kernel_format).unpack(packed, shift)
            assert fmt.block is not None
            return data.view(fmt.data_dtype), repeated[:, :: fmt.block[0], :: self._repeats].contiguous()
        columns = fmt.data_columns(self.columns)
        data = torch.empty(self.parts, self.rows, columns, dtype=torch.uint8, device=packed.device)
        for tiles, rows in self._chunks():
            codes = self._codes(packed[tiles, :, : self.word_bytes])
            data[:, rows] = codes[:, : rows.stop - rows.start, :columns]
        if self._half_byte:
            data[..., -1] &= 0xF
        return data.view(fmt.data_dtype), self._unpack_scales(packed[..., self.word_bytes :], shift)

    def epilogue_factor(self, shift: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
        """What sums of products with the multipliers lack.

        Args:
            shift: int32 ``[..., parts]`` of :meth:`pack`.
            global_scale: fp32 ``[..., parts]`` (NVFP4), else None.

        Returns:
            fp32 ``[..., parts]``.

        Raises:
            UnrepresentableError: a global scale so large that the factor overflows.
        """
        if global_scale is None:
            # 2**shift by its bits: exp2 need not be exact.
            return ((shift + 127) << 23).view(torch.float32)
        factor = global_scale * NVFP4_FACTOR
        if not bool(factor.isfinite().all()):
            raise UnrepresentableError(f"{self.format}: a global scale of more than 2**120")
        return factor

    # ---- block scales ----

    @property
    def _repeats(self) -> int:
        """How many of the arrangement's scales along K one of the stored scales is."""
        stored, arranged = get_format(self.format).block, get_format(self.kernel_format).block
        assert stored is not None and arranged is not None
        return stored[1] // arranged[1]

    def _repeated(self, scale: torch.Tensor) -> torch.Tensor:
        """``[parts, ⌈N/rows⌉, ⌈K/columns⌉]`` as stored → ``[parts, N, C]`` as arranged."""
        block, shape = (
            get_format(self.format).block,
            get_format(self.kernel_format).scale_shape(self.rows, self.columns),
        )
        assert block is not None and shape is not None
        spread = scale.repeat_interleave(block[0], 1).repeat_interleave(self._repeats, 2)
        return spread[:, : shape[0], : shape[1]].contiguous()

    # ---- codes ----

    @property
    def _half_byte(self) -> bool:
        """Whether the last byte of a row holds a single code."""
        return self._four_bit and self.columns % 2 == 1

    def _chunks(self) -> Iterator[tuple[slice, slice]]:
        """Column tiles, and their rows of each part, a bounded number of bytes at a time."""
        step = max(1, CHUNK_BYTES // (self.word_bytes * self.k_steps))
        for start in range(0, self.column_tiles, step):
            stop = min(start + step, self.column_tiles)
            yield slice(start, stop), slice(start * self.tile_features, min(stop * self.tile_features, self.rows))

    def _padded(self, data: torch.Tensor, tiles: slice) -> torch.Tensor:
        """``[parts, rows, bytes]`` filled up with zero codes to whole tiles."""
        missing_rows = (tiles.stop - tiles.start) * self.tile_features - data.shape[1]
        missing_bytes = self.k_steps * self._row_bytes - data.shape[2]
        if not (missing_rows or missing_bytes):
            return data
        zero = _ZERO.get(self.format, 0)
        padded = pad(data, (0, missing_bytes, 0, missing_rows), value=zero)
        if self._half_byte:
            last = padded[:, : data.shape[1], data.shape[2] - 1]
            if bool((last >> 4).any()):
                raise UnrepresentableError(f"{self.format}: rows of {self.columns} codes end in a byte with one more")
            last |= zero & 0xF0
        return padded

    def _words(self, codes: torch.Tensor) -> torch.Tensor:
        """uint8 ``[parts, rows, bytes]`` of whole tiles → uint8 ``[column tiles, k steps, word_bytes]``."""
        rows = self._by_operand_row(codes)
        if self._four_bit:
            # h | tile block warp row | step half j z q
            rows = rows.unflatten(-1, (self.k_steps, 2, 4, 2, QUADS))
            shape = (rows.shape[1], self.k_steps, 2, BLOCKS, WARPS, LANE_ROWS, QUADS, 4, 2, 2)
            words = torch.empty(shape, dtype=torch.uint8, device=codes.device)
            # tile step half block warp row q j i z → i | tile block warp row | step half j z q
            register_words.transpose_nibbles(rows, words.permute(8, 0, 3, 4, 5, 1, 2, 7, 9, 6))
        else:
            # h | tile block warp row | step half vector j z q i → tile step half block vector warp row q j z i h
            rows = rows.unflatten(-1, (self.k_steps, 2, 2, 2, 2, QUADS, 2))
            words = rows.permute(1, 5, 6, 2, 7, 3, 4, 10, 8, 9, 11, 0).contiguous()
        if self.format in _BIT_ORDER:
            register_words.permute_bits_(words.view(torch.int16), _BIT_ORDER[self.format])
        return words.flatten(2)

    def _codes(self, words: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`_words`; uint8 ``[column tiles, k steps, word_bytes]``."""
        words = words.clone(memory_format=torch.contiguous_format)
        if self.format in _BIT_ORDER:
            register_words.permute_bits_(words.view(torch.int16), register_words.inverse(_BIT_ORDER[self.format]))
        if self._four_bit:
            words = words.unflatten(-1, (2, BLOCKS, WARPS, LANE_ROWS, QUADS, 4, 2, 2))
            halves = words.permute(8, 0, 3, 4, 5, 1, 2, 7, 9, 6)
            rows = torch.empty(halves.shape, dtype=torch.uint8, device=words.device)
            register_words.transpose_nibbles(halves, rows)
        else:
            words = words.unflatten(-1, (2, BLOCKS, 2, WARPS, LANE_ROWS, QUADS, 2, 2, 2, 2))
            rows = words.permute(11, 0, 3, 5, 6, 1, 2, 4, 8, 9, 7, 10)
        return self._from_operand_row(rows.flatten(5))

    # ---- scales ----

    def _shift(self, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        def nonzero() -> torch.Tensor:
            fmt = get_format(self.format)
            assert fmt.block is not None
            width = fmt.row_bytes(fmt.block[1])
            whole = pad(data & _MAGNITUDE[self.format], (0, -data.shape[-1] % width))
            return whole.unflatten(-1, (-1, width)).amax(-1) > 0

        shifts = [0] * self.parts
        try:
            if self.format in _E8M0:
                shifts = _E8M0[self.format].shifts(scale, nonzero)
            elif self.format == "nvfp4":
                register_scales.check_nvfp4(scale.view(torch.uint8), nonzero)
        except FormatError as error:
            raise type(error)(f"{self.format}: {error}") from None
        return torch.tensor(shifts, dtype=torch.int32, device=data.device)

    def _pack_scales(self, scale: torch.Tensor, shift: torch.Tensor, out: torch.Tensor) -> None:
        """``[parts, N, C]`` → ``out`` uint8 ``[column tiles, k steps, 256 · scale_row_bytes]``."""
        block_scales = self.k_steps * self.scale_row_bytes // scale.element_size()
        missing = (0, block_scales - scale.shape[2], 0, self.column_tiles * self.tile_features - self.rows)
        if self.format == "nvfp4":
            scale = scale.view(torch.uint8)
        scale = pad(scale, missing, value=_ONE[self.format])
        if self.format in _E8M0:
            scale = _E8M0[self.format].encode(scale, shift)
        elif self.format == "nvfp4":
            scale = register_scales.encode_nvfp4(scale)
        rows = self._by_operand_row(scale.view(torch.uint8)).unflatten(-1, (self.k_steps, self.scale_row_bytes))
        # h | tile block warp row | step bytes
        out.copy_(rows.permute(1, 5, 2, 3, 4, 0, 6).flatten(2))

    def _unpack_scales(self, stored: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        rows = stored.unflatten(-1, (BLOCKS, WARPS, LANE_ROWS, 2, self.scale_row_bytes))
        fmt = get_format(self.format)
        shape = fmt.scale_shape(self.rows, self.columns)
        assert shape is not None and fmt.scale_dtype is not None
        scale = self._from_operand_row(rows.permute(5, 0, 2, 3, 4, 1, 6).flatten(5)).contiguous()
        scale = scale.view(torch.bfloat16 if self.format == "int4" else torch.uint8)[:, : shape[0], : shape[1]]
        if self.format in _E8M0:
            scale = _E8M0[self.format].decode(scale, shift)
        elif self.format == "nvfp4":
            scale = register_scales.decode_nvfp4(scale)
        return scale.contiguous().view(fmt.scale_dtype)

    # ---- rows ----

    def _by_operand_row(self, x: torch.Tensor) -> torch.Tensor:
        """``[parts, whole tiles, …]`` → ``[h, tile, block, warp, row, …]``, a view."""
        if self.parts == 2:  # h is the part
            return x.unflatten(1, (-1, BLOCKS, WARPS, LANE_ROWS))
        return x[0].unflatten(0, (-1, BLOCKS, WARPS, 2, LANE_ROWS)).movedim(3, 0)

    def _from_operand_row(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`_by_operand_row`."""
        if self.parts == 2:
            return x.flatten(1, 4)
        return x.movedim(0, 3).flatten(0, 4).unsqueeze(0)

    def _check(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise TensorError(
                f"{self.format} register tiles: {name} is {list(tensor.shape)} {tensor.dtype}, "
                f"expected {list(shape)} {dtype}"
            )
