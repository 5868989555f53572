/* Fence (paper, Algorithm 1; comm/fence.py). docs/protocols.md says what is modelled and numbers the rules and
 * invariants.
 *
 * Words of rank t: W_d, W_c, and for each peer the slot count and the two flags. A row of a workspace is flat slot a
 * of P*T^: payload words 0 and 1, and in W_d the ids, word 2.
 */
#ifndef MIXED
#define FENCE_BASE 0
#define WORDS (P * FENCE_WORDS)
#define INITIAL(i) STALE
#include "memory.pml"
#endif

#define FENCE_AT(t) (FENCE_BASE + (t) * FENCE_WORDS)
#define WD(t, a, w) (FENCE_AT(t) + (a) * 3 + (w))
#define WC(t, a, w) (FENCE_AT(t) + ROWS * 3 + (a) * 2 + (w))
#define COUNT(t, s) (FENCE_AT(t) + ROWS * 5 + (s))
#define SENT(t, s) (FENCE_AT(t) + ROWS * 5 + P + (s))
#ifdef ONE_FLAG_WORD
#define DONE(t, s) SENT(t, s)
#define SENT_VALUE NUMBER(2 * n)
#define DONE_VALUE NUMBER(2 * n + 1)
#else
#define DONE(t, s) (FENCE_AT(t) + ROWS * 5 + 2 * P + (s))
#define SENT_VALUE NUMBER(n)
#define DONE_VALUE NUMBER(n)
#endif

#ifdef WAIT_EQUAL
#define REACHED(x, v) ((x) == (v))
#else
#define REACHED(x, v) ((x) >= (v))
#endif
#define FLAG_SEEN(A, v) (REACHED(cur[A], v) || (pend[A] != NONE && REACHED(pend[A] & 127, v)))

/* A flag that only shows its value after arriving does so when it is seen. */
inline see_flag(A, V)
{
	if
	:: !REACHED(cur[A], V) && FLAG_SEEN(A, V) -> arrive(A)
	:: else
	fi
}

/* With >= a waiter cannot miss a value that a later one covers, so only the later one matters. */
inline store_flag(A, V)
{
#ifdef WAIT_EQUAL
	store(A, V)
#else
	pend[A] = V
#endif
}

inline mark(A)
{
	if
	:: pend[A] != NONE -> pend[A] = pend[A] | REL
	:: else
	fi
}

inline arrive_marked(A)
{
	if
	:: pend[A] & REL -> arrive(A)
	:: else
	fi
}

/* The last block of dispatch, for the whole rank: release, then one word with step and slot count to each rank. Under
 * SEPARATE_COUNT, as in the paper, two words: the count ahead of the release, the flag behind it.
 */
inline fence_publish()
{
#if defined(SEPARATE_COUNT) && !defined(COUNT_AFTER_RELEASE)
	for (t : 0 .. P - 1) { store_free(COUNT(t, s), NUMBER(cnt[t]), STALE) }
#endif
#ifndef NO_RELEASE_DISPATCH
	for (t : 0 .. P - 1) {
		for (j : 0 .. T_HAT - 1) {
#ifdef RELAXED_DONE
			/* The other blocks' stores are not ordered before this block's release. */
			if
			:: tokens > 0 && pend[WD(t, ROW(s, j), 2)] == TOKEN(n, s, tokens - 1) ->
#endif
			mark(WD(t, ROW(s, j), 0));
			mark(WD(t, ROW(s, j), 1));
			mark(WD(t, ROW(s, j), 2))
#ifdef RELAXED_DONE
			:: else
			fi
#endif
		}
		mark(COUNT(t, s))
	}
#endif
#if (!defined(SEPARATE_COUNT) || defined(COUNT_AFTER_RELEASE)) && !defined(NO_COUNT)
	for (t : 0 .. P - 1) { store_free(COUNT(t, s), NUMBER(cnt[t]), STALE) }
#endif
	for (t : 0 .. P - 1) { store_flag(SENT(t, s), SENT_VALUE) }
}

#define LEFT_STEP_BEFORE(r) FLAG_SEEN(DONE(s, r), NUMBER(n - 1))

/* Dispatch, first part: a block per token; rank s alone writes region s. Rank s with no token runs one empty block. */
inline fence_send()
{
	atomic {
		route();
#if defined(MIXED) && !defined(NO_ENTRY_WAIT)
		forget();
		(n == 1 || tokens == 0 || EACH(LEFT_STEP_BEFORE));
		for (r : 0 .. P - 1) { see_flag(DONE(s, r), NUMBER(n - 1)) }
#endif
		for (k : 0 .. tokens - 1) {
			for (t : 0 .. P - 1) {
				if
				:: TO(k, t) ->
					assert(cnt[t] < T_HAT); /* F1 */
					slot[k * P + t] = cnt[t];
					a = ROW(s, cnt[t]);
					cnt[t]++;
					store_free(WD(t, a, 0), TOKEN(n, s, k), STALE);
					store_free(WD(t, a, 1), TOKEN(n, s, k), STALE);
					store_free(WD(t, a, 2), TOKEN(n, s, k), STALE)
				:: else
				fi
			}
		}
#ifdef T0_LAUNCHES_NOTHING
		v = tokens;
#else
		v = (tokens > 0 -> tokens : 1);
#endif
		blocks = blocks + v;
		if
		:: v > 0 && blocks == v -> fence_publish()
		:: else
		fi;
		forget()
	}
}

/* Dispatch, second part: wait for every rank, then sanitize: ids past a source's count become invalid. */
#define SENT_BY(r) FLAG_SEEN(SENT(s, r), SENT_VALUE)
inline fence_receive()
{
	atomic {
#ifndef NO_FLAG_DISPATCH
		EACH(SENT_BY);
		for (r : 0 .. P - 1) {
			see_flag(SENT(s, r), SENT_VALUE);
#ifndef NO_ACQUIRE_DISPATCH
			for (j : 0 .. T_HAT - 1) {
				arrive_marked(WD(s, ROW(r, j), 0));
				arrive_marked(WD(s, ROW(r, j), 1));
				arrive_marked(WD(s, ROW(r, j), 2))
			}
			arrive_marked(COUNT(s, r));
#endif
#ifndef SEPARATE_COUNT
			own(COUNT(s, r)) /* the other half of the flag's word */
#endif
		}
#endif
		INVARIANT(I1_HOLDS);
#ifndef NO_SANITIZE
		for (r : 0 .. P - 1) {
			look(COUNT(s, r));
			for (j : 0 .. T_HAT - 1) {
				if
				:: NUMBER(j) >= cur[COUNT(s, r)] -> local_store(WD(s, ROW(r, j), 2), INVALID)
				:: else
				fi
			}
			cur[COUNT(s, r)] = STALE
		}
#endif
		forget()
	}
}

#define DONE_BY(r) FLAG_SEEN(DONE(s, r), DONE_VALUE)
#ifdef WAIT_TARGETS_ONLY
#define AWAITED(r) (!(TO(0, r) || TO(SLOTS - 1, r)) || DONE_BY(r))
#else
#define AWAITED(r) DONE_BY(r)
#endif

/* Combine, first part: announce that this rank has computed. */
inline fence_announce()
{
	atomic {
#ifndef NO_RELEASE_COMBINE
		for (a : 0 .. P * T_HAT - 1) {
			mark(WC(s, a, 0));
			mark(WC(s, a, 1))
		}
#endif
		for (t : 0 .. P - 1) { store_flag(DONE(t, s), DONE_VALUE) }
		forget()
	}
}

/* Combine, second part: wait for every rank, then pull the partial results from where dispatch put the tokens. */
inline fence_pull()
{
	atomic {
#ifndef NO_FLAG_COMBINE
		EACH(AWAITED);
		INVARIANT(I2_HOLDS);
		for (r : 0 .. P - 1) {
			see_flag(DONE(s, r), DONE_VALUE);
#ifndef NO_ACQUIRE_COMBINE
			for (j : 0 .. T_HAT - 1) {
				arrive_marked(WC(r, ROW(s, j), 0));
				arrive_marked(WC(r, ROW(s, j), 1))
			}
#endif
		}
#endif
		for (k : 0 .. tokens - 1) {
			for (t : 0 .. P - 1) {
				if
				:: TO(k, t) ->
					a = ROW(s, slot[k * P + t]);
					look(WC(t, a, 0));
					look(WC(t, a, 1));
					/* I5 */
					assert(cur[WC(t, a, 0)] == TOKEN(n, s, k) && cur[WC(t, a, 1)] == TOKEN(n, s, k));
					cur[WC(t, a, 0)] = STALE;
					cur[WC(t, a, 1)] = STALE;
					slot[k * P + t] = 0
				:: else
				fi
			}
			dest[k] = 0
		}
#ifndef NO_RESET_COUNTERS
		for (t : 0 .. P - 1) { cnt[t] = 0 }
#endif
#ifndef NO_RESET_DONE
		blocks = 0;
#endif
		tokens = 0;
		end_step();
		forget()
	}
}

#define FENCE_STATE \
	byte cnt[P];            /* next free slot of this rank's region on each target */ \
	byte slot[SLOTS * P];   /* where each token went */ \
	byte blocks;            /* finished blocks of dispatch */

#ifndef MIXED
proctype rank(byte s)
{
	RANK_STATE
	FENCE_STATE
	do
	:: n < STEPS ->
		atomic {
			begin_step();
			fence_send()
		};
		fence_receive();
#ifdef ANNOUNCE_BEFORE_COMPUTE
		fence_announce();
		compute(WD(s, 0, 0), WC(s, 0, 0));
#else
		compute(WD(s, 0, 0), WC(s, 0, 0));
		fence_announce();
#endif
		fence_pull()
	:: else -> break
	od
}

init { start() }
#endif
