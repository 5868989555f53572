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
			compute(SENTINEL_WD, SHARED_WC);
			sentinel_return(SHARED_WC);
			sentinel_collect(SHARED_WC)
		:: else ->
			fence_receive();
			compute(WD(s, 0, 0), SHARED_WC);
			fence_combine()
		fi
	:: else -> break
	od
}

init { start() }
