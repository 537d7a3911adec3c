// Softmax attention within a band on a CPU: each query attends to an interval of keys around it.
//
// A block is up to BLOCK consecutive queries of a head, one per SIMD lane, and the keys of their
// intervals, in tiles of KEY_TILE keys. The scores of a tile stay in the L1 cache, and online
// softmax merges the tiles, so memory is O(T (D + E)). The backward pass computes the scores again.
// A dilated band is an ordinary band over every d-th token. Masked keys are left out of the blocks,
// and global keys, to which every query attends, are a separate list. The result of a query does
// not depend on the other queries. Scores are base 2.
//
// Sums of another mechanism over the keys outside the band, such as linear attention's, may share the
// denominator: with the band's output n and log-sum-exp l, the sums u of values and s of weights, and
// their logit f, the output is (exp(l) n + exp(f) u) / (exp(l) + exp(f) s).
//
// work     one key head and the query heads that share it, or a part of their blocks
// reads    q, k, v of any floating type in place, with stride 1 in the last dimension; rows of keys
//          and values are copied into a ring buffer as long as the band, which stays in the cache
// writes   out, dq, dk and dv, with D and E rounded up to multiples of 16, as in all buffers
// oracle   longformer_attention(impl="reference"), float64 included
//
// Letters: B batch, H key heads, G query heads per key head, T queries, S keys, D key size, E value
// size, d dilation.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "checks.h"
#include "layout.h"
#include "rows.h"
#include "threads.h"
#include "tiles.h"

constexpr double MASKED_SCORE = -1e30;  // below every score
constexpr double EMPTY_LSE = -1e30;     // log-sum-exp of a query without keys
constexpr double MIN_WEIGHT = 1e-30;    // as in attnzoo/ops/hybrid/parts.py

template <class Real>
struct Task {
    int64_t threads, batch, heads, groups, queries, keys;
    int64_t key_size, value_size;     // D and E
    int64_t key_width, value_width;   // rounded up
    int64_t before, after, dilation;  // keys of the band on either side of the query's own
    int64_t offset;                   // position of query 0 among the keys
    int64_t causal;                   // whether later global keys are masked
    int64_t num_global;
    int64_t relative;                 // whether l counts as 0, so that f is relative to the band
    int64_t far_start, far_size;      // the first query with sums u and s; columns of u
    int64_t pieces;  // parts of the blocks of a key head; each has its own dk and dv
    int64_t out_steps[3], d_out_steps[3], far_steps[3];  // strides of batch, head, token
    double scale;                    // multiplies query-key products
    const int64_t* ids;              // [B, S]: segment ids, or null
    const uint8_t* key_mask;         // [B, S]: keys that the band contains; null: all
    const int64_t* global_keys;      // [B, num_global]: positions, increasing
    const uint8_t* global_is_valid;  // [B, num_global]
    Tensor q, k, v;
    Real *out, *lse;  // lse: [B, H G, T], natural logarithm
    const Real *far, *far_totals, *logit;  // u of queries from far_start on, or null; s, [B, H G,
                                           // T - far_start]; f, [B, H G, T]
    const Real *d_out, *d_lse;
    // [B, H G, T, D]; [pieces, B, H, S, D]; [pieces, B, H, S, E]; null: not needed
    Real *dq, *dk, *dv;
    Real *d_far, *d_far_totals, *d_logit;  // d_far: [B, H G, T - far_start, far_size]

    FIELDS(threads, batch, heads, groups, queries, keys, key_size, value_size, key_width,
           value_width, before, after, dilation, offset, causal, num_global, relative, far_start,
           far_size, pieces, out_steps, d_out_steps, far_steps, scale, ids, key_mask, global_keys,
           global_is_valid, q, k, v, out, lse, far, far_totals, logit, d_out, d_lse, dq, dk, dv,
           d_far, d_far_totals, d_logit)
};

// Keys of a block. Lane c attends to keys low[c] to high[c] - 1; low and high are non-decreasing.
template <class Real>
struct KeyList {
    int count = 0;
    int low[BLOCK], high[BLOCK];
    std::vector<int64_t> keys;
    std::vector<const Real*> k_rows, v_rows;

    // Make room for `most` keys, and begin an empty list.
    void resize(int64_t most) {
        count = 0;
        keys.resize(most), k_rows.resize(most + DOT_ROWS), v_rows.resize(most + DOT_ROWS);
    }

    void add(int64_t key, const Real* k, const Real* v) {
        keys[count] = key, k_rows[count] = k, v_rows[count] = v;
        ++count;
    }

    // Repeat the last row, so that groups of DOT_ROWS rows can be read.
    void pad() {
        for (int i = 0; i < DOT_ROWS && count; ++i)
            k_rows[count + i] = k_rows[count - 1], v_rows[count + i] = v_rows[count - 1];
    }
};

template <class Real>
class Worker : Tiles<Real>, Rows<Real> {
    using typename Math<Real>::Reals;
    using typename Math<Real>::Ints;
    using Math<Real>::LANES, Math<Real>::load, Math<Real>::store, Math<Real>::broadcast;
    using Math<Real>::exp2, Math<Real>::add_weighted_rows, Math<Real>::dot_products;
    using Tiles<Real>::transpose;
    using Rows<Real>::load_row;
    static constexpr int VECTORS = BLOCK / LANES;
    static constexpr int KEY_TILE = 128;  // keys of a tile; the L1 cache keeps its data

  public:
    Worker(const Task<Real>& task, int64_t unit)
        : t(task), row_(unit / t.pieces / t.heads), head_(unit / t.pieces % t.heads),
          piece_(unit % t.pieces), size_(t.key_width), width_(t.value_width),
          ring_(std::min(t.before + t.after + BLOCK, t.keys)), k_ring_(ring_ * size_),
          v_ring_(ring_ * width_), k_global_(t.num_global * size_),
          v_global_(t.num_global * width_), q_(BLOCK * size_), d_out_(BLOCK * width_),
          q_rows_(BLOCK * size_), d_out_rows_(BLOCK * width_), p_((KEY_TILE + DOT_ROWS) * BLOCK),
          dp_(p_.size()), sums_(BLOCK * std::max(size_, width_)),
          unused_(std::max(size_, width_)) {
        if (t.ids) find_segments(t.ids + row_ * t.keys);
        globals_.resize(t.num_global);
        for (int64_t i = 0; i < t.num_global; ++i) {
            if (!t.global_is_valid[row_ * t.num_global + i]) continue;
            const int64_t key = t.global_keys[row_ * t.num_global + i];
            Real *k = &k_global_[i * size_], *v = &v_global_[i * width_];
            copy_key(key, k, v);
            globals_.add(key, k, v);
        }
        globals_.pad();
    }

    void forward() {
        for_each_block([this] { attend(); });
    }

    // Write dq, and add to dk and dv; each only if it is needed.
    void backward() {
        if (needs_keys())
            for_each_block([this] { attend_backward(); });
        else
            for_each_block([this] { load_output_gradients(); }, false);
    }

  private:
    const Task<Real>& t;
    const int64_t row_, head_, piece_, size_, width_;
    const int64_t ring_;                           // rows of the ring buffers
    AlignedVector<Real> k_ring_, v_ring_;          // key i of the phase in row i % ring_
    AlignedVector<Real> k_global_, v_global_;      // of the global keys
    AlignedVector<Real> q_, d_out_;                // of the block, [rows, BLOCK]: columns of queries;
                                                   // q times scale and log2(e)
    AlignedVector<Real> q_rows_, d_out_rows_;      // of the block, a row per query, as in q_
    AlignedVector<Real> p_, dp_;                   // of a tile, [KEY_TILE, BLOCK]
    AlignedVector<Real> sums_;                     // [BLOCK, D or E]: output or dq of the block
    AlignedVector<Real> unused_;                   // gradients of rows beyond the last key
    std::vector<int64_t> segment_start_, segment_end_;  // [S]
    std::vector<int> number_;                      // per key of the block: keys before it in band_
    KeyList<Real> globals_, band_;
    int count_ = 0;         // queries of the block
    int64_t group_ = 0;     // query head within the key head
    int64_t first_ = 0;     // first query of the block; the others follow at steps of d
    Real max_[BLOCK] = {}, sum_[BLOCK] = {}, rescale_[BLOCK] = {};

    // Whether the gradients that are needed depend on the keys of the band.
    bool needs_keys() const { return t.dq || t.dk || t.dv; }

    // Whether the gradients of scores are needed.
    bool needs_scores() const { return t.dq || t.dk; }

    void copy_key(int64_t key, Real* k, Real* v) const {
        load_row(t.k.at(row_, head_, key), t.k.type, t.key_size, size_, Real(1), k);
        load_row(t.v.at(row_, head_, key), t.v.type, t.value_size, width_, Real(1), v);
    }

    // Return the row of the block's query c in a tensor with strides.
    template <class Pointer>
    Pointer query_row(Pointer x, const int64_t (&steps)[3], int c) const {
        return x + row_ * steps[0] + (head_ * t.groups + group_) * steps[1] +
               (first_ + c * t.dilation) * steps[2];
    }

    // Factors of the band's output and of u in the output.
    struct Mix {
        Real band, far;
        const Real* sums;  // u, or null
    };

    // Return the index of the block's query c among the queries with sums u, or a negative number.
    int64_t far_number(int c) const { return first_ + c * t.dilation - t.far_start; }

    const Real* far_row(int c) const {
        return t.far + row_ * t.far_steps[0] + (head_ * t.groups + group_) * t.far_steps[1] +
               far_number(c) * t.far_steps[2];
    }

    // Return the index of the block's query c in a contiguous [B, H G, T - far_start].
    int64_t far_index(int c) const {
        const int64_t head = (row_ * t.heads + head_) * t.groups + group_;
        return head * (t.queries - t.far_start) + far_number(c);
    }

    Mix mix(int c, Real lse) const {
        if (!t.far || far_number(c) < 0) return {1, 0, nullptr};
        const Real* sums = far_row(c);
        const Real total = t.far_totals[far_index(c)];
        if (!(total > Real(MIN_WEIGHT))) return {1, 0, nullptr};
        const Real band = t.relative ? 0 : lse;
        const Real far = t.logit[query_number(c)] + std::log(total);
        const Real largest = std::max(band, far);
        const Real band_weight = std::exp(band - largest), far_weight = std::exp(far - largest);
        const Real sum = band_weight + far_weight;
        return {band_weight / sum, far_weight / sum / total, sums};
    }

    // Return the index of the block's query c in a contiguous [B, H G, T].
    int64_t query_number(int c) const {
        return ((row_ * t.heads + head_) * t.groups + group_) * t.queries + first_ +
               c * t.dilation;
    }

    void find_segments(const int64_t* ids) {
        segment_start_.resize(t.keys), segment_end_.resize(t.keys);
        for (int64_t from = 0, to; from < t.keys; from = to) {
            for (to = from; to < t.keys && ids[to] == ids[from]; ++to) segment_start_[to] = from;
            std::fill(&segment_end_[from], &segment_end_[from] + (to - from), to);
        }
    }

    // -- blocks --------------------------------------------------------------------------------

    // Call work() for each block, after listing its keys if `with_keys`. A phase contains every
    // d-th token.
    template <class Work>
    void for_each_block(Work work, bool with_keys = true) {
        const int64_t d = t.dilation;
        for (group_ = 0; group_ < t.groups; ++group_)
            for (int64_t phase = 0; phase < std::min(d, t.keys); ++phase) {
                const int64_t first = ((phase - t.offset) % d + d) % d;  // query of the phase
                if (first >= t.queries) continue;
                const int64_t queries = (t.queries - first + d - 1) / d;
                const int64_t blocks = (queries + BLOCK - 1) / BLOCK;
                int64_t copied = 0;  // end of the keys of the phase that were copied to the rings
                const int64_t end = piece_start(piece_ + 1, phase, first, blocks);
                for (int64_t i = piece_start(piece_, phase, first, blocks); i < end; ++i) {
                    count_ = (int)std::min<int64_t>(BLOCK, queries - i * BLOCK);
                    first_ = first + i * BLOCK * d;
                    prefetch(queries - i * BLOCK);
                    if (with_keys) {
                        list_keys(phase, copied);
                        list_globals();
                    }
                    work();
                }
            }
    }

    // Return the first block of a piece. The blocks of each piece have about as many keys in total.
    int64_t piece_start(int64_t piece, int64_t phase, int64_t first, int64_t blocks) const {
        if (piece == 0 || piece == t.pieces) return piece * blocks / t.pieces;
        const int64_t d = t.dilation, count = (t.keys - phase + d - 1) / d;
        const auto keys = [&](int64_t i) {
            const int64_t center = (t.offset + first - phase) / d + i * BLOCK;
            return std::min(center + BLOCK + t.after, count) - std::max<int64_t>(center - t.before, 0);
        };
        int64_t total = 0, seen = 0, i = 0;
        for (int64_t j = 0; j < blocks; ++j) total += keys(j);
        while (i < blocks && seen < total * piece / t.pieces) seen += keys(i++);
        return i;
    }

    // Prefetch the rows that the block reads and writes at its end, and the queries of the next
    // block. Always inlined, because GCC 12 removes calls of functions that only prefetch.
    inline __attribute__((always_inline)) void prefetch(int64_t queries) const {
        const auto row = [](const Real* x, int64_t size) __attribute__((always_inline)) {
            for (int64_t i = 0; i < size; i += 64 / sizeof(Real)) __builtin_prefetch(x + i);
        };
        for (int c = 0; c < count_; ++c) row(query_row(t.out, t.out_steps, c), width_);
        for (int c = 0; t.far && c < count_; ++c)
            if (far_number(c) >= 0) row(far_row(c), t.far_size);
        for (int c = BLOCK; c < std::min<int64_t>(2 * BLOCK, queries); ++c)
            t.q.prefetch(row_, head_ * t.groups + group_, first_ + c * t.dilation, 0, t.key_size);
        for (int c = BLOCK; c < 2 * BLOCK; ++c) {
            const int64_t key = t.offset + first_ + (c + t.after) * t.dilation;
            if (key >= t.keys) break;
            t.k.prefetch(row_, head_, key, 0, t.key_size);
            t.v.prefetch(row_, head_, key, 0, t.value_size);
        }
    }

    // List the keys of the block's queries. Indices of keys count the tokens of the phase from 0.
    void list_keys(int64_t phase, int64_t& copied) {
        const int64_t d = t.dilation, count = (t.keys - phase + d - 1) / d;
        const int64_t center = (t.offset + first_ - phase) / d;
        int64_t low[BLOCK], high[BLOCK];
        for (int c = 0; c < BLOCK; ++c) {
            const int64_t query = center + std::min(c, count_ - 1);
            low[c] = std::clamp<int64_t>(query - t.before, 0, count);
            high[c] = std::min(query + t.after + 1, count);
            if (t.ids) {
                const int64_t position = std::min(phase + query * d, t.keys - 1);
                low[c] = std::max(low[c], (segment_start_[position] - phase + d - 1) / d);
                high[c] = std::min(high[c], (segment_end_[position] - phase + d - 1) / d);
            }
            high[c] = std::max(low[c], high[c]);
        }
        const int64_t begin = low[0], end = high[BLOCK - 1];
        const uint8_t* mask = t.key_mask ? t.key_mask + row_ * t.keys + phase : nullptr;
        for (copied = std::max(copied, begin); copied < end; ++copied) {
            if (mask && !mask[copied * d]) continue;
            const int64_t row = copied % ring_;
            copy_key(phase + copied * d, &k_ring_[row * size_], &v_ring_[row * width_]);
        }
        band_.resize(end - begin);
        number_.resize(end - begin + 1);
        int64_t at = begin % ring_;
        for (int64_t i = begin; i < end; ++i) {
            number_[i - begin] = band_.count;
            if (!mask || mask[i * d])
                band_.add(phase + i * d, &k_ring_[at * size_], &v_ring_[at * width_]);
            at = at + 1 == ring_ ? 0 : at + 1;
        }
        number_[end - begin] = band_.count;
        for (int c = 0; c < BLOCK; ++c) {
            band_.low[c] = number_[low[c] - begin];
            band_.high[c] = number_[high[c] - begin];
        }
        band_.pad();
    }

    void list_globals() {
        for (int c = 0; c < BLOCK; ++c) {
            const int64_t position = t.offset + first_ + std::min(c, count_ - 1) * t.dilation;
            int seen = c ? globals_.high[c - 1] : 0;
            while (seen < globals_.count && (!t.causal || globals_.keys[seen] <= position)) ++seen;
            globals_.low[c] = 0, globals_.high[c] = seen;
        }
    }

    // Call work(keys, start, width) for each tile of the block.
    template <class Work>
    void for_each_tile(Work work) {
        for (const KeyList<Real>* keys : {&globals_, &band_})
            for (int start = keys->low[0]; start < keys->high[BLOCK - 1]; start += KEY_TILE)
                work(*keys, start, std::min(KEY_TILE, keys->high[BLOCK - 1] - start));
    }

    // Load the block's rows with load(c, row), and transpose them.
    template <class Load>
    void load_rows(int64_t size, AlignedVector<Real>& rows, AlignedVector<Real>& columns,
                   Load load) const {
        for (int c = 0; c < count_; ++c) load(c, &rows[c * size]);
        std::fill(rows.begin() + count_ * size, rows.end(), Real(0));
        transpose(rows.data(), size, BLOCK, size, columns.data(), BLOCK);
    }

    void load_queries() {
        const int64_t head = head_ * t.groups + group_;
        load_rows(size_, q_rows_, q_, [&](int c, Real* row) {
            load_row(t.q.at(row_, head, first_ + c * t.dilation), t.q.type, t.key_size, size_,
                     Real(t.scale * LOG2_E), row);
        });
    }

    // -- tiles ---------------------------------------------------------------------------------

    // Keys of a tile: some lanes attend to keys begin to end - 1, and all lanes attend to keys
    // plain_begin to plain_end - 1.
    struct Range {
        int begin, end, plain_begin, plain_end;
    };

    // Return the range of `lanes` lanes from `lane` on.
    static Range range(const KeyList<Real>& keys, int lane, int lanes, int start, int width) {
        const auto clamp = [&](int key) { return std::clamp(key - start, 0, width); };
        Range found{clamp(keys.low[lane]), clamp(keys.high[lane + lanes - 1]),
                    clamp(keys.low[lane + lanes - 1]), clamp(keys.high[lane])};
        found.end = std::max(found.begin, found.end);
        found.plain_begin = std::min(found.plain_begin, found.end);
        found.plain_end = std::max(found.plain_begin, found.plain_end);
        return found;
    }

    // Return the range of a vector of lanes, extended to groups of DOT_ROWS keys.
    static Range vector_range(const KeyList<Real>& keys, int lane, int start, int width) {
        Range found = range(keys, lane, LANES, start, width);
        if (found.begin == found.end) return found;
        found.begin = found.begin / DOT_ROWS * DOT_ROWS;
        found.end = (found.end + DOT_ROWS - 1) / DOT_ROWS * DOT_ROWS;
        return found;
    }

    // out[w][:] = sum over d of rows[w][d] columns[d][:], for the ranges of keys.
    static void multiply(const Real* const* rows, const AlignedVector<Real>& columns, int64_t depth,
                         const Range (&ranges)[VECTORS], int width, Real* out) {
        for (int w = 0; w < width; w += DOT_ROWS) {
            bool needed[2] = {false, false};
            for (int i = 0; i < VECTORS; ++i)
                needed[i >= VECTORS / 2] |= ranges[i].begin <= w && w < ranges[i].end;
            Real* to = out + w * BLOCK;
            if (needed[0] && needed[1])
                multiply<VECTORS>(rows + w, columns.data(), depth, to);
            else if (needed[0])
                multiply<VECTORS / 2>(rows + w, columns.data(), depth, to);
            else if (needed[1])
                multiply<VECTORS / 2>(rows + w, columns.data() + BLOCK / 2, depth, to + BLOCK / 2);
        }
    }

    template <int V>
    static void multiply(const Real* const* rows, const Real* columns, int64_t depth, Real* out) {
        Reals sums[DOT_ROWS][V];
        dot_products(rows, columns, depth, sums);
        for (int r = 0; r < DOT_ROWS; ++r)
            for (int i = 0; i < V; ++i) store(out + r * BLOCK + i * LANES, sums[r][i]);
    }

    // For the scores of a vector of lanes, call plain(index) for keys to which all lanes attend,
    // and each(index, attended) for the others; `attended` is the mask of lanes that attend to the
    // key.
    template <class Each, class Plain>
    static void for_each_score(const KeyList<Real>& keys, const Range& range, int lane, int start,
                               Plain plain, Each each) {
        Ints low, high;
        for (int i = 0; i < LANES; ++i)
            low[i] = keys.low[lane + i] - start, high[i] = keys.high[lane + i] - start;
        int w = range.begin;
        for (; w < range.plain_begin; ++w) each(w * BLOCK + lane, (low <= w) & (high > w));
        for (; w < range.plain_end; ++w) plain(w * BLOCK + lane);
        for (; w < range.end; ++w) each(w * BLOCK + lane, (low <= w) & (high > w));
    }

    // -- forward and backward ------------------------------------------------------------------

    void attend() {
        load_queries();
        std::fill_n(max_, BLOCK, Real(MASKED_SCORE));
        std::fill_n(sum_, BLOCK, Real(0));
        std::fill_n(sums_.begin(), BLOCK * width_, Real(0));
        for_each_tile([this](const KeyList<Real>& keys, int start, int width) {
            attend(keys, start, width);
        });
        for (int c = 0; c < count_; ++c) {
            const Real inverse = sum_[c] == 0 ? 0 : 1 / sum_[c];  // NaN stays NaN
            const Real lse =
                sum_[c] == 0 ? Real(EMPTY_LSE) : Real((max_[c] + std::log2(sum_[c])) / LOG2_E);
            t.lse[query_number(c)] = lse;
            const Mix weights = mix(c, lse);
            const Real factor = inverse * weights.band;
            Real* out = query_row(t.out, t.out_steps, c);
            for (int64_t e = 0; e < width_; ++e) out[e] = sums_[c * width_ + e] * factor;
            if (weights.sums)
                for (int64_t e = 0; e < t.far_size; ++e) out[e] += weights.far * weights.sums[e];
        }
    }

    // The weight of a score, given the log-sum-exp, which for large scores is rounded by more than
    // 1: weights are at most 1. NaN stays NaN.
    static Reals weight_after(Reals score, Reals lse) {
        const Reals x = score - lse;
        return exp2(x > Real(0) ? Reals{} : x);
    }

    void attend(const KeyList<Real>& keys, int start, int width) {
        Range ranges[VECTORS];
        for (int i = 0; i < VECTORS; ++i) ranges[i] = vector_range(keys, i * LANES, start, width);
        multiply(&keys.k_rows[start], q_, size_, ranges, width, p_.data());
        for (int i = 0; i < VECTORS; ++i) {
            const int lane = i * LANES;
            const Reals before = load(max_ + lane);
            Reals maximum = before;
            for_each_score(
                keys, ranges[i], lane, start,
                [&](int at) {
                    const Reals value = load(&p_[at]);
                    maximum = value > maximum ? value : maximum;
                },
                [&](int at, Ints attended) {
                    const Reals value = attended ? load(&p_[at]) : broadcast(MASKED_SCORE);
                    maximum = value > maximum ? value : maximum;
                });
            const Reals rescale = exp2(before - maximum);
            Reals sum = load(sum_ + lane) * rescale;
            for_each_score(
                keys, ranges[i], lane, start,
                [&](int at) {
                    const Reals weight = exp2(load(&p_[at]) - maximum);
                    store(&p_[at], weight);
                    sum += weight;
                },
                [&](int at, Ints attended) {
                    const Reals weight = attended ? exp2(load(&p_[at]) - maximum) : Reals{};
                    store(&p_[at], weight);
                    sum += weight;
                });
            store(max_ + lane, maximum);
            store(sum_ + lane, sum);
            store(rescale_ + lane, rescale);
        }
        add_values(keys, start, width);
    }

    // Add the values, weighted, to the rescaled sums.
    void add_values(const KeyList<Real>& keys, int start, int width) {
        for (int c = 0; c < count_; c += SUM_ROWS) {
            const Range own = range(keys, c, SUM_ROWS, start, width);
            if (own.begin == own.end) continue;
            Real* out[SUM_ROWS];
            for (int r = 0; r < SUM_ROWS; ++r) out[r] = &sums_[(c + r) * width_];
            add_weighted_rows(out, rescale_ + c, &p_[c], 1, BLOCK, &keys.v_rows[start],
                              {own.begin, own.end}, width_);
        }
    }

    void attend_backward() {
        // Also in lanes beyond the last query, where scores and their gradients are 0
        for (Real* x : {max_, sum_}) std::fill_n(x, BLOCK, Real(0));
        std::fill_n(sums_.begin(), BLOCK * size_, Real(0));
        load_queries();
        load_output_gradients();
        for_each_tile([this](const KeyList<Real>& keys, int start, int width) {
            attend_backward(keys, start, width);
        });
        for (int c = 0; t.dq && c < count_; ++c) {
            Real* dq = t.dq + query_number(c) * size_;
            const Real factor = Real(t.scale * LOG2_E);
            for (int64_t d = 0; d < size_; ++d) dq[d] = sums_[c * size_ + d] * factor;
        }
    }

    void load_output_gradients() {
        load_rows(width_, d_out_rows_, d_out_, [this](int c, Real* d_out) {
            std::copy_n(query_row(t.d_out, t.d_out_steps, c), width_, d_out);
            differentiate_output(c, d_out);
        });
    }

    // Return a * b + c, rounded like the products of d_out and values, so that the gradient of a
    // query that attends to one key is exactly 0.
    static Real multiply_add(Real a, Real b, Real c) {
#ifdef __FMA__
        return std::fma(a, b, c);
#else
        return a * b + c;
#endif
    }

    // Replace the gradient of the output of query c by that of the band's output, and write those
    // of u, s and the logit. max_ becomes the log-sum-exp in base 2, and sum_ the band's output
    // times its gradient minus the gradient of the log-sum-exp.
    void differentiate_output(int c, Real* d_out) {
        const int64_t number = query_number(c), far = far_number(c);
        const Real* out = query_row(t.out, t.out_steps, c);
        Real delta = 0, far_delta = 0, d_lse = t.d_lse ? t.d_lse[number] : Real(0);
        for (int64_t e = 0; e < width_; ++e) delta = multiply_add(out[e], d_out[e], delta);
        const Mix weights = mix(c, t.lse[number]);
        if (t.far && far >= 0) {
            Real* d_far = t.d_far + far_index(c) * t.far_size;
            for (int64_t e = 0; e < t.far_size; ++e) d_far[e] = weights.far * d_out[e];
            t.d_far_totals[far_index(c)] = -weights.far * delta;
        }
        if (weights.sums) {
            for (int64_t e = 0; e < t.far_size; ++e) far_delta += weights.sums[e] * d_out[e];
            t.d_logit[number] = weights.far * (far_delta - t.far_totals[far_index(c)] * delta);
            const Real band_delta = delta - weights.far * far_delta;
            if (!t.relative) d_lse += band_delta - weights.band * delta;
            delta = band_delta;
            for (int64_t e = 0; e < width_; ++e) d_out[e] *= weights.band;
        }
        max_[c] = t.lse[number] * Real(LOG2_E);
        sum_[c] = delta - d_lse;
    }

    void attend_backward(const KeyList<Real>& keys, int start, int width) {
        Range ranges[VECTORS];
        for (int i = 0; i < VECTORS; ++i) ranges[i] = vector_range(keys, i * LANES, start, width);
        multiply(&keys.k_rows[start], q_, size_, ranges, width, p_.data());
        if (needs_scores())
            multiply(&keys.v_rows[start], d_out_, width_, ranges, width, dp_.data());
        for (int i = 0; i < VECTORS; ++i) {
            const int lane = i * LANES;
            const Reals lse = load(max_ + lane);
            for_each_score(
                keys, ranges[i], lane, start,
                [&](int at) {
                    const Reals weight = weight_after(load(&p_[at]), lse);
                    store(&dp_[at], score_gradient(at, lane, weight));
                    store(&p_[at], weight);
                },
                [&](int at, Ints attended) {
                    const Reals weight = weight_after(load(&p_[at]), lse);
                    store(&dp_[at], attended ? score_gradient(at, lane, weight) : Reals{});
                    store(&p_[at], attended ? weight : Reals{});
                });
            clear_others(ranges[i], lane, width, p_);
            clear_others(ranges[i], lane, width, dp_);
        }
        if (t.dq) add_query_gradients(keys, start, width);
        if (t.dk || t.dv) add_key_gradients(keys, start, width);
    }

    // Return the gradients of scores from the weights and the gradients of weights.
    Reals score_gradient(int at, int lane, Reals weight) const {
        return weight * (load(&dp_[at]) - load(sum_ + lane)) * Real(1 / LOG2_E);
    }

    void add_query_gradients(const KeyList<Real>& keys, int start, int width) {
        for (int c = 0; c < count_; c += SUM_ROWS) {
            const Range own = range(keys, c, SUM_ROWS, start, width);
            if (own.begin == own.end) continue;
            Real* dq[SUM_ROWS];
            for (int r = 0; r < SUM_ROWS; ++r) dq[r] = &sums_[(c + r) * size_];
            add_weighted_rows(dq, nullptr, &dp_[c], 1, BLOCK, &keys.k_rows[start],
                              {own.begin, own.end}, size_);
        }
    }

    // Set the weights of LANES queries to 0 for all keys of the tile outside of a range.
    static void clear_others(const Range& range, int lane, int width,
                             AlignedVector<Real>& weights) {
        const int rows = width + SUM_ROWS;
        for (int w = 0; w < range.begin; ++w) store(&weights[w * BLOCK + lane], Reals{});
        for (int w = range.end; w < rows; ++w) store(&weights[w * BLOCK + lane], Reals{});
    }

    void add_key_gradients(const KeyList<Real>& keys, int start, int width) {
        const int64_t first = ((piece_ * t.batch + row_) * t.heads + head_) * t.keys;
        const Real *q_rows[BLOCK], *d_out_rows[BLOCK];
        for (int c = 0; c < count_; ++c)
            q_rows[c] = &q_rows_[c * size_], d_out_rows[c] = &d_out_rows_[c * width_];
        int from = 0, to = 0;
        for (int w = 0; w < width; w += SUM_ROWS) {
            while (from < count_ && keys.high[from] <= start + w) ++from;
            while (to < count_ && keys.low[to] < start + w + SUM_ROWS) ++to;
            if (from >= to) continue;
            Real *dk[SUM_ROWS], *dv[SUM_ROWS];
            for (int r = 0; r < SUM_ROWS; ++r) {
                const bool valid = w + r < width;
                const int64_t key = first + keys.keys[start + std::min(w + r, width - 1)];
                dk[r] = valid && t.dk ? t.dk + key * size_ : unused_.data();
                dv[r] = valid && t.dv ? t.dv + key * width_ : unused_.data();
            }
            const Real *p = &p_[w * BLOCK], *dp = &dp_[w * BLOCK];
            if (t.dk) add_weighted_rows(dk, nullptr, dp, BLOCK, 1, q_rows, {from, to}, size_);
            if (t.dv) add_weighted_rows(dv, nullptr, p, BLOCK, 1, d_out_rows, {from, to}, width_);
        }
    }
};

// Return whether the queries and the global keys are among the keys.
template <class Real>
static bool are_positions(const Task<Real>& t) {
    for (int64_t i = 0; i < t.batch * t.num_global; ++i)
        if (t.global_is_valid[i] && (t.global_keys[i] < 0 || t.global_keys[i] >= t.keys))
            return false;
    return t.offset >= 0 && t.offset <= t.keys - t.queries;
}

// Refused if queries or global keys are outside of the keys.
template <class Real>
static int64_t run(const Task<Real>& task, bool backward) {
    if (!are_positions(task)) return REFUSED;
    in_threads(task.batch * task.heads * task.pieces, task.threads, [&](int64_t unit) {
        Worker<Real> worker(task, unit);
        backward ? worker.backward() : worker.forward();
    });
    return ACCEPTED;
}

extern "C" int64_t band_forward_float(const Task<float>* task) { return run(*task, false); }
extern "C" int64_t band_backward_float(const Task<float>* task) { return run(*task, true); }
extern "C" int64_t band_forward_double(const Task<double>* task) { return run(*task, false); }
extern "C" int64_t band_backward_double(const Task<double>* task) { return run(*task, true); }

CALLED_FROM_PYTHON(band_forward_float, band_backward_float, band_forward_double,
                   band_backward_double)
