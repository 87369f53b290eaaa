/* Matrix products with weights that are rearranged once, when a model is loaded.
 *
 * The weights lie in panels of PANEL outputs, input by input, so that a product reads them once and in order. A tile of
 * the result, up to TILE rows by PANEL outputs, stays in registers while the inputs pass. A 32-bit word of an output
 * has one input of float32 weights, two of bfloat16, four of 8 bits or eight of 4 bits, the first one in its lowest
 * bits, so that shifts and masks widen them to float32.
 *
 * A build is for weights of its element type or, with -DWEIGHT_BITS=8 or 4, for quantised ones, which stand for
 * (stored - zero) * scale. Inputs share scale and zero point in groups, and a group's sum is multiplied by the scale.
 * 8 bits have no zero point.
 *
 * The additions of each element of the result have one order, whatever the numbers of rows and threads are. They run in
 * chains of some hundred inputs, whose sums are added: one long chain would round more.
 */
#include "element.h"

#include <string.h>

/* Vector types of GCC and Clang: one source for SSE, AVX2, AVX-512 and NEON. Tests choose other sizes. */
#if defined(LANES)
#elif defined(__AVX512F__)
#define LANES 16
#define TILE 12 /* rows: 24 sums, and what feeds them, fit 32 registers */
#elif defined(__AVX__)
#define LANES 8
#define TILE 6 /* rows: 12 sums in 16 registers */
#elif defined(__aarch64__)
#define LANES 4
#define TILE 12
#else
#define LANES 4
#define TILE 6
#endif
#define PANEL (2 * LANES)
#define TILES_PER_ITEM 8 /* tiles of rows in an item of parallel work */

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#ifndef WEIGHT_BITS
#define WEIGHT_BITS 0 /* not quantised */
#endif
#if WEIGHT_BITS
#define STEP (32 / WEIGHT_BITS) /* inputs of a word */
#elif defined(BF16)
#define STEP 2
#else
#define STEP 1
#endif
#define STEPS_AT_ONCE (WEIGHT_BITS ? 512 / STEP : 256) /* steps of a chain of additions */
#define ZERO 8.0f /* zero point of 4-bit weights that have none of their own */

#define INLINE static inline __attribute__((always_inline))

static inline int64_t steps_of(int64_t in) { return (in + STEP - 1) / STEP; }
static inline int64_t panels_of(int64_t out) { return (out + PANEL - 1) / PANEL; }

/* Outputs of a panel. */
int panel_outputs(void) { return PANEL; }

/* A weight in panels. */
typedef struct {
    const uint32_t *panels; /* [panel][step][output] */
    const float *scales;    /* of quantised weights: [panel][group][output] */
    const float *zeros;     /* the same; null: ZERO everywhere */
    int64_t steps;          /* of a panel */
    int64_t group;          /* steps that share a scale */
} weights;

/* Bytes of the panels of a weight [out, in]. */
int64_t packed_bytes(int64_t out, int64_t in) { return panels_of(out) * steps_of(in) * PANEL * 4; }

/* Rearranges the `width` bytes of each of a weight's outputs into panels. Absent outputs and inputs are zero. */
void pack(const uint8_t *weight, uint32_t *packed, int64_t out, int64_t width) {
    int64_t steps = (width + 3) / 4;
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels_of(out); panel++)
        for (int64_t j = 0; j < PANEL; j++) {
            int64_t o = panel * PANEL + j;
            uint32_t *to = packed + panel * steps * PANEL + j;
            for (int64_t s = 0; s < steps; s++) {
                uint32_t word = 0;
                if (o < out) memcpy(&word, weight + o * width + s * 4, width - s * 4 < 4 ? width - s * 4 : 4);
                to[s * PANEL] = word;
            }
        }
}

/* The float32 values of LANES outputs for one of a word's inputs. */
INLINE floats widened(const uint32_t *from, int part, floats zero) {
#if WEIGHT_BITS == 8
    return __builtin_convertvector(*(const ints *)from << (24 - 8 * part) >> 24, floats);
#elif WEIGHT_BITS == 4
    return __builtin_convertvector((ints)(*(const words *)from >> (4 * part) & 15), floats) - zero;
#elif defined(BF16)
    words both = *(const words *)from;
    return part == 0 ? (floats)(both << 16) : (floats)(both & 0xFFFF0000u);
#else
    return *(const floats *)from;
#endif
}

/* Multiplies a tile of `rows` rows by `width` panels from `panel` on.  x: [steps][STEP][rows];
 * sums: [rows][width * PANEL] */
INLINE void multiply_tile(const float *restrict x, const weights *w, int64_t panel, float *restrict sums,
                          const int rows, const int width) {
    int64_t steps = w->steps, groups = WEIGHT_BITS ? (steps + w->group - 1) / w->group : 0, end;
    memset(sums, 0, (size_t)rows * width * PANEL * sizeof(float));
    for (int64_t begin = 0; begin < steps; begin = end) {
        end = begin + STEPS_AT_ONCE < steps ? begin + STEPS_AT_ONCE : steps;
        floats acc[TILE][8], scale[8] = {{0}}, zero[8] = {{0}};
        if (WEIGHT_BITS) {
            int64_t group = begin / w->group;
            if ((group + 1) * w->group < end) end = (group + 1) * w->group;
            for (int v = 0; v < 2 * width; v++) {
                int64_t at = ((panel + v / 2) * groups + group) * PANEL + v % 2 * LANES;
                scale[v] = *(const floats *)(w->scales + at);
                zero[v] += ZERO;
                if (w->zeros) zero[v] = *(const floats *)(w->zeros + at);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 2 * width; v++) acc[r][v] = (floats){0};
        for (int64_t s = begin; s < end; s++)
#pragma GCC unroll 8
            for (int part = 0; part < STEP; part++) {
                floats wide[8];
#pragma GCC unroll 8
                for (int v = 0; v < 2 * width; v++)
                    wide[v] = widened(w->panels + ((panel + v / 2) * steps + s) * PANEL + v % 2 * LANES, part, zero[v]);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                    for (int v = 0; v < 2 * width; v++) acc[r][v] += wide[v] * x[(s * STEP + part) * rows + r];
            }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 2 * width; v++) {
                if (WEIGHT_BITS) acc[r][v] *= scale[v];
                *(floats *)(sums + (r * 2 * width + v) * LANES) += acc[r][v];
            }
    }
}

/* Calls multiply_tile with constants, so that the compiler keeps all sums in registers. Few rows take several panels at
 * once: one panel would be too few chains of additions to keep the machine busy. */
static void tile(const float *x, const weights *w, int64_t panel, float *sums, int rows, int width) {
#define CASE(R, W) \
    case (R) * 8 + (W): multiply_tile(x, w, panel, sums, R, W); return;
    switch (rows * 8 + width) {
        CASE(1, 4) CASE(2, 2) CASE(3, 2)
        CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1)
#if TILE == 12
        CASE(4, 2) CASE(5, 2) CASE(6, 2) CASE(7, 1) CASE(8, 1) CASE(9, 1) CASE(10, 1) CASE(11, 1) CASE(12, 1)
#endif
    }
#undef CASE
}

/* Panels that a tile of so many rows takes at once. */
static inline int width_of(int rows) {
#if TILE == 12
    return rows == 1 ? 4 : rows <= 6 ? 2 : 1;
#else
    return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
#endif
}

/* Widens rows of x to float32, in the order of multiply_tile: [steps][STEP][rows]. */
static void arrange(const elem *x, float *arranged, int rows, int64_t in) {
    int64_t padded = steps_of(in) * STEP;
    for (int r = 0; r < rows; r++) {
        const elem *row = x + r * in;
        for (int64_t i = 0; i < in; i++) arranged[i * rows + r] = load(row[i]);
        for (int64_t i = in; i < padded; i++) arranged[i * rows + r] = 0.0f;
    }
}

/* The outputs of one tile of rows and up to four panels. bias may be null. */
static void compute(const float *arranged, const weights *w, int64_t panel, const elem *bias, elem *result, int rows,
                    int width, int64_t out) {
    float sums[TILE * 8 * LANES];
    int64_t first = panel * PANEL;
    tile(arranged, w, panel, sums, rows, width);
    int count = out - first < width * PANEL ? (int)(out - first) : width * PANEL;
    for (int r = 0; r < rows; r++) {
        const float *sum = sums + r * width * PANEL;
        elem *to = result + r * out + first;
        if (bias)
            for (int j = 0; j < count; j++) to[j] = store(sum[j] + load(bias[first + j]));
        else
            for (int j = 0; j < count; j++) to[j] = store(sum[j]);
    }
}

#define GROUP 4 /* panels of an item of parallel work */

/* Whether this build's CPU has instructions for products of bfloat16, for which oneDNN has kernels. */
int has_bfloat16_products(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

/* result = x @ weight.T + bias.  x: [rows, in]; packed: of pack(); scales, zeros: of quantised weights, else null;
 * bias: [out] or null; result: [rows, out]; arranged: space for rows * in floats, in rounded up to a multiple of 8;
 * group: inputs that share a scale, a multiple of 8. The reference is torch's linear(). */
void multiply(const elem *x, const uint32_t *packed, const float *scales, const float *zeros, const elem *bias,
              elem *result, float *arranged, int64_t rows, int64_t in, int64_t out, int64_t group) {
    if (rows == 0) return;
    const weights w = {packed, scales, zeros, steps_of(in), group / STEP};
    int64_t padded = w.steps * STEP, panels = panels_of(out);
    int64_t tiles = (rows + TILE - 1) / TILE, groups = (panels + GROUP - 1) / GROUP;
    int64_t blocks = (tiles + TILES_PER_ITEM - 1) / TILES_PER_ITEM;
    int widest = width_of((int)((rows + tiles - 1) / tiles));
#define FIRST_ROW(T) ((T) * rows / tiles) /* tiles of about equal height */
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiles; t++) {
            int64_t row = FIRST_ROW(t);
            arrange(x + row * in, arranged + row * padded, (int)(FIRST_ROW(t + 1) - row), in);
        }
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t group = 0; group < groups; group++)
            for (int64_t block = 0; block < blocks; block++) {
                int64_t end = (group + 1) * GROUP < panels ? (group + 1) * GROUP : panels;
                int64_t last = (block + 1) * TILES_PER_ITEM < tiles ? (block + 1) * TILES_PER_ITEM : tiles;
                int width;
                for (int64_t panel = group * GROUP; panel < end; panel += width) {
                    width = panel + widest > end ? 1 : widest;
                    for (int64_t t = block * TILES_PER_ITEM; t < last; t++) {
                        int64_t row = FIRST_ROW(t);
                        compute(arranged + row * padded, &w, panel, bias, result + row * out,
                                (int)(FIRST_ROW(t + 1) - row), width, out);
                    }
                }
            }
    }
#undef FIRST_ROW
}
