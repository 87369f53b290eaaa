/* Matrix products with weights that are rearranged once, when a model is loaded.
 *
 * The weights lie in panels of PANEL outputs, input by input, so that a product reads them once and in order. A tile of
 * the result, up to TILE rows by PANEL outputs, stays in registers while the inputs pass. A 32-bit word of an output
 * has one input of float32 weights, two of bfloat16, four of 8 bits or eight of 4 bits, the first one in its lowest
 * bits, so that shifts and masks widen them to float32. A CPU that multiplies pairs of bfloat16 takes words as they are.
 *
 * A build is for weights of its element type or, with -DWEIGHT_BITS=8 or 4, for quantised ones, which stand for
 * stored * scale + offset. Inputs share scale and offset in groups: the group's sum of stored values times inputs is
 * multiplied by the scale, and its sum of inputs by the offset. 8 bits have no offset. One tile of rows widens words in
 * registers; several tiles share a span of inputs that the first of them widened into memory. While tiles multiply by a
 * span, they prefetch the next one.
 *
 * If weights are quantised and inputs bfloat16, their products are integers of 32 bits, with pairs of 16 bits in a word
 * of 32, because CPUs multiply these in half the instructions. Each BLOCK inputs are multiples of a power of two, so
 * that the largest one fills 15 bits and a sign: those of at least 1/128 of it are exact, and smaller ones are rounded
 * by at most 1/128 of what the largest itself may have been rounded by. Beside one that is a thousand times as large,
 * they keep five or six bits.
 *
 * The additions of each element of the result have one order, whatever the numbers of rows and threads are. They run in
 * chains of some hundred inputs, of BLOCK if they are integers, whose sums are added: one long chain would round more.
 */
#include "element.h"
#include "linear.h"
#include "ranges.h"

#include <math.h>
#include <omp.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

/* Vector types of GCC and Clang: one source for SSE, AVX2, AVX-512 and NEON. Tests choose other sizes. */
#if defined(LANES)
#elif defined(__AVX512F__)
#define LANES 16
#define REGISTER "+v" /* a constraint of inline assembly */
#define TILE 12 /* rows: 24 sums, and what feeds them, fit 32 registers */
#elif defined(__AVX__)
#define LANES 8
#define REGISTER "+x"
#define TILE 6 /* rows: 12 sums in 16 registers */
#elif defined(__aarch64__)
#define LANES 4
#define REGISTER "+w"
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
typedef int16_t shorts __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t counts __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

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
#if WEIGHT_BITS && defined(BF16)
#define INTEGERS 1
#define PAIRS 0
#define PARTS (STEP / 2) /* factors of a word: pairs of its inputs, `PARTS` apart */
typedef uint32_t factor __attribute__((may_alias));
typedef ints totals;
#elif defined(BF16) && defined(__AVX512BF16__) && LANES == 16
#define INTEGERS 0
#define PAIRS 1 /* of bfloat16, which the CPU multiplies and adds in one instruction */
#define PARTS 1
typedef uint32_t factor __attribute__((may_alias));
typedef floats totals;
#else
#define INTEGERS 0
#define PAIRS 0
#define PARTS STEP
typedef float factor;
typedef floats totals;
#endif
#define BLOCK 64                                      /* integers that are multiples of one power of two */
#define SPAN (4096 / PANEL)                           /* inputs of a panel that widen to 16 KB: half of an L1 */
#define CHAIN_STEPS (WEIGHT_BITS ? SPAN / STEP : 256) /* steps of a span, and most of a chain of additions */
#define STEP_BYTES (PANEL * 4)                        /* of a panel */
#define LINE 64                                       /* bytes of a cache line */
#define HAS_OFFSETS (WEIGHT_BITS == 4)
#define ZERO 8.0f /* 4-bit weights without offsets stand for (stored - ZERO) * scale */

#define INLINE static inline __attribute__((always_inline))

/* A product that is rounded before it is added. GCC fuses the two in some functions, and not in others. */
INLINE floats rounded(floats product) {
#ifdef REGISTER
    __asm__("" : REGISTER(product));
#else
    __asm__("" : "+m"(product));
#endif
    return product;
}

static inline int64_t steps_of(int64_t in) { return (in + STEP - 1) / STEP; }
static inline int64_t panels_of(int64_t out) { return (out + PANEL - 1) / PANEL; }

/* Outputs of a panel. */
int panel_outputs(void) { return PANEL; }

/* A weight in panels. */
typedef struct {
    const uint32_t *panels; /* [panel][step][output] */
    const float *scales;    /* of quantised weights: [panel][group][output] */
    const float *offsets;   /* the same; may be null */
    int64_t steps;          /* of a panel */
    int64_t group;          /* steps that share a scale */
    int64_t groups;         /* of an output; 0 if not quantised */
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

/* One of two bfloat16 values of each word, as float32. */
INLINE floats half_of(words both, int part) {
    return part == 0 ? (floats)(both << 16) : (floats)(both & 0xFFFF0000u);
}

#if INTEGERS
/* LANES outputs of two of a word's inputs, as pairs of 16 bits. */
INLINE ints widened(const uint32_t *from, int part) {
#if WEIGHT_BITS == 8
    shorts word = *(const shorts *)from;
    return (ints)((part ? word : word << 8) >> 8);
#else
    counts word = *(const counts *)from >> (4 * part);
    if (part < 3) word &= 15;
    return (ints)word;
#endif
}

/* Adds the sums of the products of each two of 16 bits. */
INLINE ints added(ints sum, ints weight, uint32_t x) {
#if LANES == 16 && defined(__AVX512VNNI__)
    sum = (ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)weight, _mm512_set1_epi32((int)x));
#elif LANES == 16 && defined(__AVX512BW__)
    sum += (ints)_mm512_madd_epi16((__m512i)weight, _mm512_set1_epi32((int)x));
#elif LANES == 8 && defined(__AVX2__)
    sum += (ints)_mm256_madd_epi16((__m256i)weight, _mm256_set1_epi32((int)x));
#elif LANES == 4 && defined(__SSE2__)
    sum += (ints)_mm_madd_epi16((__m128i)weight, _mm_set1_epi32((int)x));
#else
    sum += (weight << 16 >> 16) * (int16_t)x + (weight >> 16) * (int16_t)(x >> 16);
#endif
#ifdef REGISTER
    __asm__("" : REGISTER(sum)); /* else GCC adds up the products first, and keeps them in memory */
#endif
    return sum;
}
#elif PAIRS
INLINE floats widened(const uint32_t *from, int part) { return *(const floats *)from; }

/* Adds the products of each two of 16 bits, first the one of the high bits. */
INLINE floats added(floats sum, floats weight, uint32_t x) {
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weight, (__m512bh)_mm512_set1_epi32((int)x));
}
#else
/* LANES outputs of one of a word's inputs, as float32. Those of quantised weights are too large by a power of two, and
 * arrange() multiplies the input by UNDO, which saves instructions. 8 bits stay at the top of a word, and 4 bits where
 * they are but for the last ones. */
INLINE floats widened(const uint32_t *from, int part) {
#if WEIGHT_BITS
    words word = *(const words *)from;
#endif
#if WEIGHT_BITS == 8
    word <<= 24 - 8 * part;
    if (part) word &= 0xFF000000u;
    return __builtin_convertvector((ints)word, floats);
#elif WEIGHT_BITS == 4
    if (part == 7) return __builtin_convertvector((ints)(word >> 28), floats);
    return __builtin_convertvector((ints)(word & 15u << (4 * part)), floats);
#elif defined(BF16)
    return half_of(*(const words *)from, part);
#else
    return *(const floats *)from;
#endif
}

INLINE floats added(floats sum, floats weight, float x) { return sum + weight * x; }
#endif

enum use { NOTHING, WRITE, READ }; /* what a tile does with the memory for widened weights */

/* A span of panels: steps from `begin` (a multiple of CHAIN_STEPS) to `last`. */
typedef struct {
    const weights *w;
    int64_t panel, begin, last; /* `panel` is the first one */
    const char *next;           /* what a tile is to have prefetched of the first panel: `ahead` bytes for each step */
    int64_t ahead;
} span;

/* Adds the products of a tile of `rows` rows and `width` panels over a span.  x: of arrange(); wide: the widened
 * weights of a panel, [input or pair][output]; sums: [rows][width * PANEL] */
INLINE void multiply_tile(const factor *restrict x, const span *of, factor *restrict wide, float *restrict sums,
                          const int rows, const int width, const enum use use) {
    const weights *w = of->w;
    const char *next = of->next;
    const uint32_t *panels = w->panels + of->panel * w->steps * PANEL;
    const int64_t panel = of->panel, first = of->begin, last = of->last, ahead = of->ahead, size = w->steps * PANEL;
    const float *powers = (const float *)x + w->steps * PARTS * rows;
    const float *x_sums = (const float *)x + w->steps * STEP * rows;
    const int64_t chain = INTEGERS ? BLOCK / STEP : CHAIN_STEPS;
    for (int64_t begin = first, end; begin < last; begin = end) {
        int64_t group = WEIGHT_BITS ? begin / w->group : 0, group_end = WEIGHT_BITS ? (group + 1) * w->group : last;
        end = (begin / chain + 1) * chain;
        if (group_end < end) end = group_end;
        if (last < end) end = last;
        totals acc[TILE][8];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 2 * width; v++) acc[r][v] = (totals){0};
        for (int64_t s = begin; s < end; s++, next += ahead) {
#pragma GCC unroll 8
            for (int part = 0; part < PARTS; part++) {
                if (width > 1) __asm__("" : : : "memory"); /* else GCC keeps words in registers, and sums in memory */
                totals weight[8];
#pragma GCC unroll 8
                for (int v = 0; v < 2 * width; v++) {
                    const uint32_t *from = panels + v / 2 * size + s * PANEL + v % 2 * LANES;
                    totals *at = (totals *)(wide + ((s - first) * PARTS + part) * PANEL + v * LANES);
                    weight[v] = use == READ ? *at : widened(from, part);
#ifdef REGISTER
                    if (use == READ) __asm__("" : REGISTER(weight[v])); /* else GCC reads it once for each row */
#endif
                    if (use == WRITE) *at = weight[v];
                }
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                    for (int v = 0; v < 2 * width; v++)
                        acc[r][v] = added(acc[r][v], weight[v], x[(s * PARTS + part) * rows + r]);
            }
            /* One row of weights that are not widened keeps up with memory, and prefetching slows it down. */
            for (int v = 0; v < width && (WEIGHT_BITS || rows > 1); v++)
                for (int byte = 0; byte < STEP_BYTES; byte += LINE)
                    __builtin_prefetch(next + v * size * 4 + byte, 0, 2);
        }
        for (int v = 0; v < 2 * width; v++) {
            floats scale = {0}, offset = {0};
            int64_t at = ((panel + v / 2) * w->groups + group) * PANEL + v % 2 * LANES;
            if (WEIGHT_BITS) scale = *(const floats *)(w->scales + at);
            if (HAS_OFFSETS) offset = scale * -ZERO;
            if (HAS_OFFSETS && w->offsets) offset = *(const floats *)(w->offsets + at);
            for (int r = 0; r < rows; r++) {
                floats *sum = (floats *)(sums + (r * 2 * width + v) * LANES);
                floats total = __builtin_convertvector(acc[r][v], floats);
                if (INTEGERS) total *= powers[begin * STEP / BLOCK * rows + r];
                if (WEIGHT_BITS) total = rounded(total * scale);
                *sum += total;
                if (HAS_OFFSETS && end == group_end) *sum += rounded(offset * x_sums[group * rows + r]);
            }
        }
    }
}

/* Tiles for which multiply_tile is compiled, with constants, so that all sums stay in registers. Few rows take several
 * panels at once: one panel would be too few chains of additions to keep the machine busy. */
#if WEIGHT_BITS
#define HIGH(X, R) X(R, 1, NOTHING) X(R, 1, WRITE) X(R, 1, READ)
#else
#define HIGH(X, R) X(R, 1, NOTHING)
#endif
#if TILE == 12
#define TILES(X) \
    X(1, 4, NOTHING) X(2, 2, NOTHING) X(3, 2, NOTHING) X(4, 2, NOTHING) X(5, 2, NOTHING) X(6, 2, NOTHING) \
    X(1, 1, NOTHING) X(2, 1, NOTHING) X(3, 1, NOTHING) X(4, 1, NOTHING) X(5, 1, NOTHING) \
    HIGH(X, 6) HIGH(X, 7) HIGH(X, 8) HIGH(X, 9) HIGH(X, 10) HIGH(X, 11) HIGH(X, 12)
#else
#define TILES(X) \
    X(1, 4, NOTHING) X(2, 2, NOTHING) X(1, 1, NOTHING) X(2, 1, NOTHING) \
    HIGH(X, 3) HIGH(X, 4) HIGH(X, 5) HIGH(X, 6)
#endif

/* A function for each: in one, GCC runs out of registers. */
#define FUNCTION(R, W, USE) \
    static __attribute__((noinline)) void tile_##R##_##W##_##USE( \
        const factor *x, const span *of, factor *wide, float *sums) { \
        multiply_tile(x, of, wide, sums, R, W, USE); }
TILES(FUNCTION)

static void tile(const factor *x, const span *of, factor *wide, float *sums, int rows, int width, enum use use) {
#define CASE(R, W, USE) \
    case ((USE) * 16 + (R)) * 8 + (W): tile_##R##_##W##_##USE(x, of, wide, sums); return;
    switch ((use * 16 + rows) * 8 + width) { TILES(CASE) }
}

/* Panels that a tile of so many rows takes at once. */
static inline int width_of(int rows) {
#if TILE == 12
    return rows == 1 ? 4 : rows <= 6 ? 2 : 1;
#else
    return rows == 1 ? 4 : rows == 2 ? 2 : 1; /* the sums of three rows and two panels would not fit */
#endif
}

#if INTEGERS
/* Turns a row into pairs of integers, and adds up its groups. powers: of each block; the rest: as in arrange() */
static void arrange_row(const elem *row, const weights *w, factor *pairs, float *powers, float *x_sums, int rows,
                        int64_t in) {
    for (int64_t group = 0; HAS_OFFSETS && group < w->groups; group++) x_sums[group * rows] = 0.0f;
    for (int64_t begin = 0; begin < w->steps * STEP; begin += BLOCK) {
        elem x[BLOCK] = {0}, peak = 0;
        int32_t whole[BLOCK];
        memcpy(x, row + begin, sizeof(elem) * (size_t)(in - begin < BLOCK ? in - begin : BLOCK));
        for (int i = 0; i < BLOCK; i++) {
            elem size = x[i] & 0x7FFF;
            peak = size > peak ? size : peak;
        }
        int exponent = peak >> 7 > 15 ? peak >> 7 : 15; /* so that the power and its inverse are normal numbers */
        float power = load((elem)((exponent - 14) << 7)), inverse = load((elem)((268 - exponent) << 7));
        if (exponent == 255) { /* a value is not finite, so the whole row of results is NaN */
            power = NAN;
            memset(x, 0, sizeof(x));
        }
        for (int i = 0; i < BLOCK; i++) whole[i] = (int32_t)nearbyintf(load(x[i]) * inverse);
        powers[begin / BLOCK * rows] = power;
        for (int i = 0; i < BLOCK && begin + i < w->steps * STEP; i += STEP)
            for (int part = 0; part < PARTS; part++)
                pairs[((begin + i) / 2 + part) * rows] =
                    (uint16_t)whole[i + part] | (uint32_t)whole[i + part + PARTS] << 16;
        for (int i = 0; HAS_OFFSETS && i < BLOCK && begin + i < in; i += STEP) {
            int32_t sum = 0;
            for (int j = 0; j < STEP; j++) sum += whole[i + j];
            x_sums[(begin + i) / STEP / w->group * rows] += power * (float)sum;
        }
    }
}
#elif PAIRS
static void arrange_row(const elem *row, const weights *w, factor *pairs, float *powers, float *x_sums, int rows,
                        int64_t in) {
    for (int64_t i = 0; i < in; i += 2) pairs[i / 2 * rows] = row[i] | (i + 1 < in ? (uint32_t)row[i + 1] << 16 : 0);
}
#else
/* By which inputs of a word are multiplied, for widened(). */
#if WEIGHT_BITS == 8
static const float UNDO[STEP] = {0x1p-24f, 0x1p-24f, 0x1p-24f, 0x1p-24f};
#elif WEIGHT_BITS == 4
static const float UNDO[STEP] = {1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1.0f};
#else
static const float UNDO[STEP] = {[0 ... STEP - 1] = 1.0f};
#endif

static void arrange_row(const elem *row, const weights *w, float *arranged, float *powers, float *x_sums, int rows,
                        int64_t in) {
    for (int64_t i = 0; i < w->steps * STEP; i++) arranged[i * rows] = i < in ? load(row[i]) * UNDO[i % STEP] : 0.0f;
    for (int64_t group = 0; HAS_OFFSETS && group < w->groups; group++) {
        float sums[8] = {0}; /* in several chains, which the compiler turns into vectors */
        for (int64_t i = group * w->group * STEP; i < (group + 1) * w->group * STEP; i += 8)
            for (int j = 0; j < 8; j++) sums[j] += load(row[i + j]);
        x_sums[group * rows] =
            ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    }
}
#endif

/* Puts rows of x in the order of multiply_tile: [steps][PARTS][rows]. If these are integers, the powers of two of their
 * blocks follow, [blocks][rows]. The sums of groups, [groups][rows], come after `steps * STEP * rows` values. The rows
 * are those from `first` on or, if `sources` is not null, those that it names from there on. */
static void arrange(const elem *x, const int64_t *sources, int64_t first, const weights *w, float *arranged, int rows,
                    int64_t in) {
    float *powers = arranged + w->steps * PARTS * rows, *x_sums = arranged + w->steps * STEP * rows;
    for (int r = 0; r < rows; r++) {
        const elem *row = x + (sources ? sources[first + r] : first + r) * in;
        arrange_row(row, w, (factor *)arranged + r, powers + r, x_sums + r, rows, in);
    }
}

/* A product with one weight. */
typedef struct {
    weights w;
    const elem *bias;
    int64_t begin, rows, tiles, out; /* the first of its rows among those of the call, and their number */
} product;

/* What the products of a call have in common. */
typedef struct {
    float *arranged; /* of each tile, what arrange() makes */
    elem *result;
} memory;

/* Tiles have about equal heights. */
static inline int64_t first_row(const product *p, int64_t tile) { return tile * p->rows / p->tiles; }
static inline float *arranged_rows(const memory *m, const product *p, int64_t row) {
    return m->arranged + (p->begin + row) * (p->w.steps * STEP + p->w.groups);
}

/* The outputs of one tile and up to four panels, or of up to TILES_PER_ITEM tiles and one panel.  following: the first
 * panel that this thread takes next, or `panel` if that is not known */
static void compute(const memory *m, const product *p, int64_t first_tile, int64_t last_tile, int64_t panel, int width,
                    int64_t following) {
    float sums[TILES_PER_ITEM * TILE * PANEL];
    factor wide[SPAN * PANEL];
    const weights *w = &p->w;
    int64_t row = first_row(p, first_tile), rows = first_row(p, last_tile) - row;
    int is_shared = WEIGHT_BITS && last_tile - first_tile > 1;
    memset(sums, 0, (size_t)rows * width * PANEL * sizeof(float));
    if (w->groups) { /* too few for the CPU to foresee */
        const char *scales = (const char *)(w->scales + panel * w->groups * PANEL);
        for (int64_t byte = 0; byte < width * w->groups * PANEL * 4; byte += LINE) __builtin_prefetch(scales + byte);
    }
    span of = {.w = w, .panel = panel, .ahead = STEP_BYTES / (last_tile - first_tile)};
    int64_t length = CHAIN_STEPS;
    if (INTEGERS) { /* equal spans, so that the last one prefetches all of the next panel's first one */
        int64_t spans = (w->steps + CHAIN_STEPS - 1) / CHAIN_STEPS, block = BLOCK / STEP;
        length = ((w->steps + spans - 1) / spans + block - 1) / block * block;
    }
    for (of.begin = 0; of.begin < w->steps; of.begin = of.last) {
        of.last = of.begin + length < w->steps ? of.begin + length : w->steps;
        /* Each tile prefetches its share of the next span, so that memory is read all the time. */
        int64_t next = of.last < w->steps ? panel * w->steps + of.last : following * w->steps;
        of.next = (const char *)w->panels + next * STEP_BYTES;
        for (int64_t t = first_tile; t < last_tile; t++) {
            int64_t at = first_row(p, t), height = first_row(p, t + 1) - at;
            const factor *x = (const factor *)arranged_rows(m, p, at);
            enum use use = !is_shared ? NOTHING : t == first_tile ? WRITE : READ;
            tile(x, &of, wide, sums + (at - row) * width * PANEL, (int)height, width, use);
            of.next += of.ahead * (of.last - of.begin);
        }
    }
    int64_t first = panel * PANEL;
    int count = p->out - first < width * PANEL ? (int)(p->out - first) : width * PANEL;
    for (int64_t r = 0; r < rows; r++) {
        const float *sum = sums + r * width * PANEL;
        elem *to = m->result + (p->begin + row + r) * p->out + first;
        if (p->bias)
            for (int j = 0; j < count; j++) to[j] = store(sum[j] + load(p->bias[first + j]));
        else
            for (int j = 0; j < count; j++) to[j] = store(sum[j]);
    }
}

#define GROUP 4   /* panels of an item of parallel work */
#define SHARES 32 /* in which a thread takes its items, so that a slow one leaves some to others */

/* Whether this build's CPU has instructions for products of bfloat16. */
int has_bfloat16_products(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

/* The same in tiles (AMX), which are several times as fast. */
int has_bfloat16_tiles(void) {
#ifdef __AMX_BF16__
    return 1;
#else
    return 0;
#endif
}

/* Whether this build has vectors of 512 bits. */
int has_wide_vectors(void) { return LANES == 16; }

/* Computes products of one size side by side.  x: [rows, in]; sources: as in arrange() */
static void multiply_products(const elem *x, const int64_t *sources, const product *products, int64_t count,
                              const memory *m, int64_t in) {
    int64_t tiles[count + 1], blocks[count + 1]; /* the first tile, and block of tiles, of each product */
    tiles[0] = blocks[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        tiles[i + 1] = tiles[i] + products[i].tiles;
        blocks[i + 1] = blocks[i] + (products[i].tiles + TILES_PER_ITEM - 1) / TILES_PER_ITEM;
    }
    int64_t panels = panels_of(products->out), items = (panels + GROUP - 1) / GROUP, all = blocks[count] * items;
    /* A thread takes several items in a row, whose panels follow each other in memory. */
    int64_t at_once = all / (omp_get_max_threads() * SHARES) + 1;
#pragma omp parallel for schedule(static) if (tiles[count] > 1)
    for (int64_t i = 0; i < tiles[count]; i++) {
        int64_t which = range_of(tiles, count, i), tile = i - tiles[which];
        const product *p = products + which;
        int64_t row = first_row(p, tile), height = first_row(p, tile + 1) - row;
        arrange(x, sources, p->begin + row, &p->w, arranged_rows(m, p, row), (int)height, in);
    }
#pragma omp parallel for schedule(dynamic, at_once)
    for (int64_t i = 0; i < all; i++) {
        int64_t which = range_of(blocks, count, i / items);
        const product *p = products + which;
        /* All blocks of a product take the same panels before the next ones. */
        int64_t of_product = blocks[which + 1] - blocks[which], place = i - blocks[which] * items;
        int64_t first = place % of_product * TILES_PER_ITEM;
        int64_t last = first + TILES_PER_ITEM < p->tiles ? first + TILES_PER_ITEM : p->tiles;
        int64_t item = place / of_product, end = (item + 1) * GROUP < panels ? (item + 1) * GROUP : panels;
        int widest = width_of((int)((p->rows + p->tiles - 1) / p->tiles)), width;
        /* Threads probably take turns. */
        int64_t later = item + ((i + 1) % at_once > 0 ? 1 : 1 + at_once * (omp_get_num_threads() - 1));
        int is_followed = place % of_product == of_product - 1 && later < items;
        for (int64_t panel = item * GROUP; panel < end; panel += width) {
            width = last - first > 1 || panel + widest > end ? 1 : widest;
            int64_t next = panel + width < end ? panel + width : is_followed ? later * GROUP : panel;
            compute(m, p, first, last, panel, width, next);
        }
    }
}

static inline weights weights_at(const uint32_t *packed, const float *scales, const float *offsets, int64_t in,
                                 int64_t group) {
    return (weights){packed, scales, offsets, steps_of(in), group / STEP, WEIGHT_BITS ? (in + group - 1) / group : 0};
}

/* A linear's `multiply`. The reference is torch's linear(). */
void multiply(const linear *of, const elem *x, elem *result, float *arranged, int64_t rows) {
    if (rows == 0) return;
    weights w = weights_at(of->packed, of->scales, of->offsets, of->in, of->group);
    const product p = {w, of->bias, 0, rows, (rows + TILE - 1) / TILE, of->out};
    const memory m = {arranged, result};
    multiply_products(x, NULL, &p, 1, &m, of->in);
}

/* The `multiply` of grouped weights. */
void multiply_grouped(const grouped *of, const elem *x, const int64_t *sources, const int64_t *starts, elem *result,
                      float *arranged) {
    product products[of->count]; /* of at most 4,096 experts: 360 KB of the stack */
    int64_t used = 0;
    for (int64_t i = 0; i < of->count; i++) {
        int64_t rows = starts[i + 1] - starts[i];
        const float *scales = of->scales ? of->scales[i] : NULL, *offsets = of->offsets ? of->offsets[i] : NULL;
        weights w = weights_at(of->packed[i], scales, offsets, of->in, of->group);
        if (rows > 0) products[used++] = (product){w, NULL, starts[i], rows, (rows + TILE - 1) / TILE, of->out};
    }
    const memory m = {arranged, result};
    if (used > 0) multiply_products(x, sources, products, used, &m, of->in);
}
