/* A weight that pack() has rearranged, as multiply() in linear.c takes it. */
#include <stdint.h>

typedef struct linear linear;
struct linear {
    /* result = x @ weight.T + bias.  x: [rows, in]; result: [rows, out]; arranged: space for PackedLinear.room
     * floats a row */
    void (*multiply)(const linear *of, const elem *x, elem *result, float *arranged, int64_t rows);
    const uint32_t *packed;
    const float *scales, *offsets; /* of quantised weights, in panels, else null; the offsets may be null too */
    const elem *bias;              /* [out], or null */
    int64_t in, out;
    int64_t group; /* inputs that share a scale, a multiple of 8 */
};
