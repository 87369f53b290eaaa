/* A mixture of experts: chooses experts, sorts tokens by expert, multiplies, and adds up results.
 *
 * A token's result does not depend on the others: experts are chosen for each alone, and its summands are added in the
 * order of its choice. The PyTorch references are expert_routing.py and experts.py in the parent folder.
 */
#include "element.h"
#include "linear.h"

#include <math.h>
#include <stddef.h>

void silu_and_mul(const elem *gate_up, elem *out, int64_t num_rows, int dim); /* of kernels.c */

/* Chooses top_k experts of each row by the softmax of its logits, the best first, and of equals the one that comes
 * first. A row that is not finite has experts too, and shares that are not finite.
 * logits: [rows, num_experts]; experts, shares: [rows, top_k] */
void route(const elem *logits, int64_t *experts, float *shares, int64_t rows, int num_experts, int top_k,
           int renormalized, float scale) {
#pragma omp parallel for schedule(static) if (rows > 8)
    for (int64_t row = 0; row < rows; row++) {
        float scores[num_experts], peak = -INFINITY, total = 0.0f, chosen = 0.0f;
        const elem *x = logits + row * num_experts;
        for (int e = 0; e < num_experts; e++) peak = load(x[e]) > peak ? load(x[e]) : peak;
        for (int e = 0; e < num_experts; e++) total += scores[e] = expf(load(x[e]) - peak);
        for (int e = 0; e < num_experts; e++) scores[e] /= total;
        int64_t *to = experts + row * top_k;
        float *share = shares + row * top_k;
        for (int place = 0; place < top_k; place++) {
            int best = -1;
            for (int e = 0; e < num_experts; e++)
                if (scores[e] != -INFINITY && (best < 0 || scores[e] > scores[best])) best = e;
            to[place] = best;
            chosen += share[place] = scores[best];
            scores[best] = -INFINITY; /* softmax is never that */
        }
        for (int place = 0; place < top_k; place++) share[place] = share[place] / (renormalized ? chosen : 1.0f) * scale;
    }
}

/* Sorts the places of all tokens by expert. Those of expert e come from starts[e] to before starts[e + 1].
 * experts: [rows, top_k]; starts: [num_experts + 1]; sources: [rows * top_k], the row of each place in that order;
 * places: [rows, top_k], where each went; loads: [num_experts], to which the first counted_rows are added */
static void sort_by_expert(const int64_t *experts, int64_t *starts, int64_t *sources, int64_t *places, int64_t *loads,
                    int64_t rows, int64_t counted_rows, int top_k, int num_experts) {
    int64_t next[num_experts];
    for (int e = 0; e <= num_experts; e++) starts[e] = 0;
    for (int64_t i = 0; i < rows * top_k; i++) starts[experts[i] + 1]++;
    for (int e = 0; e < num_experts; e++) starts[e + 1] += next[e] = starts[e];
    for (int64_t i = 0; i < rows * top_k; i++) {
        places[i] = next[experts[i]]++;
        sources[places[i]] = i / top_k;
    }
    for (int64_t i = 0; i < counted_rows * top_k; i++) loads[experts[i]]++;
}

/* out = the sum of each row's results, times their shares.
 * results: [rows * top_k, dim], sorted by expert; places, shares: [rows, top_k]; out: [rows, dim] */
static void sum_experts(const elem *results, const int64_t *places, const float *shares, elem *out, int64_t rows, int top_k,
                 int dim) {
#pragma omp parallel for schedule(static) if (rows > 8)
    for (int64_t row = 0; row < rows; row++) {
        float sum[dim];
        for (int i = 0; i < dim; i++) sum[i] = 0.0f;
        for (int64_t place = row * top_k; place < (row + 1) * top_k; place++) {
            const elem *result = results + places[place] * dim;
            float share = shares[place];
#pragma omp simd
            for (int i = 0; i < dim; i++) sum[i] += share * load(result[i]);
        }
#pragma omp simd
        for (int i = 0; i < dim; i++) out[row * dim + i] = store(sum[i]);
    }
}

/* out = the sum of each row's experts, in one call: for one token, calls from Python take a tenth of the time.
 * x, out: [rows, hidden]; experts, shares: of route(); loads: of sort_by_expert()
 * indices: space for its starts, sources and places; space, arranged: as PackedExperts allocates them */
void multiply_experts(const elem *x, const int64_t *experts, const float *shares, const grouped *gate_up,
                      const grouped *down, int64_t *loads, int64_t *indices, elem *space, float *arranged, elem *out,
                      int64_t rows, int64_t counted_rows, int top_k) {
    int64_t pairs = rows * top_k, *starts = indices, *sources = starts + gate_up->count + 1, *places = sources + pairs;
    elem *fed = space, *gated = fed + pairs * gate_up->out, *results = gated + pairs * down->in;
    sort_by_expert(experts, starts, sources, places, loads, rows, counted_rows, top_k, (int)gate_up->count);
    gate_up->multiply(gate_up, x, sources, starts, fed, arranged);
    silu_and_mul(fed, gated, pairs, (int)down->in);
    down->multiply(down, gated, NULL, starts, results, arranged);
    sum_experts(results, places, shares, out, rows, top_k, (int)down->out);
}

/* out += x, times the sigmoid of each row's gate unless `gate` is null. x, out: [rows, dim]; gate: [rows] */
void add_gated(const elem *x, const elem *gate, elem *out, int64_t rows, int dim) {
#pragma omp parallel for schedule(static) if (rows > 8)
    for (int64_t row = 0; row < rows; row++) {
        float share = gate ? load(store(1.0f / (1.0f + expf(-load(gate[row]))))) : 1.0f;
#pragma omp simd
        for (int64_t i = row * dim; i < (row + 1) * dim; i++) out[i] = store(load(out[i]) + load(store(share * load(x[i]))));
    }
}
