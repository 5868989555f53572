"""The router's choice: partial logits → scores → the top_k experts of each token and their weights.

``warps`` warps work on a token: one for every 128 experts where tokens are few (latency), one in all where they are
many (a block then has four tokens). A lane holds quads of neighbouring experts: quad q of warp w begins at expert
``(w·quads + q)·128 + 4·lane``, so that loads are coalesced. All arithmetic is elementwise or in an order that does not
depend on ``warps``.

    sum       partial logits of all parts, loaded at once; in groups, in order
    score     softmax exchanges maximum and scores through shared memory
    groups    a warp a group: its best, or its two best by two passes of a warp-wide maximum; then the groups' ranks
    choose    top_k rounds in each warp: the warp-wide largest key, then the lowest expert that has it; its lane takes
              it out and looks for its own next best
    merge     several warps: a thread for each of the warps' candidates counts how many come before it in the other
              warps' sorted lists; that is its place
    weights   lane j takes the score of choice j; their sum is a butterfly over the warp

Keys are the choice's bits in an order that integers have; 0 is below them all and marks what is taken or absent.
Barriers: of the block where it works on one token, else of the warp. Shared memory, words a token: the scores; with
groups also the keys and two words a group; with several warps their candidates (2·list_length each), top_k ids and
``warps`` maxima.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from moe_layer.gemm import router_device as rd
from moe_layer.gemm import sm90_device as dev
from moe_layer.gemm.router_spec import COLUMNS, WARP, ChoiceSpec

# As moe_layer.router.NORM_EPSILON, in DeepSeek's reference.
NORM_EPSILON = 1e-20
NONE = 1 << 30  # above every expert id


def synchronize(spec: ChoiceSpec) -> None:
    """All warps of a token."""
    if spec.warps > 1:
        cute.arch.sync_threads()
    else:
        cute.arch.sync_warp()


def butterfly(value: Float32, combine: Any) -> Float32:
    """Over the warp; the same bits in every lane."""
    for power in range(5):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, 1 << power))
    return value


def words(smem: SmemAllocator, kind: Any, count: int, block_tokens: int, token: Int32) -> Any:
    """A token's ``count`` words, and all tokens' for the block."""
    array = smem.allocate_array(kind, max(4, count) * block_tokens)
    return cute.make_tensor(array + token * max(4, count), cute.make_layout(max(4, count)))


@cute.jit
def sum_parts(
    spec: cutlass.Constexpr, partials: Int64, token: Int32, tokens: Int32, first: Int32, logits: Any
):  # fmt: skip
    """A lane's logits; see :mod:`moe_layer.gemm.router_spec` for the order."""
    for q in range_constexpr(spec.quads):
        expert = first + q * COLUMNS
        at = partials + (Int64(token) * spec.columns + Int64(expert)) * 4
        part_bytes = Int64(tokens) * (spec.columns * 4)
        loaded = []
        for p in range_constexpr(spec.parts):
            loaded.append(rd.load_floats(at + part_bytes * p, expert < Int32(spec.experts)))
        for j in range_constexpr(4):
            total = Float32(0.0)
            for start in range_constexpr(0, spec.parts, spec.span):
                group = Float32(0.0)
                for p in range_constexpr(start, min(spec.parts, start + spec.span)):
                    group = rd.add(group, loaded[p][j])
                total = rd.add(total, group)
            logits[4 * q + j] = total


@cute.jit
def score(
    spec: cutlass.Constexpr, values: Any, first: Int32, warp: Int32, lane: Int32, scores: Any,
    maxima: Any,
):  # fmt: skip
    """Logits to scores, in place and to shared memory."""
    if const_expr(spec.scoring == "softmax"):
        largest = Float32(float("-inf"))
        for q in range_constexpr(spec.quads):
            for j in range_constexpr(4):
                if first + (q * COLUMNS + j) < Int32(spec.experts):
                    largest = dev.maximum(largest, values[4 * q + j])
        largest = butterfly(largest, dev.maximum)
        if const_expr(spec.warps > 1):
            if lane == Int32(0):
                maxima[warp] = largest
            synchronize(spec)
            for w in range_constexpr(spec.warps):
                largest = dev.maximum(largest, maxima[w])
        for i in range_constexpr(4 * spec.quads):
            values[i] = rd.exponential(rd.subtract(values[i], largest))
        store_scores(spec, values, first, scores)
        synchronize(spec)
        total = Float32(0.0)
        for i in range_constexpr(spec.columns // WARP):
            if lane + i * WARP < Int32(spec.experts):
                total = rd.add(total, scores[lane + i * WARP])
        total = butterfly(total, rd.add)
        synchronize(spec)
        for i in range_constexpr(4 * spec.quads):
            values[i] = dev.divide(values[i], total)
    elif const_expr(spec.scoring == "sigmoid"):
        for i in range_constexpr(4 * spec.quads):
            values[i] = rd.sigmoid(values[i])
    else:
        for i in range_constexpr(4 * spec.quads):
            values[i] = rd.sqrt_softplus(values[i])
    store_scores(spec, values, first, scores)


@cute.jit
def store_scores(spec: cutlass.Constexpr, values: Any, first: Int32, scores: Any):
    for q in range_constexpr(spec.quads):
        for j in range_constexpr(4):
            if first + (q * COLUMNS + j) < Int32(spec.experts):
                scores[first + (q * COLUMNS + j)] = values[4 * q + j]


@cute.jit
def load_bias(spec: cutlass.Constexpr, source: Int64, first: Int32, bias: Any):
    """A lane's biases; 0 past the last expert."""
    for q in range_constexpr(spec.quads):
        at = source + Int64(first + q * COLUMNS) * 4
        if const_expr(spec.experts % 4 == 0):
            quad = rd.load_floats(at, first + q * COLUMNS < Int32(spec.experts))
            for j in range_constexpr(4):
                bias[4 * q + j] = quad[j]
        else:
            for j in range_constexpr(4):
                bias[4 * q + j] = rd.load_float(at + 4 * j, first + (q * COLUMNS + j) < Int32(spec.experts))


@cute.jit
def make_keys(
    spec: cutlass.Constexpr, values: Any, first: Int32, bias: Any, keys: Any
):  # fmt: skip
    """Scores plus bias, as keys; 0 past the last expert."""
    for q in range_constexpr(spec.quads):
        for j in range_constexpr(4):
            choice = values[4 * q + j]
            if const_expr(spec.biased):
                choice = rd.add(choice, bias[4 * q + j])
            keys[4 * q + j] = rd.sort_key(choice)
            if first + (q * COLUMNS + j) >= Int32(spec.experts):
                keys[4 * q + j] = Uint32(0)


@cute.jit
def limit_groups(
    spec: cutlass.Constexpr, keys: Any, first: Int32, warp: Int32, lane: Int32, all_keys: Any,
    group_keys: Any, kept: Any,
):  # fmt: skip
    """Experts outside the best ``topk_group`` groups become −∞."""
    size = spec.experts // spec.n_group
    for q in range_constexpr(spec.quads):
        for j in range_constexpr(4):
            if first + (q * COLUMNS + j) < Int32(spec.experts):
                all_keys[first + (q * COLUMNS + j)] = keys[4 * q + j]
    synchronize(spec)
    for group in range(warp, spec.n_group, spec.warps):
        best, second = Uint32(0), Uint32(0)
        for i in range_constexpr(-(-size // WARP)):
            if lane + i * WARP < Int32(size):
                key = Uint32(all_keys[group * size + lane + i * WARP])
                if key > best:
                    second = best
                    best = key
                elif key > second:
                    second = key
        largest = cute.arch.warp_redux_sync(best, "max")
        result = rd.key_value(largest)
        if const_expr(spec.group_score == "top2_sum" and size > 1):
            owners = cute.arch.vote_ballot_sync(best == largest)
            owner = (Uint32(owners) & cute.arch.lanemask_lt()) == Uint32(0)
            if best == largest and owner:
                best = second
            result = rd.add(result, rd.key_value(cute.arch.warp_redux_sync(best, "max")))
        if lane == Int32(0):
            group_keys[group] = rd.sort_key(result)
    synchronize(spec)
    for group in range(warp * WARP + lane, spec.n_group, spec.warps * WARP):
        own = Uint32(group_keys[group])
        before = Int32(0)
        for other in range(spec.n_group):
            theirs = Uint32(group_keys[other])
            if theirs > own or (theirs == own and Int32(other) < group):
                before += Int32(1)
        kept[group] = Int32(1) if before < Int32(spec.topk_group) else Int32(0)
    synchronize(spec)
    for q in range_constexpr(spec.quads):
        for j in range_constexpr(4):
            own_group = dev.smaller((first + (q * COLUMNS + j)) // size, Int32(spec.n_group - 1))
            if kept[own_group] == Int32(0) and keys[4 * q + j] != Uint32(0):
                keys[4 * q + j] = rd.sort_key(Float32(float("-inf")))


@cute.jit
def choose(spec: cutlass.Constexpr, keys: Any, first: Int32, lane: Int32):
    """The warp's ``top_k`` best, best first: lane j gets ``(key, expert)`` of the j-th."""
    mine_key, mine = Uint32(0), Int32(NONE)
    best, at = Uint32(0), Int32(NONE)
    for i in range_constexpr(4 * spec.quads):
        if keys[i] > best:
            best = keys[i]
            at = first + (i // 4 * COLUMNS + i % 4)
    for place in range(spec.top_k):
        largest = cute.arch.warp_redux_sync(best, "max")
        candidate = at if best == largest else Int32(NONE)
        winner = cute.arch.warp_redux_sync(candidate, "min")
        if lane == Int32(place):
            mine_key = largest
            mine = winner
        if winner == at:
            best = Uint32(0)
            at = Int32(NONE)
            for i in range_constexpr(4 * spec.quads):
                expert = first + (i // 4 * COLUMNS + i % 4)
                if expert == winner:
                    keys[i] = Uint32(0)
                if keys[i] > best:
                    best = keys[i]
                    at = expert
    return mine_key, mine


@cute.jit
def merge(
    spec: cutlass.Constexpr, key: Uint32, expert: Int32, warp: Int32, lane: Int32, list_keys: Any,
    list_ids: Any, chosen: Any,
):  # fmt: skip
    """The token's ``top_k`` best of the warps' lists. Warps hold ascending experts: of equal keys, the lower warp's."""
    length = spec.list_length
    if lane < Int32(length):
        list_keys[warp * length + lane] = key
        list_ids[warp * length + lane] = expert
    synchronize(spec)
    t = warp * WARP + lane
    if t < Int32(spec.warps * length):
        own_list = t // length
        own = Uint32(list_keys[t])
        # A list is sorted, so within it the place is known.
        before = t - own_list * length
        base = Int32(list_keys.iterator.toint())
        for w in range_constexpr(spec.warps):
            # Earlier lists also win ties: strictly more than one less.
            bound = own - (Uint32(1) if Int32(w) < own_list else Uint32(0))
            here = Int32(0)
            for quad in range_constexpr(length // 4):
                others = dev.load_shared_v4(base + (w * length + 4 * quad) * 4)
                for j in range_constexpr(4):
                    here += Int32(1) if others[j] > bound else Int32(0)
            if own_list != Int32(w):
                before += here
        if own != Uint32(0) and before < Int32(spec.top_k):
            chosen[before] = list_ids[t]
    synchronize(spec)
    out = Int32(0)
    if lane < Int32(spec.top_k):
        out = chosen[lane]
    return out


@cute.kernel
def choice_kernel(
    spec: cutlass.Constexpr, partials: Int64, bias: Int64, image_bias: Int64, image_mask: Int64,
    ids: Int64, weights: Int64, tokens: Int32,
):  # fmt: skip
    tid = cute.arch.thread_idx()[0]
    lane = tid % WARP
    warp = cute.arch.make_warp_uniform(tid // WARP)
    in_block = warp // spec.warps
    warp = warp % spec.warps
    token = cute.arch.block_idx()[0] * spec.block_tokens + in_block
    smem = SmemAllocator()
    scores = words(smem, Float32, spec.experts, spec.block_tokens, in_block)
    grouped = spec.n_group > 1
    all_keys = words(smem, Uint32, spec.experts if grouped else 0, spec.block_tokens, in_block)
    group_keys = words(smem, Uint32, spec.n_group if grouped else 0, spec.block_tokens, in_block)
    kept = words(smem, Int32, spec.n_group if grouped else 0, spec.block_tokens, in_block)
    several = spec.warps > 1
    maxima = words(smem, Float32, spec.warps if several else 0, spec.block_tokens, in_block)
    lists = spec.warps * spec.list_length if several else 0
    list_pointer = cute.recast_ptr(smem.allocate(4 * max(4, lists), 16), dtype=Uint32)
    list_keys = cute.make_tensor(list_pointer, cute.make_layout(max(4, lists)))
    list_ids = words(smem, Int32, lists, spec.block_tokens, in_block)
    chosen = words(smem, Int32, spec.top_k if several else 0, spec.block_tokens, in_block)

    first = warp * (spec.quads * COLUMNS) + lane * 4
    bias_here = cute.make_rmem_tensor(4 * spec.quads, Float32)
    # The biases lie ready before the kernel ahead ends, as the weights in router_logits. Where a warp has many experts
    # it reads them when it needs them: it has no registers to spare, and other warps to wait for it.
    if const_expr(spec.biased and not spec.image_biased and several):
        load_bias(spec, bias, first, bias_here)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    if token < tokens:
        values = cute.make_rmem_tensor(4 * spec.quads, Float32)
        keys = cute.make_rmem_tensor(4 * spec.quads, Uint32)
        if const_expr(spec.image_biased):
            bias = image_bias if rd.load_byte(image_mask + Int64(token)) != Uint32(0) else bias
        sum_parts(spec, partials, token, tokens, first, values)
        score(spec, values, first, warp, lane, scores, maxima)
        if const_expr(spec.biased and (spec.image_biased or not several)):
            load_bias(spec, bias, first, bias_here)
        make_keys(spec, values, first, bias_here, keys)
        if const_expr(grouped):
            limit_groups(spec, keys, first, warp, lane, all_keys, group_keys, kept)
        key, expert = choose(spec, keys, first, lane)
        if const_expr(several):
            expert = merge(spec, key, expert, warp, lane, list_keys, list_ids, chosen)
        else:
            synchronize(spec)
        if warp == Int32(0):
            weight = Float32(0.0)
            if lane < Int32(spec.top_k):
                weight = scores[expert]
            if const_expr(spec.normalized):
                total = rd.add(butterfly(weight, rd.add), Float32(NORM_EPSILON))
                weight = dev.divide(weight, total)
            if lane < Int32(spec.top_k):
                at = (Int64(token) * spec.top_k + Int64(lane)) * 4
                rd.store_i32(ids + at, expert)
                dev.store_f32(weights + at, rd.multiply(weight, Float32(spec.scale)))


@cute.jit
def router_choice(
    spec: cutlass.Constexpr, anchor: Any, partials: Int64, bias: Int64, image_bias: Int64, image_mask: Int64,
    ids: Int64, weights: Int64, tokens: Int32, stream: cuda.CUstream,
):  # fmt: skip
    """Launch :func:`choice_kernel`; ``tokens`` ≥ 1."""
    choice_kernel(spec, partials, bias, image_bias, image_mask, ids, weights, tokens).launch(
        grid=[(tokens + (spec.block_tokens - 1)) // spec.block_tokens, 1, 1], block=[spec.threads, 1, 1],
        stream=stream, use_pdl=True, min_blocks_per_mp=1,
    )  # fmt: skip
