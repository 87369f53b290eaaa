/* Consecutive ranges, such as the rows of each sequence: range r has starts[r] to before starts[r + 1]. */
#include <stdint.h>

/* The range of i, which is one of them. */
static inline int64_t range_of(const int64_t *starts, int64_t count, int64_t i) {
    int64_t first = 0, after = count;
    while (after - first > 1) {
        int64_t middle = (first + after) / 2;
        if (starts[middle] <= i) first = middle;
        else after = middle;
    }
    return first;
}
