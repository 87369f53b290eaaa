/* The exponential function, for loops that the compiler vectorises. */
#include <math.h>
#include <stdint.h>

/* exp(x) for x <= 88, to about 2 ulp: Cephes' polynomial on [-ln2/2, ln2/2]. Below -87 it is 0. */
static inline float fast_exp(float x) {
    float bounded = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    float n = nearbyintf(bounded * 1.44269504088896341f);
    float r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { uint32_t u; float f; } power = {.u = (uint32_t)((int32_t)n + 127) << 23};
    return x < -87.0f ? 0.0f : p * power.f;
}
