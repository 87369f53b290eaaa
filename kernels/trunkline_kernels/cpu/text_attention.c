/* Attention in both directions over whole texts, side by side without padding. */
#include "element.h"
#include "exponential.h"
#include "vectors.h"

#include <omp.h>
#include <string.h>

#define ROWS 6    /* queries that share each read of keys and values: their sums stay in registers */
#define VECTORS 2 /* of sums for each query */
#define AT_ONCE (VECTORS * LANES) /* keys that are scored at once, or values that are weighted */

/* Queries of one head of a text, which all read its keys and values. */
typedef struct {
    int64_t row, length; /* first row of the text, and its number of tokens */
    int64_t first, end;  /* positions of the queries */
} queries;

/* Whole texts, side by side without padding. */
typedef struct {
    const queries *items;
    int64_t num_items, dim;
    float *space; /* [threads, room] */
    int64_t room, threads;
} texts;

static inline int64_t up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

/* out = x @ y of ROWS rows of x and AT_ONCE columns of y, over the elements from `low` to `high` of a row of x. A row begins
 * `*_stride` elements after the one before. */
INLINE void multiply(const float *x, int64_t x_stride, const float *y, int64_t y_stride, float *out, int64_t out_stride,
                     int64_t low, int64_t high) {
    floats acc[ROWS][VECTORS] = {{{0}}};
    for (int64_t i = low; i < high; i++)
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int j = 0; j < VECTORS; j++)
                acc[r][j] += x[r * x_stride + i] * *(const floats *)(y + i * y_stride + j * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int j = 0; j < VECTORS; j++) *(floats *)(out + r * out_stride + j * LANES) = acc[r][j];
}

/* Turns the scores from `low` to `high` into weights; those outside `begin` to `end` become 0. Returns their sum; a NaN makes
 * it one. GCC does not vectorise its loops where it is inlined. */
__attribute__((noinline)) static float weigh(float *scores, int64_t low, int64_t begin, int64_t end, int64_t high) {
    float best = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : best)
    for (int64_t t = begin; t < end; t++) best = scores[t] > best ? scores[t] : best;
#pragma omp simd reduction(+ : sum)
    for (int64_t t = begin; t < end; t++) {
        scores[t] = fast_exp(scores[t] - best);
        sum += scores[t];
    }
    memset(scores + low, 0, (size_t)(begin - low) * sizeof(float));
    memset(scores + end, 0, (size_t)(high - end) * sizeof(float));
    return sum;
}

/* float32 that a thread needs for texts of at most `longest` tokens. */
int64_t text_attention_room(int64_t longest, int dim) {
    int64_t padded = up(longest, AT_ONCE), wide = up(dim, AT_ONCE);
    return (dim + wide + ROWS) * padded + ROWS * (dim + wide);
}

/* Every token of a text attends to all of its tokens, or to those at most `window` positions away; -1: to all. The
 * reference is full_attention.py. Other texts, and the number of threads, do not change the bits of a text's result.
 * q, k, v: [num_tokens, num_heads, dim], where a token begins `strides` elements after the one before
 * out: [num_tokens, num_heads, dim] */
void text_attention(const texts *of_texts, const elem *q, const elem *k, const elem *v, const int64_t *strides, elem *out,
                    int num_heads, int64_t window) {
    const int64_t q_stride = strides[0], k_stride = strides[1], v_stride = strides[2];
    const queries *items = of_texts->items;
    const int dim = (int)of_texts->dim;
    const float scale = 1.0f / sqrtf((float)dim);
    int64_t wide = up(dim, AT_ONCE);
#pragma omp parallel for schedule(dynamic) num_threads(of_texts->threads)
    for (int64_t item = 0; item < of_texts->num_items * num_heads; item++) {
        queries of = items[item / num_heads];
        int64_t head = item % num_heads * dim, length = of.length, padded = up(length, AT_ONCE);
        /* Keys are in panels of AT_ONCE tokens, [panel, dim, AT_ONCE], so that a panel lies in consecutive cache lines. */
        float *keys = of_texts->space + omp_get_thread_num() * of_texts->room, *values = keys + dim * padded;
        float *scores = values + padded * wide, *own = scores + ROWS * padded, *sums = own + ROWS * dim;
        int64_t oldest = 0, latest = length; /* what the queries see */
        if (window >= 0) {
            oldest = of.first > window ? (of.first - window) / AT_ONCE * AT_ONCE : 0;
            latest = of.end + window < length ? of.end + window : length;
        }
        for (int64_t t = oldest; t < up(latest, AT_ONCE); t++) {
            const elem *key = k + (of.row + t) * k_stride + head, *value = v + (of.row + t) * v_stride + head;
            float *to = keys + t / AT_ONCE * AT_ONCE * dim + t % AT_ONCE;
            for (int i = 0; i < dim; i++) to[i * AT_ONCE] = t < latest ? load(key[i]) : 0.0f;
            for (int i = 0; i < wide; i++) values[t * wide + i] = t < latest && i < dim ? load(value[i]) : 0.0f;
        }
        for (int64_t first = of.first; first < of.end; first += ROWS) {
            int64_t end = first + ROWS < of.end ? first + ROWS : of.end, low = 0, high = padded;
            if (window >= 0) {
                low = first > window ? (first - window) / AT_ONCE * AT_ONCE : 0;
                high = end + window < length ? up(end + window, AT_ONCE) : padded;
            }
            memset(own, 0, (size_t)ROWS * dim * sizeof(float));
            for (int64_t p = first; p < end; p++)
                for (int i = 0; i < dim; i++)
                    own[(p - first) * dim + i] = load(q[(of.row + p) * q_stride + head + i]) * scale;
            for (int64_t t = low; t < high; t += AT_ONCE)
                multiply(own, dim, keys + t * dim, AT_ONCE, scores + t, padded, 0, dim);
            float inverse[ROWS] = {0};
            for (int64_t p = first; p < end; p++) {
                int64_t begin = window >= 0 && p - window > low ? p - window : low;
                int64_t after = window >= 0 && p + window + 1 < length ? p + window + 1 : length;
                inverse[p - first] = 1.0f / weigh(scores + (p - first) * padded, low, begin, after, high);
            }
            for (int64_t d = 0; d < wide; d += AT_ONCE)
                multiply(scores, padded, values + d, wide, sums + d, wide, low, high);
            for (int64_t p = first; p < end; p++)
                for (int i = 0; i < dim; i++)
                    out[(of.row + p) * num_heads * dim + head + i] =
                        store(sums[(p - first) * wide + i] * inverse[p - first]);
        }
    }
}
