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

/* Weights of one size that pack() has rearranged, as multiply_grouped() in linear.c takes them. */
typedef struct grouped grouped;
struct grouped {
    /* Each weight has rows of its own: row i of the result is row sources[i] of x times the weight w with starts[w] <= i <
     * starts[w + 1].  sources: null: rows of x have the order of the result's; arranged: as above, for all rows */
    void (*multiply)(const grouped *of, const elem *x, const int64_t *sources, const int64_t *starts, elem *result,
                     float *arranged);
    const uint32_t *const *packed;
    const float *const *scales, *const *offsets; /* of each weight; may be null, as in linear */
    int64_t count, in, out, group;
};
