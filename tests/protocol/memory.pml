/* What the models share: sizes, routing, and a memory in which remote stores arrive late, word by word, in any
 * order.
 *
 * Every word of symmetric memory has two cells: cur, what its memory holds, and pend, one store still in flight
 * (NONE if there is none). A store goes to pend. A read of a word with a store in flight may see either, and seeing
 * the new one is its arrival. As nothing else can observe an arrival, that is as general as letting stores arrive at
 * any time, and it needs no states for the deliveries. Two stores in flight to one word come from one thread and
 * keep their order.
 *
 * A release marks the stores it covers (REL). An acquire of a flag whose store followed the release makes the marked
 * ones arrive. Nothing else does: not the flag itself, and not the end of a kernel.
 *
 * A kernel sees what earlier kernels of its own rank stored locally (local_store).
 */
#ifndef P
#define P 3 /* ranks */
#endif
#ifndef STEPS
#define STEPS 3
#endif
#ifndef SLOTS
#define SLOTS 2 /* most tokens of a rank in a step */
#endif

/* Words that a protocol needs on each rank. */
#define ROWS (P * SLOTS)
#define FENCE_WORDS (ROWS * 5 + 3 * P)
#define SENTINEL_WORDS (ROWS * 13)

#if P == 2
#define EACH(f) (f(0) && f(1))
#elif P == 3
#define EACH(f) (f(0) && f(1) && f(2))
#else
#error "P is 2 or 3"
#endif

/* Word values. A data word says which token of which rank and step it belongs to. */
#define NONE 0    /* pend only: nothing in flight */
#define STALE 1   /* poison: contents that must not be used any more */
#define INVALID 2 /* expert id -1 */
#define SIGMA 3   /* the sentinel */
#define NUMBER(x) (4 + (x))
#define TOKEN(n, r, k) (8 + ((n) * P + (r)) * SLOTS + (k))
#define BELONGS(v, n, r) ((v) >= TOKEN(n, r, 0) && (v) < TOKEN(n, r, 0) + SLOTS)
#define REL 128

byte cur[WORDS];
byte pend[WORDS];
byte t_hat[STEPS + 1];    /* T^ of each step, the same on every rank */
#ifdef MIXED
bool by_sentinel[STEPS + 1]; /* the protocol of each step */
#endif
byte computed[STEPS + 1]; /* ranks that have computed in the step */
byte finished[STEPS + 1]; /* ranks that are past the step */
#define T_HAT t_hat[n]
#define UNKNOWN 255
#define ROW(r, j) ((r) * T_HAT + (j)) /* flat slot of a workspace [P*T^] */

#define arrive(A) cur[A] = pend[A] & 127; pend[A] = NONE

/* A store to another rank's memory, or to one's own that others read. */
inline store(A, V)
{
	if
	:: pend[A] == NONE -> pend[A] = V
	:: pend[A] != NONE -> arrive(A); pend[A] = V /* the earlier one arrived before */
	:: pend[A] != NONE -> pend[A] = V            /* covered before anyone saw it */
	fi
}

/* I1, I2 and I3 of docs/protocols.md, in the models of the protocols as they are. A variant does without them, so
 * that it has to show the harm: a wrong row (I4, I5) or a hang (I6).
 */
#ifdef VARIANT
#define INVARIANT(x) skip
#else
#define INVARIANT(x) assert(x)
#endif

/* A store of data. I3: the word is free, that is in its state at rest, and nothing else is in flight to it. */
inline store_free(A, V, AT_REST)
{
	INVARIANT(cur[A] == AT_REST && pend[A] == NONE);
	store(A, V)
}

/* A store to the own rank's memory, ordered for this rank, racing with whatever is in flight. */
inline local_store(A, V)
{
	if
	:: pend[A] != NONE -> pend[A] = NONE /* it arrives first and is overwritten */
	:: true                              /* it is still to come */
	fi;
	cur[A] = V
}

/* Before a read of word A: what is in flight to it may arrive or not. */
inline look(A)
{
	if
	:: pend[A] != NONE -> arrive(A)
	:: true
	fi
}

/* Before a read of a word that only this rank stores to: a rank sees its own stores. */
inline own(A)
{
	if
	:: pend[A] != NONE -> arrive(A)
	:: else
	fi
}

/* The tokens of rank s in this step; dest[k] is the bit mask of token k's target ranks. With one slot, no token or
 * one to any set of ranks. With two, so it is on rank n mod P, which may also have two tokens, while the others have
 * none, or one for nobody, for the next rank or for all: enough to differ in T, and few enough to search.
 */
inline route()
{
	tokens = 0;
	do
	:: tokens < T_HAT && (SLOTS == 1 || s == n % P) ->
		for (t : 0 .. P - 1) {
			if
			:: dest[tokens] = dest[tokens] | (1 << t)
			:: true
			fi
		}
		tokens++
	:: tokens < T_HAT && tokens == 0 && SLOTS > 1 && s != n % P ->
		if
		:: dest[0] = 0
		:: dest[0] = 1 << ((s + 1) % P)
		:: dest[0] = (1 << P) - 1
		fi;
		tokens++
	:: break
	od
}

#define TO(k, t) (dest[k] & (1 << (t)))

/* Scratch variables must not tell apart states that are the same. */
inline forget()
{
	d_step { t = 0; k = 0; j = 0; a = 0; v = 0 }
}

/* MoE compute on workspaces that start at words D and C: the indexing kernel reads the ids, FC1 the rows of valid
 * slots, finalize writes their partial results. Then poison what was used, so that no later step can take it for its
 * own.
 */
inline compute(D, C)
{
	atomic {
		for (a : 0 .. P * T_HAT - 1) {
			look(D + a * 3 + 2);
			index[a] = cur[D + a * 3 + 2];
			assert(index[a] == INVALID || BELONGS(index[a], n, a / T_HAT)) /* I4 */
		}
		for (a : 0 .. P * T_HAT - 1) {
			if
			:: index[a] != INVALID ->
				look(D + a * 3);
				look(D + a * 3 + 1);
				assert(cur[D + a * 3] == index[a] && cur[D + a * 3 + 1] == index[a]); /* I4 */
				store_free(C + a * 2, index[a], STALE);
				store_free(C + a * 2 + 1, index[a], STALE)
			:: else
			fi;
			cur[D + a * 3] = STALE;
			cur[D + a * 3 + 1] = STALE;
			cur[D + a * 3 + 2] = STALE;
			index[a] = 0
		}
		computed[n]++;
		forget()
	}
}

/* I1: who has received everything knows that every rank has finished the step before. */
#define I1_HOLDS (n == 1 || finished[n - 1] == P)
/* I2: who has seen every rank's combine flag knows that every rank has computed. */
#define I2_HOLDS (computed[n] == P)

#define RANK_STATE \
	byte n;                 /* step, from 1 */ \
	byte tokens;            /* T of this step */ \
	byte dest[SLOTS];       /* target ranks of each token */ \
	byte index[P * SLOTS];  /* ids that the indexing kernel read */ \
	byte t, r, k, j, v; \
	short a;

inline begin_step()
{
	n++;
	if
	:: T_HAT == UNKNOWN ->
#ifdef MIXED
		if
		:: by_sentinel[n] = true
		:: by_sentinel[n] = false
		fi;
#endif
		if
		:: T_HAT = SLOTS
		:: T_HAT = SLOTS - 1
		fi
	:: else
	fi
}

inline end_step()
{
	finished[n]++;
#ifdef ASSERT_NO_END
	assert(n < STEPS || finished[n] < P);
#endif
	if
	:: finished[n] == P ->
		T_HAT = UNKNOWN;
#ifdef MIXED
		by_sentinel[n] = false;
#endif
	:: else
	fi
}

inline start()
{
	short i;
	atomic {
		for (i : 1 .. STEPS) { t_hat[i] = UNKNOWN }
		for (i : 0 .. WORDS - 1) { cur[i] = INITIAL(i) }
		for (i : 0 .. P - 1) { run rank(i) }
	}
}
