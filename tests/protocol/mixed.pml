/* Fence and Sentinel steps in any order on one workspace: W_d, W_c and the combine flags are shared. */
#define MIXED
#define FENCE_BASE 0
#define SENTINEL_BASE (P * FENCE_WORDS)
#define WORDS (P * (FENCE_WORDS + SENTINEL_WORDS))
#define INITIAL(i) ((i) >= SENTINEL_BASE && ((i) - SENTINEL_BASE) % SENTINEL_WORDS < ROWS * 8 -> SIGMA : STALE)
#include "memory.pml"
#include "fence.pml"
#include "sentinel.pml"

#ifdef SENTINEL_HAS_ITS_OWN_WORKSPACE
#define SENTINEL_WD OWN_WD(s)
#else
#define SENTINEL_WD WD(s, 0, 0)
#endif
#define SHARED_WC WC(s, 0, 0)

/* Sentinel's combine tells a later Fence step that the rank has computed. */
inline sentinel_announce()
{
	skip;
#ifndef NO_SENTINEL_ANNOUNCEMENT
	for (t : 0 .. P - 1) { store_flag(DONE(t, s), DONE_VALUE) }
	t = 0
#endif
}

proctype rank(byte s)
{
	RANK_STATE
	FENCE_STATE
	SENTINEL_STATE
	do
	:: n < STEPS ->
		atomic {
			begin_step();
			if
			:: by_sentinel[n] -> sentinel_send(SENTINEL_WD)
			:: else -> fence_send()
			fi
		};
		if
		:: by_sentinel[n] ->
			sentinel_headers();
			sentinel_tokens(SENTINEL_WD);
#ifdef ANNOUNCE_BEFORE_COMPUTE
			atomic { sentinel_announce() }
			compute(SENTINEL_WD, SHARED_WC);
			sentinel_return(SHARED_WC);
#else
			compute(SENTINEL_WD, SHARED_WC);
			atomic {
				sentinel_announce();
				sentinel_return(SHARED_WC)
			}
#endif
			sentinel_collect(SHARED_WC)
		:: else ->
			fence_receive();
			compute(WD(s, 0, 0), SHARED_WC);
			fence_announce();
			fence_pull()
		fi
	:: else -> break
	od
}

init { start() }
