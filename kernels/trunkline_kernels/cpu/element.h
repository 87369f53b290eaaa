/* The element type of a build: bfloat16 with -DBF16, else float32. Arithmetic is in float32 for both. */
#include <stdint.h>

#ifdef BF16
typedef uint16_t elem;
static inline float load(elem x) {
    union { uint32_t u; float f; } bits = {.u = (uint32_t)x << 16};
    return bits.f;
}
static inline elem store(float x) { /* rounds to nearest, ties to even; a NaN stays NaN */
    union { float f; uint32_t u; } bits = {.f = x};
    uint32_t rounded = (bits.u + 0x7FFF + ((bits.u >> 16) & 1)) >> 16;
    return x == x ? (elem)rounded : (elem)0x7FC0;
}
#else
typedef float elem;
static inline float load(elem x) { return x; }
static inline elem store(float x) { return x; }
#endif
