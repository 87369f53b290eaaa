/* Vectors of float32: one source for SSE, AVX2, AVX-512 and NEON. */
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(LANES) /* by tests */
#elif defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif
typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t places __attribute__((vector_size(4 * LANES)));

/* For lane L of a vector that takes the first B of each 2 * B lanes of two vectors, the place among those of both. */
#define OF_BOTH(L, B) ((L) / (2 * (B)) * 2 * (B) + (L) % (B) + ((L) / (B) % 2 ? LANES : 0))
#define EIGHT(L, B) \
    OF_BOTH(L, B), OF_BOTH(L + 1, B), OF_BOTH(L + 2, B), OF_BOTH(L + 3, B), OF_BOTH(L + 4, B), OF_BOTH(L + 5, B), \
        OF_BOTH(L + 6, B), OF_BOTH(L + 7, B)
#if LANES == 16
#define FIRST_OF_BOTH(B) ((places){EIGHT(0, B), EIGHT(8, B)})
#else
#define FIRST_OF_BOTH(B) ((places){EIGHT(0, B)})
#endif

/* Adds each B lanes of 2 * B vectors to the B lanes after them, and puts the sums of two vectors into one. */
#define ADD_HALVES(v, B) \
    for (int j = 0; j < (B); j++) \
        v[j] = __builtin_shuffle(v[j], v[j + (B)], FIRST_OF_BOTH(B)) + \
               __builtin_shuffle(v[j], v[j + (B)], FIRST_OF_BOTH(B) + (B))

/* Lane j of the result is the sum of the lanes of v[j], of LANES vectors, which are overwritten. */
INLINE floats sums_of_lanes(floats *v) {
#ifdef __clang__
    floats sums = {0};
    for (int j = 0; j < LANES; j++)
        for (int lane = 0; lane < LANES; lane++) sums[j] += v[j][lane];
    return sums;
#else
#if LANES == 16
    ADD_HALVES(v, 8);
#endif
    ADD_HALVES(v, 4);
    ADD_HALVES(v, 2);
    ADD_HALVES(v, 1);
    return v[0];
#endif
}
