/* Kernels for workers on a CPU: attention over paged keys and values, and the element-wise operations of a decoder layer.
 *
 * Compiled once per element type: bfloat16 with -DBF16, else float32; see library.py. The PyTorch references in the
 * parent folder define the results, and tests compare them. Sums are in float32 for both types.
 *
 * Loops are plain C that the compiler vectorises for the machine. The one exception is the dot product of bfloat16, for
 * which AVX-512 has an instruction that compilers do not generate.
 */
#include "element.h"
#include "exponential.h"
#include "linear.h"
#include "ranges.h"

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
#define MAX_GROUP 16   /* query heads of one KV head */

/* Queries and keys as dot() takes them: bfloat16 is widened before, once for all products, unless AVX-512 has an
 * instruction for it. */
#if defined(BF16) && !defined(__AVX512BF16__)
#define WIDENS
typedef float factor;
#else
typedef elem factor;
#endif

/* The dot product of a query row and a key. */
static inline float dot(const factor *restrict q, const factor *restrict k, int dim) {
    int i = 0;
    float sum = 0.0f;
#if defined(BF16) && !defined(WIDENS)
    if (dim >= 32) {
        __m512 acc = _mm512_setzero_ps();
        for (; i + 32 <= dim; i += 32)
            acc = _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(q + i), (__m512bh)_mm512_loadu_si512(k + i));
        sum = _mm512_reduce_add_ps(acc);
    }
    float rest = 0.0f;
#pragma omp simd reduction(+ : rest)
    for (int j = i; j < dim; j++) rest += load(q[j]) * load(k[j]);
    return sum + rest;
#else
#pragma omp simd reduction(+ : sum)
    for (int j = i; j < dim; j++) sum += q[j] * k[j];
    return sum;
#endif
}

#ifdef WIDENS
/* Widens the first `dim` elements of each of `count` rows. to: [count, dim] */
static inline void widen_rows(const elem *from, int64_t stride, float *to, int count, int dim) {
    for (int t = 0; t < count; t++)
#pragma omp simd
        for (int i = 0; i < dim; i++) to[t * dim + i] = load(from[t * stride + i]);
}
#endif

/* Fetches a row of `dim` elements, which will be read soon, into the cache. */
static inline void prefetch(const elem *row, int dim) {
    for (int i = 0; i < dim; i += CACHE_LINE / (int)sizeof(elem)) __builtin_prefetch(row + i);
}

/* Attention of `rows` queries of one sequence, at consecutive positions from `first`, for `group` query heads of a KV head.
 * Softmax is computed online, segment by segment (Milakov and Gimelshein, 2018). */
static void attend(const elem *q, const elem *keys, const elem *values, const int64_t *table, elem *out, int rows,
                   int64_t first, int64_t window, int group, int dim, int64_t row_stride, int64_t token_stride,
                   int64_t block_stride, int block_size, float scale) {
    float acc[ROWS_AT_ONCE * MAX_GROUP][MAX_HEAD_DIM];
    float peak[ROWS_AT_ONCE * MAX_GROUP], total[ROWS_AT_ONCE * MAX_GROUP];
    float p[ROWS_AT_ONCE * MAX_GROUP][SEGMENT];
    int heads = rows * group;
#ifdef WIDENS
    float queries[ROWS_AT_ONCE * MAX_GROUP * MAX_HEAD_DIM], widened[SEGMENT * MAX_HEAD_DIM];
    for (int row = 0; row < rows; row++) widen_rows(q + row * row_stride, dim, queries + row * group * dim, group, dim);
    int64_t query_stride = (int64_t)group * dim, key_stride = dim;
#else
    const elem *queries = q;
    int64_t query_stride = row_stride, key_stride = token_stride;
#endif
    for (int h = 0; h < heads; h++) {
        peak[h] = -INFINITY;
        total[h] = 0.0f;
        memset(acc[h], 0, dim * sizeof(float));
    }
    int64_t end = first + rows; /* keys before this position are visible to at least one query */
    int64_t begin = window > 0 && first - window + 1 > 0 ? first - window + 1 : 0;
    begin -= begin % block_size % SEGMENT; /* so that a query's segments are the same whichever rows are beside it */
    for (int64_t at = begin; at < end;) {
        int64_t offset = at % block_size;
        int count = block_size - offset < SEGMENT ? (int)(block_size - offset) : SEGMENT;
        if (count > end - at) count = (int)(end - at);
        int64_t place = table[at / block_size] * block_stride + offset * token_stride;
        const elem *v = values + place;
        const factor *k;
#ifdef WIDENS
        widen_rows(keys + place, token_stride, widened, count, dim);
        k = widened;
#else
        k = keys + place;
#endif
        int64_t next = at + count < end ? at + count : at;
        int64_t ahead = table[next / block_size] * block_stride + next % block_size * token_stride;
        for (int row = 0; row < rows; row++) {
            int64_t position = first + row;
            int64_t oldest = window > 0 ? position - window + 1 : 0;
            int low = oldest > at ? (int)(oldest - at) : 0;
            int high = position - at + 1 < count ? (int)(position - at + 1) : count;
            for (int g = 0; g < group; g++) {
                int h = row * group + g;
                float *s = p[h];
                for (int t = 0; t < SEGMENT; t++) s[t] = 0.0f;
                if (low >= high) continue;
                const factor *query = queries + row * query_stride + g * dim;
                float best = peak[h];
                for (int t = low; t < high; t++) {
                    s[t] = dot(query, k + t * key_stride, dim) * scale;
                    best = s[t] > best || s[t] != s[t] ? s[t] : best;
                }
                float shrink = peak[h] == -INFINITY ? 0.0f : fast_exp(peak[h] - best);
                float sum = 0.0f;
                float e[SEGMENT];
#pragma omp simd
                for (int t = 0; t < SEGMENT; t++) e[t] = fast_exp(s[t] - best);
#pragma omp simd reduction(+ : sum)
                for (int t = 0; t < SEGMENT; t++) {
                    e[t] = t >= low && t < high ? e[t] : 0.0f;
                    sum += e[t];
                }
                memcpy(s, e, sizeof(e));
                if (best != best) s[low] = sum = best; /* propagates a NaN */
                total[h] = total[h] * shrink + sum;
                peak[h] = best;
                if (shrink != 1.0f) {
#pragma omp simd
                    for (int i = 0; i < dim; i++) acc[h][i] *= shrink;
                }
            }
        }
        for (int t = 0; t < count; t++) {
            float row_v[MAX_HEAD_DIM];
            const elem *value = v + t * token_stride;
            /* A block's keys, and values, are too few for the CPU to foresee the next ones. Fetched row by row, they do not
             * hold up the loads of this segment. */
            prefetch(keys + ahead + t * token_stride, dim);
            prefetch(values + ahead + t * token_stride, dim);
#pragma omp simd
            for (int i = 0; i < dim; i++) row_v[i] = load(value[i]);
            for (int h = 0; h < heads; h++) {
                float weight = p[h][t];
                if (weight == 0.0f) continue; /* not visible, or without weight: the stored value must not matter */
                float *a = acc[h];
#pragma omp simd
                for (int i = 0; i < dim; i++) a[i] += weight * row_v[i];
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
            for (int i = 0; i < dim; i++) o[i] = store(acc[h][i] * inverse);
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
