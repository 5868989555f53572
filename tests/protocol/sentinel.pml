/* Sentinel (paper, Algorithm 2; comm/sentinel.py). docs/protocols.md says what is modelled and numbers the rules and
 * invariants.
 *
 * Words of rank t: landing slots L (2 words of payload), two banks of meta slots I (a header and the ids), combine
 * slots M (2 words of partial result); and W_d, W_c, which this protocol uses on the own rank only.
 */
#ifndef MIXED
#define SENTINEL_BASE 0
#define WORDS (P * SENTINEL_WORDS)
#define INITIAL(i) ((i) % SENTINEL_WORDS < ROWS * 8 -> SIGMA : STALE)
#include "memory.pml"
#endif

#define SENTINEL_AT(t) (SENTINEL_BASE + (t) * SENTINEL_WORDS)
#ifdef LANDING_STRIDE_T_HAT
#define LANDING(t, r, i, w) (SENTINEL_AT(t) + ROW(r, i) * 2 + (w))
#else
#define LANDING(t, r, i, w) (SENTINEL_AT(t) + ((r) * SLOTS + (i)) * 2 + (w))
#endif
#define META(t, b, r, i, w) (SENTINEL_AT(t) + ROWS * 2 + ((b) * ROWS + (r) * SLOTS + (i)) * 2 + (w))
#define HEADER(t, r, i) META(t, bank, r, i, 0)
#define IDS(t, r, i) META(t, bank, r, i, 1)
#define RESULT(t, i, r, w) (SENTINEL_AT(t) + ROWS * 6 + ((i) * P + (r)) * 2 + (w))
#define OWN_WD(t) (SENTINEL_AT(t) + ROWS * 8)
#define OWN_WC(t) (SENTINEL_AT(t) + ROWS * 11)
#define BARE NUMBER(0)    /* a header that no token follows */
#define PRESENT NUMBER(1) /* one that a token follows */

/* An empty step still exchanges one slot. */
#ifdef EMPTY_STEP_EXCHANGES_NOTHING
#define EXCHANGED T_HAT
#else
#define EXCHANGED (T_HAT > 0 -> T_HAT : 1)
#endif

/* A poll ends when no word is the sentinel any more. */
#define HERE(A) (cur[A] != SIGMA || (pend[A] != NONE && pend[A] != SIGMA))

/* The load that ends the poll of a word; one that is not polled (a variant) just shows what is there. */
inline take(A, POLLED)
{
	if
	:: POLLED && cur[A] == SIGMA && pend[A] != NONE -> arrive(A)
	:: else -> look(A)
	fi
}

#ifdef POLL_FIRST_PAYLOAD_WORD
#define PAYLOAD_POLLED(w) ((w) == 0)
#else
#define PAYLOAD_POLLED(w) true
#endif
#ifdef POLL_FIRST_RESULT_WORD
#define RESULT_POLLED(w) ((w) == 0)
#else
#define RESULT_POLLED(w) true
#endif
#ifdef POLL_NO_IDS
#define IDS_POLLED false
#else
#define IDS_POLLED true
#endif

#if SLOTS == 1
#define EACH_SLOT(f, r) f(r, 0)
#else
#define EACH_SLOT(f, r) (f(r, 0) && f(r, 1))
#endif

inline reset(A)
{
	local_store(A, SIGMA)
}

inline reset_used(A)
{
	if
	:: cur[A] != SIGMA -> reset(A)
	:: else
	fi
}

/* Dispatch, first part: push the tokens, and a header for each slot to every rank. The own rank's part stays local. */
inline sentinel_send(D)
{
	atomic {
#ifndef ONE_BANK
		bank = n % 2;
#endif
		route();
		for (k : 0 .. EXCHANGED - 1) {
			for (t : 0 .. P - 1) {
				if
				:: k < tokens && TO(k, t) && t != s ->
					store_free(LANDING(t, s, k, 0), TOKEN(n, s, k), SIGMA);
#ifdef PAYLOAD_HOLDS_SENTINEL
					store_free(LANDING(t, s, k, 1), SIGMA, SIGMA);
#else
					store_free(LANDING(t, s, k, 1), TOKEN(n, s, k), SIGMA);
#endif
					store_free(IDS(t, s, k), TOKEN(n, s, k), SIGMA);
					store_free(HEADER(t, s, k), PRESENT, SIGMA)
#ifndef NO_BARE_HEADERS
#ifdef OWN_T_ONLY
				:: k < tokens && !TO(k, t) && t != s ->
#else
				:: !(k < tokens && TO(k, t)) && t != s ->
#endif
					store_free(HEADER(t, s, k), BARE, SIGMA)
#endif
				:: t == s && k < T_HAT ->
					a = D + ROW(s, k) * 3;
					if
					:: k < tokens && TO(k, s) -> v = TOKEN(n, s, k); present[s * SLOTS + k] = PRESENT
					:: else -> v = INVALID; present[s * SLOTS + k] = BARE
					fi;
					local_store(a, v);
					local_store(a + 1, v);
					local_store(a + 2, v)
				:: else
				fi
			}
		}
		forget()
	}
}

/* What a kernel that did not wait for the one before would do: resets of the step before, after this step's headers. */
inline sentinel_late_resets()
{
	atomic {
		for (a : 0 .. ROWS * 2 - 1) {
#ifdef RESULT_RESET_AFTER_NEXT_HEADERS
			reset_used(RESULT(s, 0, 0, a));
#endif
#ifdef META_RESET_AFTER_NEXT_HEADERS
			reset_used(META(s, 1 - bank, 0, 0, a))
#endif
		}
		forget()
	}
}

#define HEADER_HERE(r, i) ((i) >= EXCHANGED || HERE(HEADER(s, r, i)))
#define HEADERS_HERE(r) (r == s || EACH_SLOT(HEADER_HERE, r))
#define PROMISED(r, i) ((i) < EXCHANGED && present[(r) * SLOTS + (i)] == PRESENT)
#define PAYLOAD_HERE(r, i, w) (!PAYLOAD_POLLED(w) || HERE(LANDING(s, r, i, w)))
#define WORDS_HERE(r, i) ((!IDS_POLLED || HERE(IDS(s, r, i))) && PAYLOAD_HERE(r, i, 0) && PAYLOAD_HERE(r, i, 1))
#define TOKEN_HERE(r, i) (!PROMISED(r, i) || WORDS_HERE(r, i))
#define TOKENS_HERE(r) (r == s || EACH_SLOT(TOKEN_HERE, r))

/* Dispatch, second part: poll every rank's headers. */
inline sentinel_headers()
{
	atomic {
		EACH(HEADERS_HERE);
		for (r : 0 .. P - 1) {
			for (j : 0 .. EXCHANGED - 1) {
				if
				:: r != s ->
					take(HEADER(s, r, j), true);
					present[r * SLOTS + j] = cur[HEADER(s, r, j)]
				:: else
				fi
			}
		}
		forget()
	}
}

/* Dispatch, third part: poll the ids and payloads that the headers promise, copy out and reset. */
inline sentinel_tokens(D)
{
	atomic {
		EACH(TOKENS_HERE);
		INVARIANT(I1_HOLDS);
		for (r : 0 .. P - 1) {
			for (j : 0 .. EXCHANGED - 1) {
				a = D + ROW(r, j) * 3;
				if
				:: r != s && PROMISED(r, j) ->
					take(IDS(s, r, j), IDS_POLLED);
					take(LANDING(s, r, j, 0), PAYLOAD_POLLED(0));
					take(LANDING(s, r, j, 1), PAYLOAD_POLLED(1));
					local_store(a, cur[LANDING(s, r, j, 0)]);
					local_store(a + 1, cur[LANDING(s, r, j, 1)]);
					local_store(a + 2, cur[IDS(s, r, j)]);
#if !defined(NO_RESET_LANDING) && !defined(LANDING_RESET_AFTER_RESULTS)
					reset(LANDING(s, r, j, 0));
					reset(LANDING(s, r, j, 1));
#endif
#if !defined(NO_RESET_IDS) && !defined(META_RESET_AFTER_NEXT_HEADERS)
					reset(IDS(s, r, j))
#endif
				:: r != s && !PROMISED(r, j) && j < T_HAT -> local_store(a + 2, INVALID)
				:: else
				fi;
#if !defined(NO_RESET_HEADER) && !defined(META_RESET_AFTER_NEXT_HEADERS)
				reset(HEADER(s, r, j))
#endif
			}
		}
		forget()
	}
}

/* Combine, first part: push the partial results of the slots that hold a token. */
inline sentinel_return(C)
{
	atomic {
		for (r : 0 .. P - 1) {
			for (j : 0 .. T_HAT - 1) {
				a = C + ROW(r, j) * 2;
				if
				:: PROMISED(r, j) && r != s ->
					own(a);
					own(a + 1);
					store_free(RESULT(r, j, s, 0), cur[a], SIGMA);
					store_free(RESULT(r, j, s, 1), cur[a + 1], SIGMA);
					cur[a] = STALE;
					cur[a + 1] = STALE
				:: else
				fi
			}
		}
		forget()
	}
}

#define WORD_HERE(t, i, w) (!RESULT_POLLED(w) || HERE(RESULT(s, i, t, w)))
#define RESULT_HERE(t, i) (!TO(i, t) || (WORD_HERE(t, i, 0) && WORD_HERE(t, i, 1)))
#define RESULTS_HERE(t) (t == s || EACH_SLOT(RESULT_HERE, t))

/* Combine, second part: poll the partial results of the own tokens, reset them and add. */
inline sentinel_collect(C)
{
	atomic {
		EACH(RESULTS_HERE);
		for (k : 0 .. tokens - 1) {
			for (t : 0 .. P - 1) {
				a = C + ROW(s, k) * 2;
				if
				:: TO(k, t) && t == s ->
					own(a);
					own(a + 1);
					assert(cur[a] == TOKEN(n, s, k) && cur[a + 1] == TOKEN(n, s, k)); /* I5 */
					cur[a] = STALE;
					cur[a + 1] = STALE
				:: TO(k, t) && t != s ->
					take(RESULT(s, k, t, 0), RESULT_POLLED(0));
					take(RESULT(s, k, t, 1), RESULT_POLLED(1));
					/* I5 */
					assert(cur[RESULT(s, k, t, 0)] == TOKEN(n, s, k) && cur[RESULT(s, k, t, 1)] == TOKEN(n, s, k));
#if !defined(NO_RESET_RESULT) && !defined(RESULT_RESET_AFTER_NEXT_HEADERS)
					reset(RESULT(s, k, t, 0));
					reset(RESULT(s, k, t, 1))
#endif
				:: else
				fi
			}
			dest[k] = 0
		}
		tokens = 0;
		for (r : 0 .. P - 1) {
			for (j : 0 .. EXCHANGED - 1) {
#ifdef LANDING_RESET_AFTER_RESULTS
				if
				:: r != s && PROMISED(r, j) ->
					reset(LANDING(s, r, j, 0));
					reset(LANDING(s, r, j, 1))
				:: else
				fi;
#endif
				present[r * SLOTS + j] = 0
			}
		}
		end_step();
		forget()
	}
}

#define SENTINEL_STATE \
	byte bank;              /* the bank of meta slots that this step uses */ \
	byte present[P * SLOTS]; /* headers received */

#ifndef MIXED
proctype rank(byte s)
{
	RANK_STATE
	SENTINEL_STATE
	do
	:: n < STEPS ->
		atomic {
			begin_step();
			sentinel_send(OWN_WD(s))
		};
#if defined(RESULT_RESET_AFTER_NEXT_HEADERS) || defined(META_RESET_AFTER_NEXT_HEADERS)
		sentinel_late_resets();
#endif
		sentinel_headers();
		atomic { /* between them no peer can tell the difference: W_d and W_c are the rank's own */
			sentinel_tokens(OWN_WD(s));
			compute(OWN_WD(s), OWN_WC(s))
		};
		sentinel_return(OWN_WC(s));
		sentinel_collect(OWN_WC(s))
	:: else -> break
	od
}

init { start() }
#endif
