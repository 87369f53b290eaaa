/* Kernels for workers on a CPU: attention over paged keys and values, and the element-wise operations of a decoder layer.
 *
 * Compiled once per element type: bfloat16 with -DBF16, else float32; see library.py. The PyTorch references in the
 * parent folder define the results, and tests compare them. Sums are in float32 for both types.
 *
 * Most loops are plain C that the compiler vectorises for the machine. Attention has vectors of its own, and the dot product
 * of bfloat16 an instruction of AVX-512 that compilers do not generate.
 */
#include "element.h"
#include "exponential.h"
#include "linear.h"
#include "ranges.h"
#include "vectors.h"

#include <math.h>
#include <omp.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define MAX_HEAD_DIM 256
#define SEGMENT 16     /* most keys scored at once; a segment never crosses a block */
#define ROWS_AT_ONCE 4 /* queries of one sequence that share each read of keys and values */
#define CACHE_LINE 64  /* bytes */
#define HEADS 3        /* of a query whose sums over values stay in registers, with VECTORS of each */
#define VECTORS 4
_Static_assert(SEGMENT % LANES == 0, "a segment's scores fill vectors");

/* Queries and keys as scores_of() takes them: bfloat16 is widened before, once for all products, unless AVX-512 has an
 * instruction for it. */
#if defined(BF16) && defined(__AVX512BF16__) && LANES == 16
typedef elem factor;
#define AT_ONCE 32 /* elements of a row that are multiplied at once */
INLINE floats multiply_add(const factor *q, const factor *k, floats sum) {
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(q), (__m512bh)_mm512_loadu_si512(k));
}
INLINE factor as_factor(elem x) { return x; }
#else
typedef float factor;
#define AT_ONCE LANES
INLINE floats multiply_add(const factor *q, const factor *k, floats sum) {
    return sum + *(const floats *)q * *(const floats *)k;
}
INLINE factor as_factor(elem x) { return load(x); }
#endif
#define MAX_WIDTH (MAX_HEAD_DIM + AT_ONCE) /* of a padded row */

static inline int padded(int dim) { return (dim + AT_ONCE - 1) / AT_ONCE * AT_ONCE; }

/* Copies the first `dim` elements of each of `count` rows, and pads them with zeros. to: [count, padded(dim)] */
static inline void copy_rows(const elem *from, int64_t stride, factor *to, int count, int dim) {
    int width = padded(dim);
    for (int t = 0; t < count; t++) {
#pragma omp simd
        for (int i = 0; i < dim; i++) to[t * width + i] = as_factor(from[t * stride + i]);
        for (int i = dim; i < width; i++) to[t * width + i] = 0;
    }
}

/* Fetches a row of `dim` elements, which will be read soon, into the cache. */
static inline void prefetch(const elem *row, int dim) {
    for (int i = 0; i < dim; i += CACHE_LINE / (int)sizeof(elem)) __builtin_prefetch(row + i);
}

/* The products of a query with `count` keys, up to SEGMENT. scores: [SEGMENT]; those of absent keys are arbitrary */
INLINE void scores_of(const factor *q, const factor *k, int64_t stride, int count, int width, float *scores) {
    for (int first = 0; first < SEGMENT; first += LANES) {
        floats sums[LANES] = {{0}};
        const factor *keys[LANES];
#pragma GCC unroll 16
        for (int t = 0; t < LANES; t++) keys[t] = k + (first + t < count ? first + t : 0) * stride;
        for (int i = 0; i < width; i += AT_ONCE)
#pragma GCC unroll 16
            for (int t = 0; t < LANES; t++) sums[t] = multiply_add(q + i, keys[t] + i, sums[t]);
        *(floats *)(scores + first) = sums_of_lanes(sums);
    }
}

/* LANES values as float32. */
INLINE floats loaded(const elem *x) {
#ifdef BF16
    typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    typedef uint32_t words __attribute__((vector_size(4 * LANES)));
    return (floats)(__builtin_convertvector(*(const halves *)x, words) << 16);
#else
    return *(const floats *)x;
#endif
}

/* The values of a segment. */
typedef struct {
    const elem *first; /* of its first key */
    int64_t stride;    /* from key to key */
    int low, high;     /* keys that the queries see */
    /* What the next segment begins with, keys and values: too few for the CPU to foresee them. Fetched key by key, they do
     * not hold up the loads of this segment. */
    const elem *next[2];
    int64_t next_stride;
} segment;

/* A value that no query sees is not read. One that a query sees counts even if its weight is 0: infinity makes a NaN.
 * Adds the values from element `at` on to the sums of `heads` heads, `vectors` vectors of each, after the sums shrink.
 * weights: [heads][SEGMENT]; sums: [heads][MAX_WIDTH] */
INLINE void add_values(const segment *of, int at, const float (*weights)[SEGMENT], const float *shrink, float *sums,
                       const int heads, const int vectors) {
    floats acc[HEADS][VECTORS];
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < vectors; i++) acc[h][i] = *(floats *)(sums + h * MAX_WIDTH + at + i * LANES) * shrink[h];
    for (int t = of->low; t < of->high; t++) {
        for (int part = 0; part < 2; part++) prefetch(of->next[part] + t * of->next_stride + at, vectors * LANES);
        floats value[VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) value[i] = loaded(of->first + t * of->stride + at + i * LANES);
#pragma GCC unroll 3
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++) acc[h][i] += weights[h][t] * value[i];
    }
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < vectors; i++) *(floats *)(sums + h * MAX_WIDTH + at + i * LANES) = acc[h][i];
}

/* The same with constant sizes, so that all sums stay in registers. */
static void add_some_values(const segment *of, int at, const float (*weights)[SEGMENT], const float *shrink, float *sums,
                            int heads, int vectors) {
#define CASE(H, V) \
    case (H) * 8 + (V): add_values(of, at, weights, shrink, sums, H, V); return;
    switch (heads * 8 + vectors) {
        CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(1, 4)
        CASE(2, 1) CASE(2, 2) CASE(2, 3) CASE(2, 4)
        CASE(3, 1) CASE(3, 2) CASE(3, 3) CASE(3, 4)
    }
#undef CASE
}

/* Turns scores into weights, of the keys from `low` to `high`, and the others into zero. Returns by what earlier sums
 * shrink. */
INLINE float weigh(float *scores, int low, int high, float scale, float *peak, float *total) {
    float best = *peak, sum = 0.0f;
#pragma omp simd
    for (int t = 0; t < SEGMENT; t++) scores[t] = t >= low && t < high ? scores[t] * scale : -INFINITY;
#pragma omp simd reduction(max : best)
    for (int t = 0; t < SEGMENT; t++) best = scores[t] > best ? scores[t] : best;
    float shrink = *peak == -INFINITY ? 0.0f : fast_exp(*peak - best);
#pragma omp simd
    for (int t = 0; t < SEGMENT; t++) {
        float weight = fast_exp(scores[t] - best);
        scores[t] = t >= low && t < high ? weight : 0.0f;
    }
#pragma omp simd reduction(+ : sum)
    for (int t = 0; t < SEGMENT; t++) sum += scores[t];
    *total = *total * shrink + sum;
    *peak = best;
    return shrink;
}

/* Attention of `rows` queries of one sequence, at consecutive positions from `first`, for `group` query heads of a KV head.
 * Softmax is computed online, segment by segment (Milakov and Gimelshein, 2018). */
static void attend(const elem *q, const elem *keys, const elem *values, const int64_t *table, elem *out, int rows,
                   int64_t first, int64_t window, int group, int dim, int64_t row_stride, int64_t token_stride,
                   int64_t block_stride, int block_size, float scale) {
    int heads = rows * group, width = padded(dim), is_copied = sizeof(factor) != sizeof(elem) || width != dim;
    float sums[heads * MAX_WIDTH], peak[heads], total[heads];
    factor queries[heads * width], copied[is_copied ? SEGMENT * width : 1];
    elem copied_values[SEGMENT * MAX_WIDTH];
    for (int row = 0; row < rows; row++) copy_rows(q + row * row_stride, dim, queries + row * group * width, group, dim);
    for (int h = 0; h < heads; h++) {
        peak[h] = -INFINITY;
        total[h] = 0.0f;
        memset(sums + h * MAX_WIDTH, 0, MAX_WIDTH * sizeof(float));
    }
    int64_t end = first + rows; /* keys before this position are visible to at least one query */
    int64_t begin = window > 0 && first - window + 1 > 0 ? first - window + 1 : 0;
    begin -= begin % block_size % SEGMENT; /* so that a query's segments are the same whichever rows are beside it */
    for (int64_t at = begin; at < end;) {
        int64_t offset = at % block_size;
        int count = block_size - offset < SEGMENT ? (int)(block_size - offset) : SEGMENT;
        if (count > end - at) count = (int)(end - at);
        int64_t place = table[at / block_size] * block_stride + offset * token_stride;
        const factor *k = is_copied ? copied : (const factor *)(keys + place);
        int64_t next = at + count < end ? at + count : at;
        int64_t ahead = table[next / block_size] * block_stride + next % block_size * token_stride;
        segment of = {.first = values + place, .stride = token_stride, .next = {keys + ahead, values + ahead},
                      .next_stride = token_stride};
        if (is_copied) copy_rows(keys + place, token_stride, copied, count, dim);
        if (dim % LANES) { /* the last vector would reach beyond the values */
            for (int t = 0; t < count; t++)
                memcpy(copied_values + t * MAX_WIDTH, of.first + t * token_stride, dim * sizeof(elem));
            of.first = copied_values;
            of.stride = MAX_WIDTH;
        }
        for (int row = 0; row < rows; row++) {
            int64_t position = first + row;
            int64_t oldest = window > 0 ? position - window + 1 : 0;
            of.low = oldest > at ? (int)(oldest - at) : 0;
            of.high = position - at + 1 < count ? (int)(position - at + 1) : count;
            if (of.low >= of.high) continue;
            for (int g = 0, some; g < group; g += some) {
                some = group - g < HEADS ? group - g : HEADS;
                int h = row * group + g;
                float weights[HEADS][SEGMENT], shrink[HEADS];
                for (int j = 0; j < some; j++) {
                    scores_of(queries + (h + j) * width, k, is_copied ? width : token_stride, count, width, weights[j]);
                    shrink[j] = weigh(weights[j], of.low, of.high, scale, &peak[h + j], &total[h + j]);
                }
                for (int i = 0; i < dim; i += VECTORS * LANES) {
                    int vectors = (dim - i + LANES - 1) / LANES;
                    add_some_values(&of, i, weights, shrink, sums + h * MAX_WIDTH, some,
                                    vectors < VECTORS ? vectors : VECTORS);
                }
            }
        }
        at += count;
    }
    for (int row = 0; row < rows; row++)
        for (int g = 0; g < group; g++) {
            int h = row * group + g;
            float inverse = 1.0f / total[h];
            elem *o = out + row * row_stride + g * dim;
#pragma omp simd
            for (int i = 0; i < dim; i++) o[i] = store(sums[h * MAX_WIDTH + i] * inverse);
        }
}

/* Causal attention of all new tokens; the reference is paged_attention.py.
 * q, out: [num_tokens, num_heads, dim]; keys, values: [blocks, block_size, num_kv_heads, dim], block_stride elements from
 * one block to the next; tables: [num_seqs] pointers to block tables; starts: [num_seqs + 1] first row of each sequence;
 * contexts: [num_seqs] KV tokens, including new ones; window: last positions that a query sees, including its own; 0: all.
 */
void attention(const elem *q, const elem *keys, const elem *values, const int64_t *const *tables, const int64_t *starts,
               const int64_t *contexts, elem *out, int64_t block_stride, int64_t num_seqs, int num_heads,
               int num_kv_heads, int dim, int block_size, int64_t window, float scale) {
    int64_t group = num_heads / num_kv_heads, rows = starts[num_seqs], threads = omp_get_max_threads();
    int64_t row_stride = (int64_t)num_heads * dim, token_stride = (int64_t)num_kv_heads * dim;
    /* A row's query heads are in equal spans, each an item of parallel work: those of a KV head or, if these are too few
     * for the threads, one span for each thread. The result of a head is the same in all spans. */
    int64_t spans = rows * num_kv_heads < 2 * threads ? threads : num_kv_heads;
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < rows * spans; i++) {
        int64_t row = rows - 1 - i / spans, s = range_of(starts, num_seqs, row), left = starts[s + 1] - row;
        if ((row - starts[s]) % ROWS_AT_ONCE) continue; /* the first row of each ROWS_AT_ONCE takes all of them */
        int64_t end = num_heads * (i % spans + 1) / spans, next;
        for (int64_t head = num_heads * (i % spans) / spans; head < end; head = next) {
            int64_t offset = row * row_stride + head * dim, of_keys = head / group * dim;
            next = (head / group + 1) * group < end ? (head / group + 1) * group : end;
            attend(q + offset, keys + of_keys, values + of_keys, tables[s], out + offset,
                   left < ROWS_AT_ONCE ? (int)left : ROWS_AT_ONCE, contexts[s] - left, window, (int)(next - head), dim,
                   row_stride, token_stride, block_stride, block_size, scale);
        }
    }
}

static inline float inverse_rms(const float *x, int dim, float eps) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < dim; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / dim + eps);
}

/* residual += x unless x is null; out = rms_norm(residual) * weight. The reference is rms_norm.py.
 * x, residual, out: [num_rows, dim], where a row begins `stride` elements after the one before; weight: [dim]. out may be
 * residual. */
void add_rms_norm(const elem *x, elem *residual, const elem *weight, elem *out, int64_t num_rows, int64_t stride, int dim,
                  float eps) {
#pragma omp parallel for schedule(static) if (num_rows > 8)
    for (int64_t row = 0; row < num_rows; row++) {
        float wide[dim];
        elem *r = residual + row * stride, *o = out + row * stride;
        if (x) {
            const elem *added = x + row * stride;
#pragma omp simd
            for (int i = 0; i < dim; i++) {
                r[i] = store(load(r[i]) + load(added[i]));
                wide[i] = load(r[i]);
            }
        } else {
#pragma omp simd
            for (int i = 0; i < dim; i++) wide[i] = load(r[i]);
        }
        float scale = inverse_rms(wide, dim, eps);
#pragma omp simd
        for (int i = 0; i < dim; i++) o[i] = store(load(store(wide[i] * scale)) * load(weight[i]));
    }
}

/* Normalises one head unless `norm` is null, then rotates its first pairs (half-split layout). */
static inline void rotate(const elem *restrict x, const elem *norm, const float *cos, const float *sin,
                          elem *restrict out, int dim, int pairs, float eps) {
    float wide[MAX_HEAD_DIM];
#pragma omp simd
    for (int i = 0; i < dim; i++) wide[i] = load(x[i]);
    if (norm) {
        float scale = inverse_rms(wide, dim, eps);
#pragma omp simd
        for (int i = 0; i < dim; i++) wide[i] = load(store(load(store(wide[i] * scale)) * load(norm[i])));
    }
#pragma omp simd
    for (int i = 0; i < pairs; i++) {
        float a = wide[i], b = wide[i + pairs];
        out[i] = store(a * cos[i] - b * sin[i]);
        out[i + pairs] = store(b * cos[i] + a * sin[i]);
    }
#pragma omp simd
    for (int i = 2 * pairs; i < dim; i++) out[i] = store(wide[i]);
}

/* Writes rotated queries to q, and rotated keys, and values, to the pool, in the slots of the block tables. The references
 * are rms_norm.py, rotary.py and kv_write.py. keys, values, block_stride: as in attention();
 * qkv: [num_tokens, num_heads + 2 * num_kv_heads, dim]; q: [num_tokens, num_heads, dim]; cos, sin: [positions, pairs];
 * query_norm, key_norm: [dim] or null */
void rotate_and_write(const elem *qkv, elem *q, elem *keys, elem *values, const int64_t *const *tables,
                      const int64_t *starts, const int64_t *contexts, const float *cos, const float *sin,
                      const elem *query_norm, const elem *key_norm, int64_t block_stride, int64_t num_seqs,
                      int num_heads, int num_kv_heads, int dim, int pairs, int block_size, float eps) {
    int64_t width = (int64_t)(num_heads + 2 * num_kv_heads) * dim, token_stride = (int64_t)num_kv_heads * dim;
#pragma omp parallel for schedule(dynamic, 4) if (num_seqs > 4 || starts[num_seqs] > 16)
    for (int64_t s = 0; s < num_seqs; s++)
        for (int64_t row = starts[s]; row < starts[s + 1]; row++) {
            int64_t position = contexts[s] - (starts[s + 1] - row);
            int64_t place = tables[s][position / block_size] * block_stride + position % block_size * token_stride;
            const float *c = cos + position * pairs, *sn = sin + position * pairs;
            const elem *from = qkv + row * width;
            for (int h = 0; h < num_heads; h++, from += dim)
                rotate(from, query_norm, c, sn, q + (row * num_heads + h) * dim, dim, pairs, eps);
            for (int h = 0; h < num_kv_heads; h++, from += dim)
                rotate(from, key_norm, c, sn, keys + place + h * dim, dim, pairs, eps);
            memcpy(values + place, from, (size_t)token_stride * sizeof(elem));
        }
}

/* out = silu(gate) * up; the reference is silu_and_mul.py.
 * gate_up: [num_rows, 2 * dim], gate first; out: [num_rows, dim] */
void silu_and_mul(const elem *gate_up, elem *out, int64_t num_rows, int dim) {
#pragma omp parallel for schedule(static) if (num_rows > 8)
    for (int64_t row = 0; row < num_rows; row++) {
        const elem *gate = gate_up + row * 2 * dim, *up = gate + dim;
        elem *o = out + row * dim;
#pragma omp simd
        for (int i = 0; i < dim; i++) {
            float g = load(gate[i]);
            o[i] = store(load(store(g / (1.0f + fast_exp(-g)))) * load(up[i]));
        }
    }
}

/* A layer of attention and a gated part, each with a norm before it only. */
typedef struct {
    const elem *norm, *query_norm, *key_norm, *fed_norm; /* those of queries and keys as in rotate_and_write() */
    linear qkv, output, gate_up, down;
    const float *cos, *sin;
    int64_t pairs, window;
} layer;

/* A layer's keys and values, as in attention(). */
typedef struct {
    elem *keys, *values;
    int64_t block_stride;
} layer_pool;

/* The new tokens of a step, as in attention(). */
typedef struct {
    const int64_t *const *tables;
    const int64_t *starts, *contexts;
    int64_t num_seqs, block_size;
} batch;

/* What all layers have in common. */
typedef struct {
    int64_t hidden, heads, kv_heads, dim;
    float eps, scale;
} sizes;

/* Runs all layers of a decoder in one call: at few rows, a call from Python takes as long as what it computes.
 * residual: [rows, hidden]; rows behind those of the batch only go through products and norms
 * space: as PackedLayers allocates it, for the values of a layer; arranged: for the products of a layer */
void run_layers(const layer *layers, const layer_pool *pools, int64_t count, const sizes *of, const batch *b,
                elem *residual, elem *space, float *arranged, int64_t rows) {
    int64_t hidden = of->hidden, queries = of->heads * of->dim, qkv_size = queries + 2 * of->kv_heads * of->dim;
    elem *attended = space, *q = attended + rows * queries, *normed = q + rows * queries;
    elem *added = normed + rows * hidden, *qkv = added + rows * hidden, *fed = qkv + rows * qkv_size;
    int64_t tokens = b->starts[b->num_seqs];
    memset(attended + tokens * queries, 0, (size_t)((rows - tokens) * queries) * sizeof(elem));
    for (int64_t i = 0; i < count; i++) {
        const layer *l = layers + i;
        const layer_pool *p = pools + i;
        add_rms_norm(i ? added : NULL, residual, l->norm, normed, rows, hidden, (int)hidden, of->eps);
        l->qkv.multiply(&l->qkv, normed, qkv, arranged, rows);
        rotate_and_write(qkv, q, p->keys, p->values, b->tables, b->starts, b->contexts, l->cos, l->sin, l->query_norm,
                         l->key_norm, p->block_stride, b->num_seqs, (int)of->heads, (int)of->kv_heads, (int)of->dim,
                         (int)l->pairs, (int)b->block_size, of->eps);
        attention(q, p->keys, p->values, b->tables, b->starts, b->contexts, attended, p->block_stride, b->num_seqs,
                  (int)of->heads, (int)of->kv_heads, (int)of->dim, (int)b->block_size, l->window, of->scale);
        l->output.multiply(&l->output, attended, added, arranged, rows);
        add_rms_norm(added, residual, l->fed_norm, normed, rows, hidden, (int)hidden, of->eps);
        elem *gated = fed + rows * l->gate_up.out;
        l->gate_up.multiply(&l->gate_up, normed, fed, arranged, rows);
        silu_and_mul(fed, gated, rows, (int)(l->gate_up.out / 2));
        l->down.multiply(&l->down, gated, added, arranged, rows);
    }
#pragma omp parallel for simd if (rows > 8)
    for (int64_t i = 0; i < rows * hidden; i++) residual[i] = store(load(residual[i]) + load(added[i]));
}

/* ids[row] = the first token with the row's highest logit, or -1 if the row has a NaN or the highest logit is infinite.
 * logits: [num_rows, vocab] */
void greedy(const elem *logits, int64_t *ids, int64_t num_rows, int64_t vocab) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < num_rows; row++) {
        const elem *x = logits + row * vocab;
        float best = -INFINITY;
        int broken = 0;
#pragma omp simd reduction(max : best) reduction(| : broken)
        for (int64_t i = 0; i < vocab; i++) {
            float value = load(x[i]);
            best = value > best ? value : best;
            broken |= value != value;
        }
        int64_t id = -1;
        if (!broken && best - best == 0.0f)
            for (int64_t i = 0; i < vocab; i++)
                if (load(x[i]) == best) {
                    id = i;
                    break;
                }
        ids[row] = id;
    }
}

/* Packed masks, as in token_masks.py: [num_masks, num_words], and rows: [num_masks], the row of each. */
static const uint32_t BITS[32] = {
    1u << 0,  1u << 1,  1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,  1u << 8,  1u << 9,  1u << 10,
    1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15, 1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21,
    1u << 22, 1u << 23, 1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31,
};

/* The highest logit of the tokens that a word allows. */
static inline float highest_allowed(const elem *x, uint32_t word, int count) {
    float best = -INFINITY;
#pragma omp simd reduction(max : best)
    for (int i = 0; i < count; i++) {
        float value = word & BITS[i] ? load(x[i]) : -INFINITY;
        best = value > best ? value : best;
    }
    return best;
}

/* Completes greedy() for rows with masks: if the token in `ids` is excluded, the first allowed one with the highest
 * logit takes its place, or -2 if no allowed token has a logit above -inf. ids: of greedy() */
void greedy_allowed(const elem *logits, const int64_t *rows, const uint32_t *masks, int64_t *ids, int64_t num_masks,
                    int64_t num_words, int64_t vocab) {
#pragma omp parallel for schedule(dynamic)
    for (int64_t m = 0; m < num_masks; m++) {
        const elem *x = logits + rows[m] * vocab;
        const uint32_t *mask = masks + m * num_words;
        int64_t *id = ids + rows[m];
        if (*id < 0 || (*id / 32 < num_words && mask[*id / 32] & BITS[*id % 32])) continue;
        float best = -INFINITY;
        int64_t found = -1; /* the first word with the highest logit */
        for (int64_t w = 0; w < num_words && w * 32 < vocab; w++) {
            if (!mask[w]) continue;
            int64_t left = vocab - w * 32;
            float here = left < 32 ? highest_allowed(x + w * 32, mask[w], (int)left)
                                   : highest_allowed(x + w * 32, mask[w], 32);
            if (here > best) {
                best = here;
                found = w;
            }
        }
        *id = -2;
        for (int64_t i = found * 32; found >= 0 && *id < 0; i++)
            if (mask[found] & BITS[i % 32] && load(x[i]) == best) *id = i;
    }
}

/* Sets the logits of excluded tokens to -inf, but neither infinity nor NaN. The reference is token_masks.py.
 * logits: [num_rows, vocab] */
void exclude(float *logits, const int64_t *rows, const uint32_t *masks, int64_t num_masks, int64_t num_words,
             int64_t vocab) {
#pragma omp parallel for schedule(static)
    for (int64_t m = 0; m < num_masks; m++)
        for (int64_t w = 0; w * 32 < vocab; w++) {
            uint32_t word = w < num_words ? masks[m * num_words + w] : 0;
            float *x = logits + rows[m] * vocab + w * 32;
            int count = vocab - w * 32 < 32 ? (int)(vocab - w * 32) : 32;
            if (word == UINT32_MAX) continue;
#pragma omp simd
            for (int i = 0; i < count; i++) x[i] = word & BITS[i] || !(x[i] < INFINITY) ? x[i] : -INFINITY;
        }
}
