/* From logits to tokens by each row's own parameters, and the logarithms of their probabilities.

   The law is that of `pelton.sampling`: masks and side tables, temperature, min_p, top_k, top_p, and one uniform number of (seed,
   position) that picks a token at its place of the cumulated distribution. Nothing is sorted: a filter is a threshold, found by
   sums over all values that reach each of a few thresholds at once, which are then moved closer. */
#include "sampling.h"
#include "pool.h"
#include "vec.h"

#include <float.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { OK = 0, NOT_FINITE = 1, NOTHING_ALLOWED = 2 };
enum { GROUP = 64, CHUNK = GROUP * LANES }; /* a lane of a chunk is a group of values */
enum { NUM_CUTS = 8 };
enum { FEW_ALLOWED = 2 * CHUNK }; /* tokens that a mask allows, which are worth being brought together */
#if defined(__AVX512F__)
enum { PASSES = 1 }; /* before values that cannot be the threshold are left out */
#else
enum { PASSES = 2 };
#endif
static const float LEAST_EXPONENT = -87.0f; /* exp of less is 0 here */

/* ---- vectors ---- */

INLINE vec vec_choose(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }
INLINE vec vec_max(vec a, vec b) { return vec_choose(a > b, a, b); } /* b where one is a NaN */

/* A bit for each lane. */
INLINE uint32_t vec_bits(ivec mask) {
#if defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif defined(__SSE2__)
    return (uint32_t)_mm_movemask_ps((__m128)mask);
#else
    uint32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++)
        bits |= (uint32_t)(mask[lane] & 1) << lane;
    return bits;
#endif
}

/* Numbers where a bit is 1, -inf elsewhere. */
INLINE vec vec_keep(uint32_t bits, vec numbers) {
#if defined(__AVX512F__)
    return (vec)_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), (__mmask16)bits, (__m512)numbers);
#else
    uvec lane_bit = {0};
    for (int lane = 0; lane < LANES; lane++)
        lane_bit[lane] = 1u << lane;
    return vec_choose((bits & lane_bit) != 0, numbers, vec_all(-INFINITY));
#endif
}

INLINE vec vec_add_where(ivec mask, vec sum, vec numbers) {
#if defined(__AVX512DQ__)
    return (vec)_mm512_mask_add_ps((__m512)sum, (__mmask16)vec_bits(mask), (__m512)sum, (__m512)numbers);
#else
    return sum + (vec)(mask & (ivec)numbers);
#endif
}

INLINE float highest_lane(vec numbers) {
    float best = numbers[0];
    for (int lane = 1; lane < LANES; lane++)
        best = numbers[lane] > best ? numbers[lane] : best;
    return best;
}

INLINE double sum_of_lanes(vec numbers) {
    double sum = 0.0;
    for (int lane = 0; lane < LANES; lane++)
        sum += (double)numbers[lane];
    return sum;
}

/* `fast_exp` of numbers that are not above 0. */
INLINE vec vec_exp(vec x) {
    vec bounded = vec_max(x, vec_all(LEAST_EXPONENT));
    ivec power = __builtin_convertvector(bounded * 1.44269504f - 0.5f, ivec);
    vec whole = __builtin_convertvector(power, vec);
    vec rest = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    return (vec)((ivec)(sum * (vec)((power + 127) << 23)) & (x >= LEAST_EXPONENT));
}

/* ---- a row and its passes ---- */

/* A thread's memory for one row. Values come in whole chunks: what lies behind the last is -inf, whose weight is 0. */
struct work {
    float *values, *tops;  /* [width], [width / GROUP] */
    float *list, *spare;   /* [width + CHUNK] */
    int32_t *ids;          /* [width + CHUNK], of `list` */
    int32_t *allowed;      /* [FEW_ALLOWED], of `values` where a mask allows few */
    double *sums;          /* [width / CHUNK] */
    int64_t width;
};

static int make_work(struct work *work, int64_t vocab_size) {
    int64_t width = round_up(vocab_size, CHUNK), room = width + CHUNK;
    char *memory = pelton_scratch((size_t)(4 * (width + 3 * room + width / GROUP) + 8 * (width / CHUNK) + 4 * FEW_ALLOWED));
    if (memory == NULL)
        return 0;
    work->width = width;
    work->values = (float *)memory;
    work->list = work->values + width;
    work->spare = work->list + room;
    work->ids = (int32_t *)(work->spare + room);
    work->sums = (double *)(work->ids + room);
    work->tops = (float *)(work->sums + width / CHUNK);
    work->allowed = (int32_t *)(work->tops + width / GROUP);
    return 1;
}

static void fill(float *values, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++)
        values[i] = -INFINITY;
}

struct scanned {
    float best;
    int has_nan;
};

INLINE struct scanned scan_chunks(const struct work *work, const float *from, int64_t num_chunks, vec divisor, int divides) {
    vec best = vec_all(-INFINITY);
    ivec is_nan = {0};
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        vec top = vec_all(-INFINITY);
        for (int64_t i = chunk * CHUNK; i < (chunk + 1) * CHUNK; i += LANES) {
            vec x = vec_load(from + i);
            if (divides)
                x /= divisor;
            top = vec_max(x, top);
            is_nan |= x != x;
            vec_store(work->values + i, x);
        }
        vec_store(work->tops + chunk * LANES, top);
        best = vec_max(top, best);
    }
    return (struct scanned){highest_lane(best), vec_bits(is_nan) != 0};
}

/* Bring `count` numbers, divided, to `values`, and each group's highest to `tops`. */
static struct scanned scan(const struct work *work, const float *from, int64_t count, float divisor) {
    int64_t num_whole = count / CHUNK, num_chunks = work->width / CHUNK;
    if (from != work->values) {
        memcpy(work->values + num_whole * CHUNK, from + num_whole * CHUNK, (size_t)(count - num_whole * CHUNK) * sizeof *from);
        fill(work->values, count, work->width);
    }
    struct work rest = *work;
    rest.values += num_whole * CHUNK, rest.tops += num_whole * LANES;
    struct scanned found, last;
    if (divisor == 1.0f) {
        found = scan_chunks(work, from, num_whole, vec_all(1.0f), 0);
        last = scan_chunks(&rest, rest.values, num_chunks - num_whole, vec_all(1.0f), 0);
    } else {
        found = scan_chunks(work, from, num_whole, vec_all(divisor), 1);
        last = scan_chunks(&rest, rest.values, num_chunks - num_whole, vec_all(divisor), 1);
    }
    return (struct scanned){last.best > found.best ? last.best : found.best, found.has_nan | last.has_nan};
}

/* Where `value`, which is there, comes first. */
static int64_t find(const float *values, float value) {
    for (int64_t i = 0;; i += LANES) {
        uint32_t bits = vec_bits(vec_load(values + i) == vec_all(value));
        if (bits)
            return i + __builtin_ctz(bits);
    }
}

/* Put those of `n` values that lie in [low, high] into a list, in their order, and their ids (their places without `ids`) beside it
   where that is wanted. The list is filled up behind them; it may be `values`, and its ids `ids`. Returns how many there are. */
static int64_t keep(const float *values, const int32_t *ids, int64_t n, float low, float high, float *list, int32_t *list_ids) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += LANES) {
        vec x = vec_load(values + i);
        uint32_t bits = vec_bits((x >= vec_all(low)) & (x <= vec_all(high)));
        if (!bits)
            continue;
#if defined(__AVX512F__)
        __m512i place = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        __m512i own = ids ? _mm512_loadu_si512(ids + i) : _mm512_add_epi32(place, _mm512_set1_epi32((int32_t)i));
        _mm512_storeu_ps(list + count, _mm512_maskz_compress_ps((__mmask16)bits, (__m512)x));
        if (list_ids)
            _mm512_storeu_si512(list_ids + count, _mm512_maskz_compress_epi32((__mmask16)bits, own));
        count += __builtin_popcount(bits);
#else
        for (; bits; bits &= bits - 1, count++) {
            int lane = __builtin_ctz(bits);
            list[count] = values[i + lane];
            if (list_ids)
                list_ids[count] = ids ? ids[i + lane] : (int32_t)(i + lane);
        }
#endif
    }
    fill(list, count, round_up(count, CHUNK));
    return count;
}

/* ---- thresholds ---- */

/* Integers in the order of the floats. */
INLINE int32_t key_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

INLINE float value_of(int32_t key) {
    int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* For each threshold the sum of what reaches it: of the values, or of ones. */
INLINE void sum_above(const float *values, int64_t n, const float *cuts, double *sums, int counts) {
    for (int j = 0; j < NUM_CUTS; j++)
        sums[j] = 0.0;
    for (int64_t first = 0; first < n; first += CHUNK) {
        vec parts[NUM_CUTS] = {{0}};
        for (int64_t i = first; i < least(first + CHUNK, n); i += LANES) {
            vec x = vec_load(values + i), weight = counts ? vec_all(1.0f) : x;
            for (int j = 0; j < NUM_CUTS; j++)
                parts[j] = vec_add_where(x >= vec_all(cuts[j]), parts[j], weight);
        }
        for (int j = 0; j < NUM_CUTS; j++)
            sums[j] += sum_of_lanes(parts[j]);
    }
}

/* Lowest and highest of a list, which is not empty. */
INLINE void bounds_of(const float *list, int64_t count, float *low, float *high) {
    vec lowest = vec_all(INFINITY), highest = vec_all(-INFINITY);
    for (int64_t i = 0; i < count; i += LANES) {
        vec x = vec_load(list + i);
        highest = vec_max(x, highest);
        lowest = vec_choose((x < lowest) & (x > -INFINITY), x, lowest);
    }
    *low = -highest_lane(-lowest), *high = highest_lane(highest);
}

/* The greatest value from `low` to `high`, the highest there is, such that those that reach it sum up to `target` at least, or are
   as many; `low` where there is none. */
INLINE float cut(const struct work *work, const float *values, int64_t n, double target, float low, float high, int counts) {
    int64_t start = key_of(low), stop = (int64_t)key_of(high) + 1; /* start is enough, stop is not */
    double left_out = 0.0, above = 0.0;                            /* what reaches `stop`: outside `values`, and in all */
    for (int pass = 1; stop - start > 1; pass++) {
        float cuts[NUM_CUTS];
        double sums[NUM_CUTS];
        int64_t first = start, span = stop - start;
        for (int j = 0; j < NUM_CUTS; j++)
            cuts[j] = value_of((int32_t)(first + span * (j + 1) / (NUM_CUTS + 1)));
        sum_above(values, n, cuts, sums, counts);
        for (int j = 0; j < NUM_CUTS && stop == first + span; j++) {
            int64_t place = first + span * (j + 1) / (NUM_CUTS + 1);
            if (left_out + sums[j] >= target)
                start = place;
            else
                stop = place, above = left_out + sums[j];
        }
        if (pass % PASSES || n <= 4 * LANES || stop - start <= 1)
            continue;
        int64_t count = keep(values, NULL, n, value_of((int32_t)start), value_of((int32_t)(stop - 1)), work->spare, NULL);
        if (count == 0)
            break;
        bounds_of(work->spare, count, &low, &high);
        values = work->spare, n = round_up(count, LANES), left_out = above;
        start = key_of(low), stop = (int64_t)key_of(high) + 1;
    }
    return value_of((int32_t)start);
}

static float cut_by_number(const struct work *work, const float *values, int64_t n, int64_t number, float low, float high) {
    return cut(work, values, n, (double)number, low, high, 1);
}

static float cut_by_mass(const struct work *work, const float *weights, int64_t n, double mass, float low) {
    return cut(work, weights, n, mass, low, 1.0f, 0);
}

/* ---- masks and side tables ---- */

/* As a grammar allows, a bit for each token: the numbers come to `values`, -inf where the bit is 0, and each group's highest of them to
   `tops`, in one pass over the row. unmasked: of the numbers as they were. */
INLINE struct scanned mask_chunks(const struct work *work, const float *from, const uint32_t *words, int64_t num_chunks,
                                  struct scanned *unmasked) {
    vec best = vec_all(-INFINITY), best_before = best;
    ivec is_nan = {0};
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        vec top = vec_all(-INFINITY);
        for (int64_t i = chunk * CHUNK; i < (chunk + 1) * CHUNK; i += LANES) {
            vec x = vec_load(from + i);
            is_nan |= x != x;
            best_before = vec_max(x, best_before);
            x = vec_keep(words[i / 32] >> (i % 32), x);
            top = vec_max(x, top);
            vec_store(work->values + i, x);
        }
        vec_store(work->tops + chunk * LANES, top);
        best = vec_max(top, best);
    }
    *unmasked = (struct scanned){highest_lane(best_before), vec_bits(is_nan) != 0};
    return (struct scanned){highest_lane(best), vec_bits(is_nan) != 0};
}

static struct scanned scan_masked(const struct work *work, const float *from, int64_t count, const uint32_t *words,
                                  struct scanned *unmasked) {
    int64_t num_whole = count / CHUNK, num_chunks = work->width / CHUNK;
    uint32_t last_words[CHUNK / 32] = {0};
    memcpy(work->values + num_whole * CHUNK, from + num_whole * CHUNK, (size_t)(count - num_whole * CHUNK) * sizeof *from);
    fill(work->values, count, work->width);
    for (int64_t word = num_whole * CHUNK / 32; word < (count + 31) / 32; word++)
        last_words[word - num_whole * CHUNK / 32] = words[word];
    struct work rest = *work;
    rest.values += num_whole * CHUNK, rest.tops += num_whole * LANES;
    struct scanned before, found = mask_chunks(work, from, words, num_whole, unmasked);
    struct scanned last = mask_chunks(&rest, rest.values, last_words, num_chunks - num_whole, &before);
    *unmasked = (struct scanned){before.best > unmasked->best ? before.best : unmasked->best, before.has_nan | unmasked->has_nan};
    return (struct scanned){last.best > found.best ? last.best : found.best, found.has_nan | last.has_nan};
}

static int64_t num_allowed(const uint32_t *words, int64_t vocab_size) {
    int64_t count = 0, last = vocab_size / 32;
    for (int64_t word = 0; word < last; word++)
        count += __builtin_popcount(words[word]);
    return vocab_size % 32 ? count + __builtin_popcount(words[last] & ((1u << vocab_size % 32) - 1)) : count;
}

/* Highest of the numbers as they are. */
static struct scanned look(const float *from, int64_t count) {
    vec best[4];
    ivec is_nan = {0};
    for (int part = 0; part < 4; part++)
        best[part] = vec_all(-INFINITY);
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        for (int part = 0; part < 4; part++) {
            vec x = vec_load(from + i + part * LANES);
            is_nan |= x != x;
            best[part] = vec_max(x, best[part]);
        }
    float highest = highest_lane(vec_max(vec_max(best[0], best[1]), vec_max(best[2], best[3])));
    int has_nan = vec_bits(is_nan) != 0;
    for (; i < count; i++)
        highest = from[i] > highest ? from[i] : highest, has_nan |= isnan(from[i]);
    return (struct scanned){highest, has_nan};
}

/* Bring the few numbers that a grammar allows together in `values`, with their ids beside them. Returns how many there are. */
static int64_t gather_allowed(const struct work *work, const float *from, int64_t vocab_size, const uint32_t *words) {
    int64_t count = 0;
    for (int64_t word = 0; word < (vocab_size + 31) / 32; word++)
        for (uint32_t bits = words[word]; bits; bits &= bits - 1) {
            int64_t id = 32 * word + __builtin_ctz(bits);
            if (id < vocab_size)
                work->values[count] = from[id], work->allowed[count++] = (int32_t)id;
        }
    return count;
}

static void ban(const uint8_t *is_banned, int64_t count, float *values) {
    int64_t i = 0;
    for (uint64_t several; i + 8 <= count; i += 8) {
        memcpy(&several, is_banned + i, sizeof several);
        for (int64_t j = i; several && j < i + 8; j++)
            values[j] = is_banned[j] ? -INFINITY : values[j];
    }
    for (; i < count; i++)
        values[i] = is_banned[i] ? -INFINITY : values[i];
}

static void add_bias(const float *bias, int64_t count, float *values) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        vec_store(values + i, vec_load(values + i) + vec_load(bias + i));
    for (; i < count; i++)
        values[i] += bias[i];
}

/* Words of several tokens: the last one, where the output ends with those before it. position: of the token to come. */
static void ban_words(const struct sampler *op, int64_t slot, int64_t side, int64_t position, float *values) {
    const struct side_tables *tables = op->side;
    const int32_t *tokens = op->batch->token_ids + slot * op->batch->token_stride;
    for (int64_t word = side * tables->num_words; word < (side + 1) * tables->num_words; word++) {
        int64_t length = tables->bad_word_prefix_len[word];
        if (length < 0 || length > position - op->num_prompt_tokens[slot] || position > op->batch->max_model_len + 1)
            continue;
        const int32_t *prefix = tables->bad_word_prefix + (word + 1) * tables->word_length - length;
        if (memcmp(prefix, tokens + position - length, (size_t)length * sizeof *prefix) == 0)
            values[tables->bad_word_last[word]] = -INFINITY;
    }
}

/* Whether any of a group's tokens has been there. */
INLINE int has_any(const int32_t *counts, const uint8_t *in_prompt) {
    uvec any = {0};
    uint64_t flags = 0, several;
    for (int i = 0; i < GROUP; i += LANES)
        any |= vec_load_bits(counts + i);
    for (int i = 0; i < GROUP; i += 8) {
        memcpy(&several, in_prompt + i, sizeof several);
        flags |= several;
    }
    return flags != 0 || vec_bits(any != 0) != 0;
}

static void penalize(const struct sampler *op, int64_t side, float *values) {
    const struct side_tables *tables = op->side;
    const int32_t *counts = tables->counts + side * op->vocab_size;
    const uint8_t *in_prompt = tables->in_prompt + side * op->vocab_size;
    float presence = tables->presence[side], frequency = tables->frequency[side], repetition = tables->repetition[side];
    for (int64_t first = 0; first < op->vocab_size; first += GROUP) {
        int64_t last = least(first + GROUP, op->vocab_size);
        if (last - first == GROUP && !has_any(counts + first, in_prompt + first))
            continue;
        for (int64_t i = first; i < last; i++) {
            if (!(counts[i] | in_prompt[i]))
                continue;
            /* volatile: products are rounded before anything is subtracted, as in the reference */
            volatile float value = values[i] > 0.0f ? values[i] / repetition : values[i] * repetition;
            volatile float by_count = frequency * (float)counts[i];
            values[i] = value - by_count - (counts[i] > 0 ? presence : 0.0f);
        }
    }
}

static int has_side(const struct sampler *op, int64_t slot) { return op->side != NULL && op->side_slots[slot] >= 0; }

static int has_mask(const struct sampler *op, int64_t slot) { return op->mask_words != NULL && op->has_mask[slot]; }

static void apply_side_tables(const struct sampler *op, int64_t slot, int64_t position, float *values) {
    const struct side_tables *tables = op->side;
    int64_t side = op->side_slots[slot], count = op->vocab_size;
    if (tables->has_banned[side])
        ban(tables->banned + side * count, count, values);
    if (tables->has_bad_words[side])
        ban_words(op, slot, side, position, values);
    if (tables->has_min_tokens[side] && position - op->num_prompt_tokens[slot] < tables->min_tokens[side])
        ban(tables->stop_ids + side * count, count, values);
    if (tables->has_bias[side])
        add_bias(tables->bias + side * count, count, values);
    if (tables->has_penalties[side])
        penalize(op, side, values);
}

/* ---- one token ---- */

/* splitmix64's mixing function (Steele, Lea, Flood, OOPSLA 2014), as in pelton.sampling.random. */
INLINE uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

/* In (0, 1), never an end of it. */
static double uniform(int64_t seed, int64_t position) {
    const uint64_t step = 0x9E3779B97F4A7C15u;
    uint64_t bits = mix(mix((uint64_t)seed + step) ^ mix((uint64_t)position * step + 0xBF58476D1CE4E5B9u));
    return ((double)(bits >> 16) + 0.5) * 0x1p-48;
}

/* Make weights of `n` values, whole chunks; each chunk's sum goes to `sums`, that of all is returned. A chunk of `values` that is
   -inf throughout stays so, which is below any weight: where a grammar allows little most are. */
static double weigh(const struct work *work, float *values, int64_t n, float best) {
    double total = 0.0;
    for (int64_t first = 0; first < n; first += CHUNK) {
        vec part = {0};
        if (values == work->values && !vec_bits(vec_load(work->tops + first / CHUNK * LANES) > -INFINITY)) {
            work->sums[first / CHUNK] = 0.0;
            continue;
        }
        for (int64_t i = first; i < first + CHUNK; i += LANES) {
            vec weight = vec_exp(vec_load(values + i) - best);
            vec_store(values + i, weight);
            part += weight;
        }
        total += work->sums[first / CHUNK] = sum_of_lanes(part);
    }
    return total;
}

/* The sums again, of weights that reach `low`. */
static double weigh_above(const struct work *work, const float *weights, int64_t n, float low) {
    double total = 0.0;
    for (int64_t first = 0; first < n; first += CHUNK) {
        vec part = {0};
        for (int64_t i = first; i < first + CHUNK; i += LANES) {
            vec weight = vec_load(weights + i);
            part += (vec)((weight >= low) & (ivec)weight);
        }
        total += work->sums[first / CHUNK] = sum_of_lanes(part);
    }
    return total;
}

/* The first place up to which the weights that reach `low` sum up to more than `target`. Never one without weight. */
static int64_t place_of(const struct work *work, const float *weights, int64_t n, float low, double target) {
    double sum = 0.0;
    int64_t first = 0, place = 0;
    while (first + CHUNK < n && sum + work->sums[first / CHUNK] <= target)
        sum += work->sums[first / CHUNK], first += CHUNK;
    while (first > 0 && work->sums[first / CHUNK] == 0.0) /* the target is the total, but for roundings */
        first -= CHUNK, sum -= work->sums[first / CHUNK];
    for (int64_t i = first; i < first + CHUNK; i++) {
        if (weights[i] < low || weights[i] == 0.0f)
            continue;
        place = i;
        sum += (double)weights[i];
        if (sum > target)
            break;
    }
    return place;
}

/* The values that min_p and top_k leave, in the list; how many there are, or -1 when neither drops any and no list is made. */
static int64_t keep_likeliest(const struct sampler *op, const struct work *work, int64_t slot, float best) {
    int64_t top_k = op->top_k[slot], num_groups = work->width / GROUP;
    float low = best + LEAST_EXPONENT, floor = op->min_p[slot] > 0.0f ? best + logf(op->min_p[slot]) : -INFINITY;
    if (top_k >= op->vocab_size && floor == -INFINITY)
        return -1;
    low = floor > low ? floor : low;
    if (top_k < num_groups) { /* so many groups have a value that is as high as this */
        float bound = cut_by_number(work, work->tops, num_groups, top_k, low, best);
        low = bound > low ? bound : low;
    }
    int64_t count = keep(work->values, NULL, work->width, low, best, work->list, work->ids);
    if (count > top_k) {
        low = cut_by_number(work, work->list, round_up(count, LANES), top_k, low, best);
        count = keep(work->list, work->ids, round_up(count, LANES), low, best, work->list, work->ids);
    }
    return count;
}

static int32_t pick(const struct sampler *op, const struct work *work, int64_t slot, int64_t position, float best) {
    int64_t count = keep_likeliest(op, work, slot, best);
    float *weights = count < 0 ? work->values : work->list, low = 0.0f, top_p = op->top_p[slot];
    int64_t n = count < 0 ? work->width : round_up(count, CHUNK);
    double total = weigh(work, weights, n, best);
    if (top_p < 1.0f) { /* tokens below the first threshold sum up to too little to matter, whatever they are */
        float first = (float)((1.0 - (double)top_p) * total / (double)n);
        low = cut_by_mass(work, weights, n, (double)top_p * total, first < 1.0f ? first : 1.0f);
        total = weigh_above(work, weights, n, low);
    }
    int64_t place = place_of(work, weights, n, low, uniform(op->seeds[slot], position) * total);
    return count < 0 ? (int32_t)place : work->ids[place];
}

struct taken {
    int32_t token, code;
};

static int is_usable(struct scanned found) { return !found.has_nan && isfinite(found.best); }

/* A row of which a grammar allows few tokens: nothing but these is weighed. */
static struct taken take_allowed(const struct sampler *op, struct work work, const float *logits, int64_t slot, const uint32_t *words) {
    int64_t position = op->batch->num_computed_tokens[slot] + 1;
    float temperature = op->temperature[slot];
    int is_partial = op->is_partial != NULL && op->is_partial[slot];
    if (!is_partial && !is_usable(look(logits, op->vocab_size)))
        return (struct taken){0, NOT_FINITE};
    int64_t count = gather_allowed(&work, logits, op->vocab_size, words);
    work.width = round_up(most(count, 1), CHUNK);
    fill(work.values, count, work.width);
    struct scanned found = scan(&work, work.values, count, 1.0f);
    if (is_partial && (found.has_nan || found.best == INFINITY))
        return (struct taken){0, NOT_FINITE};
    if (!is_usable(found))
        return (struct taken){0, NOTHING_ALLOWED};
    if (temperature > 0.0f && temperature != 1.0f)
        found = scan(&work, work.values, count, temperature);
    int is_greedy = temperature == 0.0f || isinf(found.best);
    int64_t place = is_greedy ? find(work.values, found.best) : pick(op, &work, slot, position, found.best);
    return (struct taken){work.allowed[place], OK};
}

int pelton_takes_few(const struct sampler *op, int64_t slot) {
    return has_mask(op, slot) && !has_side(op, slot) &&
           num_allowed(op->mask_words + slot * op->mask_stride, op->vocab_size) <= FEW_ALLOWED;
}

/* logits: one row, left as it is. */
static struct taken take(const struct sampler *op, const struct work *work, const float *logits, int64_t slot) {
    int64_t position = op->batch->num_computed_tokens[slot] + 1, vocab_size = op->vocab_size;
    float temperature = op->temperature[slot];
    int is_masked = has_mask(op, slot), is_changed = has_side(op, slot) || is_masked;
    int divides = temperature > 0.0f && temperature != 1.0f;
    const uint32_t *words = is_masked ? op->mask_words + slot * op->mask_stride : NULL;
    struct scanned found, masked;
    if (pelton_takes_few(op, slot))
        return take_allowed(op, *work, logits, slot, words);
    if (is_masked)
        masked = scan_masked(work, logits, vocab_size, words, &found);
    else
        found = scan(work, logits, vocab_size, divides && !is_changed ? temperature : 1.0f);
    if (!is_usable(found) && divides && !is_changed) /* the temperature may be too low to divide by */
        found = scan(work, logits, vocab_size, 1.0f), temperature = 0.0f;
    if (!is_usable(found))
        return (struct taken){0, NOT_FINITE};
    if (is_changed) {
        if (has_side(op, slot)) {
            apply_side_tables(op, slot, position, work->values);
            found = scan(work, work->values, vocab_size, 1.0f);
        } else {
            found = masked;
        }
        if (!is_usable(found))
            return (struct taken){0, NOTHING_ALLOWED};
        if (divides)
            found = scan(work, work->values, vocab_size, temperature);
    }
    if (temperature == 0.0f || isinf(found.best))
        return (struct taken){(int32_t)find(work->values, found.best), OK};
    return (struct taken){pick(op, work, slot, position, found.best), OK};
}

/* ---- logarithms of probabilities ---- */

/* Put a value where it belongs among the highest so far, behind equal ones. Returns how many there are. */
INLINE int64_t insert(float *values, int32_t *ids, int64_t count, int64_t room, float value, int32_t id) {
    int64_t place = count < room ? count : room - 1;
    for (; place > 0 && values[place - 1] < value; place--)
        values[place] = values[place - 1], ids[place] = ids[place - 1];
    values[place] = value, ids[place] = id;
    return count < room ? count + 1 : room;
}

/* The `number` highest values, of equal ones the first, and their places, in the list. */
static void find_highest(const struct work *work, int64_t vocab_size, int64_t number) {
    int64_t count = 0;
    for (; count < number; count++)
        insert(work->list, work->ids, count, number, work->values[count], (int32_t)count);
    for (int64_t i = count / LANES * LANES; i < work->width; i += LANES) {
        vec x = vec_load(work->values + i);
        for (uint32_t bits = vec_bits(x > work->list[number - 1]); bits; bits &= bits - 1) {
            int lane = __builtin_ctz(bits);
            if (i + lane >= count && i + lane < vocab_size && x[lane] > work->list[number - 1])
                insert(work->list, work->ids, number, number, x[lane], (int32_t)(i + lane));
        }
    }
}

/* Those of `chosen`, then of the `number` likeliest tokens. Returns the rank of `chosen`, from 1 on. */
static int64_t find_logprobs(const struct work *work, const float *logits, int64_t vocab_size, int64_t chosen, int64_t number,
                             int64_t *ids, float *logprobs) {
    struct scanned found = scan(work, logits, vocab_size, 1.0f);
    float own = logits[chosen];
    double total = 0.0;
    ivec above = {0};
    for (int64_t first = 0; first < work->width; first += CHUNK) {
        vec part = {0};
        for (int64_t i = first; i < first + CHUNK; i += LANES) {
            vec x = vec_load(work->values + i);
            above -= x > own;
            part += vec_exp(x - found.best);
        }
        total += sum_of_lanes(part);
    }
    int64_t rank = 1;
    for (int lane = 0; lane < LANES; lane++)
        rank += above[lane];
    float normalizer = found.has_nan ? NAN : (float)((double)found.best + log(total));
    ids[0] = chosen, logprobs[0] = own - normalizer;
    if (number > 0)
        find_highest(work, vocab_size, number);
    for (int64_t i = 0; i < number; i++)
        ids[1 + i] = work->ids[i], logprobs[1 + i] = work->list[i] - normalizer;
    return rank;
}

/* ---- calls ---- */

struct sampling {
    const struct sampler *op;
    const float *logits;
    int64_t stride;
    const int64_t *slots;
    int32_t *result;
    int has_failed;
};

static void sample_row(void *context, int64_t row, struct turn *turn) {
    struct sampling *sampling = context;
    const struct sampler *op = sampling->op;
    const float *logits = sampling->logits + row * sampling->stride;
    struct taken taken = {0, OK};
    int64_t slot = sampling->slots[row], width = 1 + op->num_logprobs;
    (void)turn;
    if (slot != op->batch->padding_slot) {
        struct work work;
        if (!make_work(&work, op->vocab_size)) {
            __atomic_store_n(&sampling->has_failed, 1, __ATOMIC_RELAXED);
            return;
        }
        taken = take(op, &work, logits, slot);
        if (op->logprob_ids != NULL && taken.code == OK)
            op->ranks[row] = find_logprobs(&work, logits, op->vocab_size, taken.token, op->num_logprobs, op->logprob_ids + row * width,
                                           op->logprobs + row * width);
    }
    sampling->result[2 * row] = taken.token, sampling->result[2 * row + 1] = taken.code;
}

/* logits: num_rows rows, `stride` numbers apart, left as they are; slots [num_rows]; result [num_rows, 2]: token and error code.
   Tokens are put into the batch and counted in the side tables; a row with an error has no logprobs. */
EXPORT int pelton_sample(const struct sampler *op, const float *logits, int64_t stride, const int64_t *slots, int64_t num_rows,
                         int32_t *result) {
    struct sampling sampling = {op, logits, stride, slots, result, 0};
    pool_run(num_rows, sample_row, &sampling);
    if (sampling.has_failed)
        return 1;
    for (int64_t row = 0; row < num_rows; row++) {
        const struct batch *batch = op->batch;
        int64_t slot = slots[row], token = result[2 * row];
        if (slot == batch->padding_slot)
            continue;
        if (op->is_partial != NULL)
            op->is_partial[slot] = 0;
        int64_t position = ++batch->num_computed_tokens[slot];
        batch->token_ids[slot * batch->token_stride + least(position, batch->max_model_len)] = (int32_t)token;
        if (has_side(op, slot))
            op->side->counts[op->side_slots[slot] * op->vocab_size + token]++;
    }
    return 0;
}

struct listing {
    const float *logits;
    int64_t stride, vocab_size;
    const int64_t *chosen;
    int64_t number, *ids;
    float *logprobs;
    int64_t *ranks;
    int has_failed;
};

static void list_row(void *context, int64_t row, struct turn *turn) {
    struct listing *listing = context;
    struct work work;
    int64_t width = 1 + listing->number;
    (void)turn;
    if (!make_work(&work, listing->vocab_size)) {
        __atomic_store_n(&listing->has_failed, 1, __ATOMIC_RELAXED);
        return;
    }
    listing->ranks[row] = find_logprobs(&work, listing->logits + row * listing->stride, listing->vocab_size, listing->chosen[row],
                                        listing->number, listing->ids + row * width, listing->logprobs + row * width);
}

/* Logprobs of given tokens, and of the `number` likeliest beside each: ids, logprobs [num_rows, 1 + number], ranks [num_rows]. */
EXPORT int pelton_logprobs(const float *logits, int64_t stride, int64_t vocab_size, const int64_t *chosen, int64_t num_rows,
                           int64_t number, int64_t *ids, float *logprobs, int64_t *ranks) {
    struct listing listing = {logits, stride, vocab_size, chosen, number, ids, logprobs, ranks, 0};
    pool_run(num_rows, list_row, &listing);
    return listing.has_failed;
}
