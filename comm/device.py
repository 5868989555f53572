"""The vocabulary of the one-sided kernels: system-scope loads and stores, polls that time out, routing in a warp.

Every access to memory that another GPU writes or reads is a relaxed, acquire or release operation at system scope on a
raw 64-bit address; a payload moves in 16-byte vectors, each of whose four 32-bit words arrives whole (paper §2.2).

A poll spins on one address. Every ``POLLS_PER_CHECK`` rounds it takes the slow path: it gives up where this rank has
recorded an error, where its deadline has passed, or where the peer announced other parameters for the same step, and
records the first such cause in the rank's error record. In a dispatch it also looks at the peer's last combine flag
(``combined`` bytes from the announcement), since a Sentinel combine that needs nothing from a peer compares nothing.
A poll that gave up returns what it last saw; the kernel runs on to its end without waiting again, and Python raises
from the record (:mod:`moe_layer.comm.status`).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64, const_expr
from cutlass.cute.arch import inline_ptx

from moe_layer.comm.layout import STATE_COMBINED, STATE_ERROR, STATE_RECORD, STATE_TIMEOUT
from moe_layer.comm.status import ErrorCode, Phase

SENTINEL = 0xFFFFFFFF
# Between slow-path checks a poll spins about 256 × 0.7 µs at most: time-outs are precise to a millisecond.
POLLS_PER_CHECK = 256


def load_vector(addr: Int64) -> Any:
    """16 bytes written by kernels before this one (or by this thread)."""
    return inline_ptx(
        "ld.global.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[addr],
    )


def load_vector_sys(addr: Int64) -> Any:
    """16 bytes that a peer writes or holds; never from L1."""
    return inline_ptx(
        "ld.relaxed.sys.global.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[addr],
    )


def store_vector(addr: Int64, v: Any) -> None:
    inline_ptx("st.global.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[addr, *v])


def store_vector_sys(addr: Int64, v: Any) -> None:
    inline_ptx("st.relaxed.sys.global.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[addr, *v])


def load_u32(addr: Int64) -> Uint32:
    return inline_ptx("ld.global.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[addr])


def load_u64(addr: Int64) -> Uint64:
    return inline_ptx("ld.global.u64 {$w0}, [{$r0}];", write_only_types=[Uint64], read_only_args=[addr])


def load_i64(addr: Int64) -> Int64:
    return inline_ptx("ld.global.u64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[addr])


def store_u32(addr: Int64, value: Uint32) -> None:
    inline_ptx("st.global.u32 [{$r0}], {$r1};", read_only_args=[addr, value])


def load_u32_sys(addr: Int64) -> Uint32:
    return inline_ptx("ld.relaxed.sys.global.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[addr])


def store_u32_sys(addr: Int64, value: Uint32) -> None:
    inline_ptx("st.relaxed.sys.global.u32 [{$r0}], {$r1};", read_only_args=[addr, value])


def load_u64_acquire(addr: Int64) -> Uint64:
    return inline_ptx("ld.acquire.sys.global.u64 {$w0}, [{$r0}];", write_only_types=[Uint64], read_only_args=[addr])


def load_u64_sys(addr: Int64) -> Uint64:
    return inline_ptx("ld.relaxed.sys.global.u64 {$w0}, [{$r0}];", write_only_types=[Uint64], read_only_args=[addr])


def store_u64_sys(addr: Int64, value: Uint64) -> None:
    inline_ptx("st.relaxed.sys.global.u64 [{$r0}], {$r1};", read_only_args=[addr, value])


def fence_sys() -> None:
    """Order this thread's earlier accesses (and what they observed) before its later ones, for every GPU."""
    inline_ptx("fence.acq_rel.sys;")


def atomic_add_relaxed(addr: Int64, value: Uint32) -> Uint32:
    return inline_ptx(
        "atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Uint32],
        read_only_args=[addr, value],
    )


def atomic_add_acq_rel(addr: Int64, value: Uint32) -> Uint32:
    """Counts finished blocks: acq_rel, so that the last one has seen every other block's stores."""
    return inline_ptx(
        "atom.acq_rel.gpu.global.add.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Uint32],
        read_only_args=[addr, value],
    )


def flag_word(step: Uint32, low: Uint32) -> Uint64:
    """A 64-bit control word: the step above, a count or a code below; both arrive in one store."""
    return (Uint64(step) << Uint64(32)) | Uint64(low)


def low(word: Uint64) -> Uint32:
    return Uint32(word & Uint64(0xFFFFFFFF))


def high(word: Uint64) -> Uint32:
    return Uint32(word >> Uint64(32))


@cute.jit
def select(condition: Any, yes: Any, no: Any) -> Any:
    """``yes`` or ``no``, two scalars of one type."""
    out = no
    if condition:
        out = yes
    return out


def maximum(a: Uint32, b: Uint32) -> Uint32:
    return inline_ptx("max.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def add(a: Float32, b: Float32) -> Float32:
    """FP32 add, subnormals kept."""
    return inline_ptx("add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


@cute.jit
def narrow_id(expert: Int64) -> Int32:
    out = Int32(-1)
    if expert >= Int64(0) and expert <= Int64(0x7FFFFFFF):
        out = Int32(expert)
    return out


@cute.jit
def bit_if_in_word(index: Int32) -> Uint32:
    out = Uint32(0)
    if index >= Int32(0) and index < Int32(32):
        out = Uint32(1) << Uint32(index)
    return out


def store_pair(addr: Int64, words: Any) -> None:
    inline_ptx("st.global.v2.u32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[addr, *words])


def has_sentinel(v: Any) -> Any:
    s = Uint32(SENTINEL)
    return (v[0] == s) | (v[1] == s) | (v[2] == s) | (v[3] == s)


def sentinel_mask(a: Uint32, b: Uint32, c: Uint32, d: Uint32) -> Uint32:
    """Bit w says that word w of a vector equals the sentinel."""
    s = Uint32(SENTINEL)
    mask = Uint32(a == s)
    for w, word in enumerate((b, c, d), start=1):
        mask = mask | (Uint32(word == s) << Uint32(w))
    return mask


def flip_masked(mask: Uint32, a: Uint32, b: Uint32, c: Uint32, d: Uint32) -> Any:
    """Flip the lowest bit of the words that the mask names: the producer's escape and the consumer's way back."""
    return tuple(word ^ ((mask >> Uint32(w)) & Uint32(1)) for w, word in enumerate((a, b, c, d)))


def other_nan(word: Uint32, element_bytes: int) -> Uint32:
    """A partial result's word, with the sentinel (a NaN, or two) replaced by another NaN of the same kind."""
    return select(word == Uint32(SENTINEL), Uint32(0x7FFF7FFF if element_bytes == 2 else 0x7FFFFFFF), word)


def block_or(value: Uint32) -> Uint32:
    """Barrier of the whole block; 1 where some thread's value is not zero."""
    return inline_ptx(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, {$r0}, 0;\n"
        "barrier.cta.red.or.aligned.pred q, 0, p;\nselp.u32 {$w0}, 1, 0, q;\n}",
        write_only_types=[Uint32],
        read_only_args=[value],
    )


@cute.jit
def record_error(state: Int64, code: Uint32, phase: Uint32, peer: Uint32, step: Uint32, seen: Uint32):
    """Write the rank's error record unless an earlier error holds it; the code word, last, makes it visible."""
    claimed = inline_ptx(
        "atom.relaxed.gpu.global.cas.b32 {$w0}, [{$r0}], 0, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[state + STATE_ERROR, code],
    )
    if claimed == Uint32(0):
        record = load_i64(state + STATE_RECORD)
        store_u32_sys(record + 4, phase)
        store_u32_sys(record + 8, peer)
        store_u32_sys(record + 12, step)
        store_u32_sys(record + 16, seen)
        inline_ptx("st.release.sys.global.u32 [{$r0}], {$r1};", read_only_args=[record, code])


@cute.jit
def check_wait(
    state: Int64, announce: Int64, phase: Uint32, peer: Uint32, step: Uint32, own: Uint32, start: Uint64,
    combined: cutlass.Constexpr,
) -> tuple[Uint32, Uint64]:  # fmt: skip
    """The slow path of every wait: returns (give up?, start of the wait)."""
    now = Uint64(cute.arch.globaltimer())
    if start == Uint64(0):
        start = now
    stop = load_u32_sys(state + STATE_ERROR)
    word = load_u64_sys(announce)
    if stop == Uint32(0):
        if high(word) == step and low(word) != own:
            record_error(state, Uint32(ErrorCode.MISMATCH), phase, peer, step, low(word))
            stop = Uint32(1)
        elif now - start > load_u64(state + STATE_TIMEOUT):
            record_error(state, Uint32(ErrorCode.TIMEOUT), phase, peer, step, high(word))
            stop = Uint32(1)
    if const_expr(combined != 0):
        if stop == Uint32(0):
            stop = check_combined(state, load_u64_sys(announce + combined), peer, step - Uint32(1))
    return stop, start


@cute.jit
def check_combined(state: Int64, flag: Uint64, peer: Uint32, step: Uint32) -> Uint32:
    """1 where a peer's combine flag of ``step``, this rank's last, tells of other rows than this rank combined then."""
    stop = Uint32(0)
    if high(flag) == step and low(flag) != load_u32(state + STATE_COMBINED):
        record_error(state, Uint32(ErrorCode.MISMATCH), Uint32(Phase.SENTINEL_COMBINE), peer, step, low(flag))
        stop = Uint32(1)
    return stop


@cute.jit
def wait_flag(
    flag: Int64, announce: Int64, state: Int64, phase: Uint32, peer: Uint32, awaited: Uint32, step: Uint32, own: Uint32,
    combined: cutlass.Constexpr = 0,
) -> Uint64:  # fmt: skip
    """Spin until the flag's step is ``awaited`` or later, with acquire; returns the flag word."""
    word = load_u64_acquire(flag)
    n = Int32(0)
    stop = Uint32(0)
    start = Uint64(0)
    while stop == Uint32(0) and Int32(high(word) - awaited) < Int32(0):
        word = load_u64_acquire(flag)
        n += 1
        if n % POLLS_PER_CHECK == 0:
            stop, start = check_wait(state, announce, phase, peer, step, own, start, combined)
    return word


@cute.jit
def poll_word(
    word: Uint32, addr: Int64, announce: Int64, state: Int64, phase: Uint32, peer: Uint32, step: Uint32, own: Uint32,
    combined: cutlass.Constexpr = 0,
) -> Uint32:  # fmt: skip
    """Spin until the word at ``addr`` is not the sentinel; ``word`` is a first look already taken."""
    n = Int32(0)
    stop = Uint32(0)
    start = Uint64(0)
    while stop == Uint32(0) and word == Uint32(SENTINEL):
        word = load_u32_sys(addr)
        n += 1
        if n % POLLS_PER_CHECK == 0:
            stop, start = check_wait(state, announce, phase, peer, step, own, start, combined)
    return word


@cute.jit
def poll_vector(
    v0: Uint32, v1: Uint32, v2: Uint32, v3: Uint32,
    addr: Int64, announce: Int64, state: Int64, phase: Uint32, peer: Uint32, step: Uint32, own: Uint32,
    combined: cutlass.Constexpr = 0,
) -> tuple[Uint32, Uint32, Uint32, Uint32]:  # fmt: skip
    """Spin until no word of the vector at ``addr`` is the sentinel; ``v0…v3`` are a first look already taken."""
    n = Int32(0)
    stop = Uint32(0)
    start = Uint64(0)
    while stop == Uint32(0) and has_sentinel((v0, v1, v2, v3)):
        v0, v1, v2, v3 = load_vector_sys(addr)
        n += 1
        if n % POLLS_PER_CHECK == 0:
            stop, start = check_wait(state, announce, phase, peer, step, own, start, combined)
    return v0, v1, v2, v3


@cute.jit
def expert_rank(
    expert: Int32,
    num_experts: cutlass.Constexpr,
    ep_size: cutlass.Constexpr,
    table: Int64,
    contiguous: cutlass.Constexpr,
) -> Int32:
    """The rank that holds a global expert id, −1 for an id out of range.

    The contiguous placement is arithmetic (no dependent load on the critical path); others read a table.
    """
    rank = Int32(-1)
    if expert >= Int32(0) and expert < Int32(num_experts):
        if const_expr(contiguous):
            quotient, remainder = divmod(num_experts, ep_size)
            large = remainder * (quotient + 1)
            if const_expr(remainder == 0):
                rank = expert // Int32(quotient)
            elif expert < Int32(large):
                rank = expert // Int32(quotient + 1)
            elif const_expr(quotient > 0):
                rank = Int32(remainder) + (expert - Int32(large)) // Int32(quotient)
        else:
            rank = Int32(load_u32(table + Int64(expert) * 4))
    return rank


def bf16_pair_to_f32(word: Uint32) -> Any:
    """Two BF16 in a word → two FP32, low half first; exact."""
    return bits_to_f32(word << Uint32(16)), bits_to_f32(word & Uint32(0xFFFF0000))


def f32_pair_to_bf16(lo: Float32, hi: Float32) -> Uint32:
    """Two FP32 → a word of two BF16, round to nearest even, low half first."""
    return inline_ptx("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[lo, hi])


def widen_word(word: Uint32, element_bytes: int) -> list[Float32]:
    """The FP32 values of a word of FP32, BF16 or E4M3 elements, lowest address first; exact."""
    if element_bytes == 4:
        return [bits_to_f32(word)]
    if element_bytes == 2:
        return list(bf16_pair_to_f32(word))
    values: list[Float32] = []
    for half in (word & Uint32(0xFFFF), word >> Uint32(16)):
        values += inline_ptx(
            "{\n.reg .b32 h;\n.reg .b16 e, a, b;\ncvt.u16.u32 e, {$r0};\ncvt.rn.f16x2.e4m3x2 h, e;\n"
            "mov.b32 {a, b}, h;\ncvt.f32.f16 {$w0}, a;\ncvt.f32.f16 {$w1}, b;\n}",
            write_only_types=[Float32, Float32],
            read_only_args=[half],
        )
    return values


def narrow_pairs_to_e4m3(low_pair: Uint32, high_pair: Uint32) -> Uint32:
    """Two words of BF16 pairs → a word of four E4M3, round to nearest even, saturating; NaN stays NaN."""
    a, b = bf16_pair_to_f32(low_pair)
    c, d = bf16_pair_to_f32(high_pair)
    return inline_ptx(
        "{\n.reg .b16 lo, hi;\ncvt.rn.satfinite.e4m3x2.f32 lo, {$r1}, {$r0};\n"
        "cvt.rn.satfinite.e4m3x2.f32 hi, {$r3}, {$r2};\nmov.b32 {$w0}, {lo, hi};\n}",
        write_only_types=[Uint32],
        read_only_args=[a, b, c, d],
    )


def bits_to_f32(word: Uint32) -> Float32:
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


def f32_to_bits(value: Float32) -> Uint32:
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value])
