// Causal linear attention in bfloat16 on the tiles of AMX.
//
// The formulas and letters are those of linear.cpp. A chunk has at most AMX_CHUNK tokens. Operands
// of products are bfloat16 numbers, and sums are floats, with these rules for precision:
//
//     features and scores    are rounded. Sums of keys and denominators add the same rounded
//                            numbers, so that values that all equal 1 give outputs of 1
//     states                 are floats; a product takes them as the sum of two bfloat16 matrices,
//                            their rounded values and the rounded rest, with an error of 2^-17
//     decays                 multiply floats before they are rounded
//
// reads    queries, keys and values in bfloat16; at most one decay per token
// oracle   linear_attention(impl="reference") in float64

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "amx.h"
#include "linear_chunk.h"

constexpr int AMX_CHUNK = 64;

// Whether AMX computes a task. For sequences of half a chunk or less, it takes longer.
static bool uses_amx(const Task<float>& t) {
    const bool narrow = t.q.type == BFLOAT16 && t.k.type == BFLOAT16 && t.v.type == BFLOAT16;
    const bool supported = t.decays <= 1 && t.chunk >= CHUNK;
    if (!narrow || !supported || !Amx::is_available()) return false;
    int64_t sequences;
    const int64_t tokens = t.count_tokens(&sequences);
    return tokens > sequences * AMX_CHUNK / 2;
}

// Blocks of memory that one thread at a time takes, filled with zeros.
class Workspace {
    std::deque<std::vector<float>> blocks_;
    size_t used_ = 0;

  public:
    float* take(int64_t size) {
        if (used_ == blocks_.size()) blocks_.emplace_back();
        std::vector<float>& block = blocks_[used_++];
        block.assign(size + VECTOR_BYTES / sizeof(float), 0);
        const uintptr_t start = reinterpret_cast<uintptr_t>(block.data()) + VECTOR_BYTES - 1;
        return reinterpret_cast<float*>(start / VECTOR_BYTES * VECTOR_BYTES);
    }

    void free_blocks() { used_ = 0; }
};

// The workspaces of a call. Pieces of work use them one after the other: if each allocated its own,
// the system would clear new pages for each one, which took a tenth of the time.
class Workspaces {
    std::mutex mutex_;
    std::vector<std::unique_ptr<Workspace>> free_;

  public:
    std::unique_ptr<Workspace> take() {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (free_.empty()) return std::make_unique<Workspace>();
        std::unique_ptr<Workspace> taken = std::move(free_.back());
        free_.pop_back();
        return taken;
    }

    void put_back(std::unique_ptr<Workspace> taken) {
        taken->free_blocks();
        const std::lock_guard<std::mutex> lock(mutex_);
        free_.push_back(std::move(taken));
    }
};

class AmxAttention : protected TokenChunk<float, AMX_CHUNK> {
  public:
    using Memory = Workspaces;

  protected:
    using Base = TokenChunk<float, AMX_CHUNK>;
    using Tile = Tiles<float>;
    using typename Base::Reals;
    using Base::LANES, Base::load, Base::store, Base::broadcast, Base::lane_numbers;
    static constexpr int N = AMX_CHUNK;
    static constexpr int BLOCK_ROWS = 16;  // rows that a feature map computes at once

    const Amx amx_;
    const int64_t size_, depth_;  // D, rounded up to multiples of 16 and of 32
    int64_t tokens_ = 0;          // of the chunk, rounded up to a multiple of 32
    FeatureMap<float> k_map_;
    std::deque<FeatureMap<float>> q_maps_;  // one per query head
    const bool is_elu_;                     // whether the map is elu + 1, which needs no FeatureMap
    const int64_t given_;                   // size of rows before a FeatureMap, rounded up, or 0
    Memory& memory_;
    std::unique_ptr<Workspace> workspace_;
    const float* zeros_;               // [D] or [P]
    float *before_, *after_, *pairs_;  // products of decays: [N] twice; between tokens, [N, N]
    float total_ = 1;                  // decay of the state over the chunk

    AmxAttention(const Task<float>& task, Memory& memory, int64_t head, int64_t group,
                 int64_t groups, int64_t column, int64_t columns)
        : Base(task, head, group, groups, column, columns, N), size_(pad(t.key_size)),
          depth_(pad_words(t.key_size)), k_map_(task.k_map, head, task.given_size),
          is_elu_(t.k_map.kind == ELU_PLUS_ONE && !t.k_map.weight),
          given_(k_map_.is_identity() || is_elu_ ? 0 : pad(task.given_size)),
          memory_(memory), workspace_(memory.take()),
          zeros_(new_floats(std::max(depth_, pad_words(columns)))),
          before_(new_floats(t.decays * N)), after_(new_floats(t.decays * N)),
          pairs_(new_floats(t.decays * N * N)) {
        for (int64_t g = 0; g < groups; ++g)
            q_maps_.emplace_back(task.q_map, head * task.groups + group + g, task.given_size);
    }

    ~AmxAttention() { memory_.put_back(std::move(workspace_)); }

    // Round a size up to a multiple of 32, the depth of a product.
    static int64_t pad_words(int64_t size) { return (size + 31) / 32 * 32; }

    // Features of rows of a chunk, and what they are computed from, see feature_maps.h.
    struct Features {
        float *given, *y, *f;  // [rows, given_], [rows, D], [rows, D]
        int64_t rows;          // N, or BLOCK_ROWS: then only those of the last rows are kept
        float* words;          // [N, D]: features, rounded
        float* decayed;        // [N, D]: features times decays, rounded; or null
        int64_t pitch;         // of both, in words
    };

    // Return memory that is filled with zeros.
    float* new_floats(int64_t size) { return workspace_->take(size); }

    Features new_features(int64_t rows) {
        return {new_floats(rows * given_), new_floats(rows * size_), new_floats(rows * size_),
                rows, new_floats(N * depth_ / 2), nullptr, depth_ / 2};
    }

    // Begin the chunk that begins at `start`, and compute its decays.
    void begin_chunk(int64_t start) {
        this->begin(start);
        tokens_ = pad_words(count_);
        if (!t.decays) return;
        this->multiply_decays(before_, after_, pairs_);
        total_ = before_[N - 1];
    }

    // Load the rows `first` to `end` - 1 of queries or keys, and compute their features, which are 0
    // for rows that are not valid. `decays` multiply those in `decayed`; `factor` multiplies rows
    // without a FeatureMap.
    void load_features(const Tensor& x, int64_t head, FeatureMap<float>& map, const bool* valid,
                       float factor, const float* decays, int first, int end,
                       const Features& out) const {
        if (!given_) {
            copy_rows(x, head, 0, t.key_size, valid, first, end, zeros_, depth_, out.words,
                      out.pitch);
            if (is_elu_ || factor != 1 || out.decayed)
                for (int i = first; i < end; ++i)
                    map_words(out.words + (i - first) * out.pitch, valid[i] ? factor : 0,
                              out.decayed ? decays[i] : 1,
                              out.decayed ? out.decayed + (i - first) * out.pitch : nullptr);
            return;
        }
        for (int i = first; i < end; i += BLOCK_ROWS) {
            const int64_t row = i - first, kept = out.rows == N ? row : 0;
            float* f = out.f + kept * size_;
            float* given = out.given + kept * given_;
            this->load_block(x, head, 0, t.given_size, given_, 1, i, i + BLOCK_ROWS, given);
            map.features(given, valid + i, out.y + kept * size_, f);
            for (int r = 0; r < BLOCK_ROWS; ++r, f += size_) {
                Amx::round_padded_row(f, size_, out.words + (row + r) * out.pitch);
                if (out.decayed)
                    round_scaled(f, decays[i + r], out.decayed + (row + r) * out.pitch);
            }
        }
    }

    static Reals elu_plus_one(Reals x) {
        return x > 0.f ? x + 1.f : Amx::exp2(x * float(LOG2_E));
    }

    // Compute the features of a row of words in place, times a factor, and those times a decay.
    void map_words(float* words, float factor, float decay, float* decayed) const {
        for (int64_t w = 0; w < depth_ / 2; w += LANES) {
            const Words x = (Words)load(words + w);
            Reals even = (Reals)(x << 16), odd = (Reals)(x & 0xffff0000u);
            if (is_elu_) even = elu_plus_one(even), odd = elu_plus_one(odd);
            even *= factor, odd *= factor;
            store(words + w, Amx::pairs(even, odd));
            if (decayed) store(decayed + w, Amx::pairs(even * decay, odd * decay));
        }
        if (!is_elu_) return;  // a feature of 0 is not 0; D is a multiple of 16
        std::fill(words + size_ / 2, words + depth_ / 2, 0.f);
        if (decayed) std::fill(decayed + size_ / 2, decayed + depth_ / 2, 0.f);
    }

    // Copy the rows `first` to `end` - 1 of a bfloat16 tensor to rows of words of `padded` numbers.
    // Elements after `size` are those of `rest`. Rows that are not valid are 0.
    void copy_rows(const Tensor& x, int64_t head, int64_t column, int64_t size, const bool* valid,
                   int first, int end, const float* rest, int64_t padded, float* words,
                   int64_t pitch) const {
        const int64_t whole = size / 32 * 16, count = size - 2 * whole;  // words; numbers
        for (int i = first; i < end; ++i, words += pitch) {
            if (!valid[i]) {
                std::fill_n(words, padded / 2, 0.f);
                continue;
            }
            const char* from = x.at(s_.row, head, start_ + i, column);
            for (int64_t w = 0; w < whole; w += LANES)
                store(words + w, load((const float*)from + w));
            for (int64_t w = whole; w < padded / 2; w += LANES) store(words + w, load(rest + w));
            if (count) std::memcpy(words + whole, (const float*)from + whole, 2 * count);
        }
    }

    // Multiply a row of features, and round it.
    void round_scaled(const float* x, float factor, float* words) const {
        for (int64_t d = 0; d < size_; d += 32) {
            float row[32] = {};
            Tile::scale_row(x + d, factor, std::min<int64_t>(32, size_ - d), row);
            Amx::round_row(row, 32, words + d / 2);
        }
    }

    // Compute pairs of rows from rows of words: [rows, size] -> [rows / 2, size].
    static void pair_rows(const float* words, int64_t words_pitch, int64_t rows, int64_t size,
                          float* pairs, int64_t pitch) {
        for (int64_t i = 0; i < rows / 2; ++i)
            Amx::pair_words(words + 2 * i * words_pitch, words + (2 * i + 1) * words_pitch, size,
                            pairs + i * pitch);
    }

    // Compute pairs of rows of a bfloat16 tensor, [tokens / 2, padded]. Elements after `size` are
    // those of `rest`. Rows that are not valid are 0.
    void pair_tensor_rows(const Tensor& x, int64_t head, int64_t column, int64_t size,
                          const bool* valid, const float* rest, int64_t padded, float* pairs,
                          int64_t pitch) const {
        const int64_t whole = size / 32 * 32;
        float copies[2][16];
        for (int i = 0; i < tokens_; i += 2, pairs += pitch) {
            const float *rows[2], *ends[2];
            for (int j = 0; j < 2; ++j) {
                rows[j] = ends[j] = zeros_;
                if (!valid[i + j]) continue;
                rows[j] = (const float*)x.at(s_.row, head, start_ + i + j, column);
                ends[j] = rest + whole / 2;
                if (whole == size) continue;
                std::copy_n(ends[j], 16, copies[j]);
                std::memcpy(copies[j], rows[j] + whole / 2, 2 * (size - whole));
                ends[j] = copies[j];
            }
            Amx::pair_words(rows[0], rows[1], whole, pairs);
            if (whole < padded) Amx::pair_words(ends[0], ends[1], 32, pairs + whole);
        }
    }

    // Store a row of token i of the chunk.
    void store_fast(const float* row, int64_t size, const Tensor& x, int64_t head, int64_t i,
                    int64_t column) const {
        char* to = x.at(s_.row, head, start_ + i, column);
        if (x.type == BFLOAT16 && size % 32 == 0) Amx::round_row(row, size, (float*)to);
        else this->store_row(row, size, to, x.type);
    }

    // The elements of a row of words from element d on, as floats.
    static Reals widen(const float* words, int64_t d) {
        HalfWords bits;
        std::memcpy(&bits, (const char*)words + 2 * d, sizeof bits);
        return (Reals)(__builtin_convertvector(bits, Words) << 16);
    }

    // Floats rounded to bfloat16 numbers.
    static Reals rounded(Reals x) {
        const Words bits = (Words)x, upper = bits + 0x7fff + ((bits >> 16) & 1);
        return x == x ? (Reals)(upper & 0xffff0000u) : x;
    }

    // Split floats into truncated values and the rounded rest, both as pairs of rows. The error is
    // at most 2^-16.
    static void split_rows(const float* x, int64_t rows, int64_t size, int64_t pitch, float* high,
                           float* low) {
        constexpr uint32_t HIGH_HALF = 0xffff0000;
        for (int64_t i = 0; i < rows / 2; ++i, x += 2 * pitch, high += pitch, low += pitch)
            for (int64_t c = 0; c < size; c += LANES) {
                const Reals first = load(x + c), second = load(x + pitch + c);
                const Words a = (Words)first & HIGH_HALF, b = (Words)second & HIGH_HALF;
                store(high + c, (Reals)(a >> 16 | b));
                const Words rest = (Words)(first - (Reals)a) + 0x8000;
                const Words other = (Words)(second - (Reals)b) + 0x8000;
                store(low + c, (Reals)(rest >> 16 | (other & HIGH_HALF)));
            }
    }
};

// -- the forward pass -----------------------------------------------------------------------------

// The state of a key head is [D, P + 1]: its last column is the sum of keys, because a column of
// ones follows the values. So the last column of outputs consists of the sums of weights.
class AmxForward : public ForwardLoops<AmxForward, AmxAttention, float> {
    static constexpr int QUERIES = 32;  // tokens whose outputs are computed at once

    const int64_t width_, pitch_;  // P + 1, rounded up to multiples of 16 and of 32
    float* kv_;                    // [D, P + 1]
    float *scores_, *out_;         // of QUERIES tokens: [QUERIES, N], [QUERIES, P + 1]
    float* score_words_;           // of QUERIES tokens
    float *high_, *low_;           // the parts of the state as pairs, [D, P + 1]
    float* values_;                // [N, P + 1], as pairs
    Features k_, q_;
    float *k_pairs_, *k_rows_;     // keys decayed to the chunk's end as pairs; transposed as rows
    float* k_columns_;             // [D, N]: transposed keys, as pairs
    float* after_values_;          // [P + 1]: elements after those of values, the first is 1
    float sums_[QUERIES] = {};     // of weights, or 1 / denominators

  public:
    AmxForward(Memory& memory, const Task<float>& task, int64_t head, int64_t group,
               int64_t groups, int64_t column, int64_t columns)
        : ForwardLoops(task, memory, head, group, groups, column, columns),
          width_(pad(columns + 1)), pitch_(pad_words(columns + 1)),
          kv_(new_floats(depth_ * pitch_)), scores_(new_floats(QUERIES * N)),
          out_(new_floats(QUERIES * pitch_)), score_words_(new_floats(QUERIES * N / 2)),
          high_(new_floats(depth_ * pitch_ / 2)), low_(new_floats(depth_ * pitch_ / 2)),
          values_(new_floats(N * pitch_ / 2)),
          k_(new_features(BLOCK_ROWS)),
          q_(new_features(BLOCK_ROWS)), k_pairs_(new_floats(N * depth_ / 2)),
          k_rows_(new_floats(N * depth_ / 2)), k_columns_(new_floats(N * depth_ / 2)),
          after_values_(new_floats(pitch_ / 2)) {
        const uint16_t one = 0x3f80;
        std::memcpy((char*)after_values_ + 2 * columns, &one, 2);
        if (!t.decays) return;
        k_.decayed = new_floats(N * depth_ / 2);
        q_.decayed = new_floats(N * depth_ / 2);
    }

  private:
    friend ForwardLoops<AmxForward, AmxAttention, float>;

    void load_state(const float* kv, const float* z) {
        std::fill_n(kv_, depth_ * pitch_, 0.f);
        for (int64_t d = 0; kv && d < t.key_size; ++d) {
            std::copy_n(kv + d * t.value_size + column_, columns_, kv_ + d * pitch_);
            kv_[d * pitch_ + columns_] = z[d];
        }
        split_state(0, depth_);
    }

    void store_state(float* kv, float* z) const {
        for (int64_t d = 0; d < t.key_size; ++d) {
            std::copy_n(kv_ + d * pitch_, columns_, kv + d * t.value_size + column_);
            if (column_ == 0) z[d] = kv_[d * pitch_ + columns_];
        }
    }

    // Load the keys and values of the chunk that begins at `start`.
    void load_chunk(int64_t start) {
        begin_chunk(start);
        if (given_ || is_elu_ || t.decays) {
            load_features(t.k, head_, k_map_, is_token_, 1, after_, 0, (int)tokens_, k_);
            pair_rows(k_.decayed ? k_.decayed : k_.words, depth_ / 2, tokens_, depth_, k_pairs_,
                      depth_);
        } else {
            pair_tensor_rows(t.k, head_, 0, t.key_size, is_token_, zeros_, depth_, k_pairs_, depth_);
        }
        Tile::transpose(k_pairs_, depth_, tokens_ / 2, depth_, k_rows_, N / 2);
        pair_tensor_rows(t.v, head_, column_, columns_, is_token_, after_values_, pitch_, values_,
                         pitch_);
        this->prefetch_next(t.k, head_, 0, t.given_size, 0, N);
        this->prefetch_next(t.v, head_, column_, columns_, 0, N);
    }

    // Split rows of the state for the product of outputs.
    void split_state(int64_t first, int64_t rows) {
        const int64_t pair = first / 2 * pitch_;
        split_rows(kv_ + first * pitch_, rows, width_, pitch_, high_ + pair, low_ + pair);
    }

    // Transpose keys that are not decayed. Without decays, they are transposed already.
    void compute_key_columns() {
        if (t.decays) Tile::transpose(k_.words, k_.pitch, tokens_, depth_ / 2, k_columns_, N);
        else pair_rows(k_rows_, N / 2, depth_, N, k_columns_, N);
    }

    void compute_outputs() {
        compute_key_columns();
        this->prefetch_outputs(t.out, head_ * t.groups + group_, column_, columns_);
        for (int64_t g = 0; g < groups_; ++g)
            for (int i = 0; i < count_; i += QUERIES) compute_outputs(g, i);
    }

    // Compute the outputs of a query head for the tokens of the chunk from `first` on.
    void compute_outputs(int64_t g, int first) {
        const int64_t head = head_ * t.groups + group_ + g;
        const int count = std::min(count_ - first, QUERIES);
        const Amx::Operands q = load_queries(g, first);
        Amx::product(scores_, N, QUERIES, q.a, q.a_pitch, k_columns_, N, first + QUERIES, depth_);
        for (int r = 0; r < QUERIES; ++r) mask_scores(r, first);
        const bool sums = t.normalize || t.sums;
        const float* read = q_.decayed ? q_.decayed : q.a;
        Amx::add_products<false, 3>(
            out_, pitch_, QUERIES, sums ? width_ : pad(columns_),
            {{read, q.a_pitch, high_, pitch_, depth_},
             {read, q.a_pitch, low_, pitch_, depth_},
             {score_words_, N / 2, values_, pitch_, first + QUERIES}});
        if (sums) compute_sums(head, first, count);
        store_outputs(head, first, count);
    }

    // Return the features of QUERIES queries as a left operand. Rows of the tensor that need no
    // computation are not copied.
    Amx::Operands load_queries(int64_t g, int first) {
        const int64_t head = head_ * t.groups + group_ + g, step = t.q.steps[2];
        const bool whole = first + QUERIES <= count_ && t.key_size == depth_ && step % 2 == 0;
        if (!given_ && !is_elu_ && t.scale == 1 && !t.decays && whole) {
            this->prefetch_next(t.q, head, 0, t.given_size, first, first + QUERIES);
            return {(const float*)t.q.at(s_.row, head, start_ + first), step / 2, nullptr, 0, 0};
        }
        load_features(t.q, head, q_maps_[g], is_token_, float(t.scale), before_, first,
                      first + QUERIES, q_);
        this->prefetch_next(t.q, head, 0, t.given_size, first, first + QUERIES);
        return {q_.words, q_.pitch, nullptr, 0, 0};
    }

    // Decay the scores of token `first` + r with the keys before `first` + QUERIES, set those of
    // keys after it to 0, and round them.
    void mask_scores(int r, int first) {
        float* scores = scores_ + r * N;
        for (int w = t.decays ? 0 : first; w < first + QUERIES; w += LANES) {
            Reals score = load(scores + w);
            if (t.decays) score *= load(pairs_ + (first + r) * N + w);
            store(scores + w, lane_numbers(0) <= first + r - w ? score : Reals{});
        }
        Amx::round_row(scores, first + QUERIES, score_words_ + r * N / 2);
    }

    // Compute the sums of weights, or their reciprocals.
    void compute_sums(int64_t head, int first, int count) {
        for (int r = 0; r < count; ++r) {
            const float sum = out_[r * pitch_ + columns_];
            sums_[r] = t.normalize ? 1 / (sum + float(t.eps)) : sum;
        }
        if (t.sums && column_ == 0)
            std::copy_n(sums_, count, t.sums + t.query(s_.row, head, start_ + first));
    }

    void store_outputs(int64_t head, int first, int count) {
        for (int r = 0; r < count; ++r) {
            float* out = out_ + r * pitch_;
            if (t.normalize) Tile::scale_row(out, sums_[r], pad(columns_), out);
            store_fast(out, columns_, t.out, head, first + r, column_);
        }
    }

    // Compute the state after the chunk, and split it.
    void advance() {
        for (int64_t d = 0; d < depth_; d += 32) {  // few rows, so that they stay in the L1 cache
            float* kv = kv_ + d * pitch_;
            for (int64_t i = 0; t.decays && i < 32; ++i)
                Tile::scale_row(kv + i * pitch_, total_, width_, kv + i * pitch_);
            Amx::product<true>(kv, pitch_, 32, k_rows_ + d * N / 2, N / 2, values_, pitch_, width_,
                               tokens_);
            split_state(d, 32);
        }
    }
};

// -- the backward pass ----------------------------------------------------------------------------

// See LinearBackward; states are transposed too. With w_i the gradient of a sum of weights times
// its denominator,
//     dA_ij = (do_i v_j + w_i) / denominator_i,     w_i = -o_i do_i
// where do is exact in bfloat16, or the sum of two such numbers. So terms that cancel are sums of
// floats, whose factors are not rounded apart. Only sums of both are rounded.
class AmxBackward : public BackwardLoops<AmxBackward, AmxAttention, float> {
    using Loops = BackwardLoops<AmxBackward, AmxAttention, float>;

    struct State {
        float *kv, *z;  // [E, D], [D]
        int64_t start;
    };

    const bool scores_needed_;            // whether gradients of scores are needed
    const int64_t values_, width_;        // E, rounded up to multiples of 16 and of 32
    std::deque<State> states_;            // before the chunks of a span
    State d_state_;
    Features k_, q_;                      // q_ and what depends on it are of one query head
    const float *written_, *read_;        // [N, D], as words: keys decayed to the chunk's end;
                                          // queries decayed from its start, divided by denominators
    float *k_pairs_, *q_pairs_;           // [N, D], as pairs
    float* k_columns_;                    // [D, N]: transposed keys, as pairs
    float *v_words_, *v_pairs_, *v_rows_, *v_columns_;  // [N, E] twice, [E, N] twice
    float *d_out_, *d_rest_, *out_row_;                 // [N, E] twice, [E]
    float *d_out_words_[2], *d_out_pairs_[2], *d_out_rows_;  // rounded values and the rest
    bool exact_;                          // whether the rest is 0
    float *scores_, *d_scores_;           // [N, N]
    float *score_words_, *d_score_words_, *d_score_rest_, *score_pairs_, *score_rows_;
    float *high_, *low_, *state_columns_;         // a state as pairs [E, D]; transposed, [D, E]
    float *d_written_, *dq_, *dk_, *dv_;  // [N, D]; dv_ is [N, E]
    float *terms_, *d_log_, *read_sums_, *written_sums_, *lanes_;  // [N, N], [N] four times
    float *inverse_, *w_, *read_decays_;          // [N]; the factors of read_
    float *even_, *odd_;                          // [D]
    float d_total_ = 0;                           // of the logarithm of the state's decay
    float* d_given_;                              // of queries or keys before the feature map

  public:
    AmxBackward(Memory& memory, const Task<float>& task, const Gradients<float>& out, int64_t head)
        : Loops(out, task, memory, head, 0, task.groups, 0, task.value_size),
          scores_needed_(needed_.q || needed_.k || needed_.decay), values_(pad(task.value_size)),
          width_(pad_words(task.value_size)), d_state_(new_state()),
          k_(new_features(given_ ? N : BLOCK_ROWS)),
          q_(new_features(given_ ? N : BLOCK_ROWS)) {
        if (t.decays) k_.decayed = new_floats(N * depth_ / 2);
        if (has_factors()) q_.decayed = new_floats(N * depth_ / 2);
        written_ = k_.decayed ? k_.decayed : k_.words;
        read_ = q_.decayed ? q_.decayed : q_.words;
        for (float** x : {&d_written_, &dq_, &dk_}) *x = new_floats(N * size_);
        for (float** x : {&k_pairs_, &k_columns_, &q_pairs_}) *x = new_floats(N * depth_ / 2);
        for (float** x : {&v_words_, &v_pairs_, &v_rows_, &v_columns_, &d_out_words_[0],
                          &d_out_words_[1], &d_out_pairs_[0], &d_out_pairs_[1], &d_out_rows_})
            *x = new_floats(N * width_ / 2);
        for (float** x : {&d_out_, &d_rest_, &dv_}) *x = new_floats(N * width_);
        for (float** x : {&scores_, &d_scores_}) *x = new_floats(N * N);
        for (float** x : {&score_words_, &d_score_words_, &d_score_rest_, &score_pairs_,
                          &score_rows_})
            *x = new_floats(N * N / 2);
        for (float** x : {&high_, &low_, &state_columns_}) *x = new_floats(width_ * depth_ / 2);
        for (float** x : {&d_log_, &read_sums_, &written_sums_, &lanes_, &inverse_, &w_,
                          &read_decays_})
            *x = new_floats(N);
        terms_ = new_floats(t.decays ? N * N : 0);
        d_given_ = new_floats(N * given_);
        out_row_ = new_floats(width_);
        even_ = new_floats(depth_ / 2);
        odd_ = new_floats(depth_ / 2);
    }

  private:
    friend Loops;

    State new_state() { return {new_floats(width_ * depth_), new_floats(depth_), 0}; }

    void add_state() { states_.push_back(new_state()); }

    // Whether queries that read the state differ from those of scores.
    bool has_factors() const { return t.decays || t.normalize; }

    void load_state(const float* kv, const float* z, State& state) const {
        const bool whole = t.key_size == size_ && t.value_size == values_;
        if (!kv || !z || !whole || size_ != depth_) clear(state);
        if (kv && whole) Tile::transpose(kv, values_, size_, values_, state.kv, depth_);
        for (int64_t d = 0; kv && !whole && d < t.key_size; ++d)
            for (int64_t e = 0; e < t.value_size; ++e)
                state.kv[e * depth_ + d] = kv[d * t.value_size + e];
        if (z) std::copy_n(z, t.key_size, state.z);
    }

    int64_t state_pitch() const { return depth_; }

    void clear(State& state) const {
        std::fill_n(state.kv, width_ * depth_, 0.f);
        std::fill_n(state.z, depth_, 0.f);
    }

    // Load the keys and values of a chunk for advance().
    void load_written(int64_t start) {
        load_keys(start);
        pair_tensor_rows(t.v, head_, 0, t.value_size, is_token_, zeros_, width_, v_pairs_, width_);
        this->prefetch_next(t.v, head_, 0, t.value_size, 0, N);
    }

    // Begin a chunk, and load its keys.
    void load_keys(int64_t start) {
        begin_chunk(start);
        load_features(t.k, head_, k_map_, is_token_, 1, after_, 0, (int)tokens_, k_);
        this->prefetch_next(t.k, head_, 0, t.given_size, 0, N);
    }

    // Compute the state after the chunk.
    void advance(const State& before, State& after) {
        for (int64_t e = 0; e < values_ * depth_; e += depth_)
            Tile::scale_row(before.kv + e, total_, size_, after.kv + e);
        pair_rows(written_, depth_ / 2, tokens_, depth_, k_pairs_, depth_);
        Tile::transpose(v_pairs_, width_, tokens_ / 2, width_, v_rows_, N / 2);
        Amx::product<true>(after.kv, depth_, values_, v_rows_, N / 2, k_pairs_, depth_, size_,
                           tokens_);
        if (!sums() && !needed_.decay) return;
        Tile::scale_row(before.z, total_, size_, after.z);
        add_rows(written_, nullptr, after.z);
    }

    // Add rows of words of the chunk's tokens, multiplied by weights if they are not null.
    void add_rows(const float* words, const float* weights, float* out) const {
        for (int64_t d = 0; d < depth_ / 2; d += LANES) {
            Reals even{}, odd{};
            for (int i = 0; i < count_; ++i) {
                const Words row = (Words)load(words + i * depth_ / 2 + d);
                const float weight = weights ? weights[i] : 1;
                even += (Reals)(row << 16) * weight;
                odd += (Reals)(row & 0xffff0000u) * weight;
            }
            store(even_ + d, even);
            store(odd_ + d, odd);
        }
        for (int64_t d = 0; d < t.key_size; ++d) out[d] += d % 2 ? odd_[d / 2] : even_[d / 2];
    }

    // Compute the gradients of a chunk.
    void differentiate(const State& state) {
        next_ = -N;
        load_keys(state.start);
        copy_rows(t.v, head_, 0, t.value_size, is_token_, 0, (int)tokens_, zeros_, width_, v_words_,
                  width_ / 2);
        this->prefetch_next(t.v, head_, 0, t.value_size, 0, N);
        Tile::transpose(k_.words, depth_ / 2, tokens_, depth_ / 2, k_columns_, N);
        Tile::transpose(v_words_, width_ / 2, tokens_, width_ / 2, v_columns_, N);
        pair_rows(k_.words, depth_ / 2, tokens_, depth_, k_pairs_, depth_);
        if (needed_.v) differentiate_written_values();
        if (needed_.k || needed_.decay) differentiate_written_keys();
        if (needed_.decay) begin_decays(state);
        const bool needs_before = needs_state(state.start);
        if (needs_before) begin_state();
        if (reads_) split_rows(state.kv, width_, size_, depth_, high_, low_);
        for (int64_t g = 0; g < groups_; ++g) {
            load_queries(g);
            if (needed_.v || needed_.decay) compute_scores();
            if (needed_.v) differentiate_values();
            if (scores_needed_) differentiate_scores();
            if (needed_.k) differentiate_keys();
            if (reads_) differentiate_reads(state);
            if (needed_.q) differentiate_queries(g);
            if (needs_before) add_to_state();
        }
        if (needed_.k) store_key_gradients();
        for (int i = 0; needed_.v && i < count_; ++i)
            store_fast(dv_ + i * width_, t.value_size, out_.dv, head_, i, 0);
        if (needed_.decay) store_decay_gradients();
    }

    // Compute only the gradient of the state before a chunk.
    void skip(int64_t start) {
        next_ = -N;
        begin_chunk(start);
        begin_state();
        for (int64_t g = 0; g < groups_; ++g) {
            load_queries(g);
            add_to_state();
        }
    }

    // -- the state --------------------------------------------------------------------------------

    // Begin the gradient of the state before the chunk: decay that of the state after it.
    void begin_state() {
        if (!t.decays) return;
        Tile::scale_row(d_state_.kv, total_, values_ * depth_, d_state_.kv);
        Tile::scale_row(d_state_.z, total_, size_, d_state_.z);
    }

    // Add the gradients of the reads of a query head to that of the state.
    void add_to_state() {
        pair_rows(read_, depth_ / 2, tokens_, depth_, q_pairs_, depth_);
        for (int part = 0; part < (exact_ ? 1 : 2); ++part) {
            Tile::transpose(d_out_pairs_[part], width_, tokens_ / 2, width_, d_out_rows_, N / 2);
            Amx::product<true>(d_state_.kv, depth_, values_, d_out_rows_, N / 2, q_pairs_, depth_,
                               size_, tokens_);
        }
        if (sums()) add_rows(read_, w_, d_state_.z);
    }

    // -- keys and values --------------------------------------------------------------------------

    // Begin the gradients of values with those of later tokens.
    void differentiate_written_values() {
        for (int64_t e = 0; e < width_; ++e)
            Amx::round_padded_row(d_state_.kv + e * depth_, depth_, high_ + e * depth_ / 2);
        Tile::transpose(high_, depth_ / 2, width_, depth_ / 2, state_columns_, width_);
        Amx::product(dv_, width_, tokens_, written_, depth_ / 2, state_columns_, width_,
                     values_, depth_);
    }

    // Compute the gradients of decayed keys, and begin those of keys.
    void differentiate_written_keys() {
        split_rows(d_state_.kv, width_, size_, depth_, high_, low_);
        float* out = t.decays ? d_written_ : dk_;
        Amx::add_products<false, 2>(out, size_, tokens_, size_,
                                    {{v_words_, width_ / 2, high_, depth_, width_},
                                     {v_words_, width_ / 2, low_, depth_, width_}});
        for (int64_t i = 0; i < tokens_; ++i)
            for (int64_t d = 0; d < size_; d += LANES) {
                const Reals sum = load(out + i * size_ + d) + load(d_state_.z + d);
                store(out + i * size_ + d, sum);
                if (t.decays) store(dk_ + i * size_ + d, sum * after_[i]);
            }
    }

    void differentiate_values() {
        transpose_scores(score_words_);
        for (int part = 0; part < (exact_ ? 1 : 2); ++part)
            for (int64_t j = 0; j < tokens_; j += 32)
                Amx::product<true>(dv_ + j * width_, width_, 32, score_rows_ + j * N / 2 + j / 2,
                                   N / 2, d_out_pairs_[part] + j / 2 * width_, width_, values_,
                                   tokens_ - j);
    }

    void differentiate_keys() {
        transpose_scores(d_score_words_);
        pair_rows(q_.words, depth_ / 2, tokens_, depth_, q_pairs_, depth_);
        for (int64_t j = 0; j < tokens_; j += 32)
            Amx::product<true>(dk_ + j * size_, size_, 32, score_rows_ + j * N / 2 + j / 2, N / 2,
                               q_pairs_ + j / 2 * depth_, depth_, size_, tokens_ - j);
    }

    // Transpose scores, as rows of words.
    void transpose_scores(const float* words) {
        pair_rows(words, N / 2, tokens_, tokens_, score_pairs_, N);
        Tile::transpose(score_pairs_, N, tokens_ / 2, tokens_, score_rows_, N / 2);
    }

    void store_key_gradients() {
        for (int i = 0; i < count_; ++i)
            if (!is_token_[i]) std::fill_n(dk_ + i * size_, size_, 0.f);
        store_given(k_map_, k_, is_token_, dk_, out_.dk, head_);
    }

    // Store the gradients of queries or keys before the feature map, and add to those of its
    // weights.
    void store_given(FeatureMap<float>& map, const Features& x, const bool* valid, float* d_f,
                     const Tensor& tensor, int64_t head) {
        for (int64_t i = 0; is_elu_ && i < count_; ++i)
            for (int64_t d = 0; d < size_; d += LANES) {
                const Reals f = widen(x.words + i * depth_ / 2, d);
                const Reals slope = f > 1.f ? broadcast(1) : f;
                store(d_f + i * size_ + d, load(d_f + i * size_ + d) * slope);
            }
        for (int i = 0; given_ && i < count_; i += BLOCK_ROWS)
            map.gradients(x.given + i * given_, valid + i, x.y + i * size_, x.f + i * size_,
                          d_f + i * size_, tensor.data ? d_given_ + i * given_ : nullptr);
        const float* rows = given_ ? d_given_ : d_f;
        for (int i = 0; tensor.data && i < count_; ++i)
            store_fast(rows + i * (given_ ? given_ : size_), t.given_size, tensor, head, i, 0);
    }

    // -- queries ----------------------------------------------------------------------------------

    // Load queries and the gradients of their outputs.
    void load_queries(int64_t g) {
        const int64_t head = head_ * groups_ + g, query = t.query(s_.row, head, start_);
        std::fill_n(inverse_, N, 1.f);
        std::fill_n(w_, N, 0.f);
        if (t.normalize) std::copy_n(t.sums + query, count_, inverse_);
        else if (out_.d_totals) std::copy_n(out_.d_totals + query, count_, w_);
        for (int i = 0; i < tokens_; ++i)
            read_decays_[i] = t.decays ? before_[i] * inverse_[i] : inverse_[i];
        load_features(t.q, head, q_maps_[g], is_token_, float(t.scale), read_decays_, 0,
                      (int)tokens_, q_);
        this->prefetch_next(t.q, head, 0, t.given_size, 0, N);
        load_output_gradients(head);
        for (int part = 0; part < (exact_ ? 1 : 2); ++part)
            pair_rows(d_out_words_[part], width_ / 2, tokens_, width_, d_out_pairs_[part], width_);
    }

    // Load the gradients of outputs as rounded values and the rest, which is often 0; and, if
    // outputs are normalised, w.
    void load_output_gradients(int64_t head) {
        exact_ = true;
        this->prefetch_next(out_.d_out, head, 0, t.value_size, 0, N);
        if (t.normalize) this->prefetch_next(t.out, head, 0, t.value_size, 0, N);
        if (out_.d_out.type == BFLOAT16 && !t.normalize) {
            copy_rows(out_.d_out, head, 0, t.value_size, is_token_, 0, (int)tokens_, zeros_, width_,
                      d_out_words_[0], width_ / 2);
            return;
        }
        Words rests{};
        Tile::add_lanes_of_rows(tokens_, lanes_, [&](int64_t i) {
            if (i >= count_) {
                std::fill_n(d_out_words_[0] + i * width_ / 2, width_ / 2, 0.f);
                std::fill_n(d_out_ + i * width_, width_, 0.f);
                return Reals{};
            }
            return load_output_gradient(head, (int)i, rests);
        });
        if (t.normalize) std::copy_n(lanes_, tokens_, w_);
        for (int i = 0; i < LANES; ++i) exact_ &= rests[i] == 0;
        for (int64_t i = 0; !exact_ && i < tokens_ * width_; i += LANES)
            store(d_rest_ + i, load(d_out_ + i) - rounded(load(d_out_ + i)));
        if (!exact_) Amx::round_row(d_rest_, tokens_ * width_, d_out_words_[1]);
    }

    // Load and round the gradient of the output of token i. Add its rest to `rests`, and return a
    // vector whose lanes sum up to w.
    Reals load_output_gradient(int64_t head, int i, Words& rests) {
        float* d_out = d_out_ + i * width_;
        load_row(out_.d_out.at(s_.row, head, start_ + i), out_.d_out.type, t.value_size, width_, 1,
                 d_out);
        Amx::round_row(d_out, width_, d_out_words_[0] + i * width_ / 2);
        for (int64_t e = 0; out_.d_out.type != BFLOAT16 && e < width_; e += LANES)
            rests |= (Words)load(d_out + e) << 16;  // other bits than those of bfloat16
        Reals sum{};
        if (!t.normalize) return sum;
        const char* from = t.out.at(s_.row, head, start_ + i);
        const bool whole = t.out.type == FLOAT && t.value_size == width_;
        if (!whole) load_row(from, t.out.type, t.value_size, width_, 1, out_row_);
        const float* out = whole ? (const float*)from : out_row_;
        for (int64_t e = 0; e < width_; e += LANES) sum -= load(out + e) * load(d_out + e);
        return sum;
    }

    // Multiply the gradients of outputs with a matrix that has one or two parts.
    void multiply_output_gradients(float* out, int64_t out_pitch, int64_t first, int64_t rows,
                                   const float* b, const float* rest, int64_t pitch, int64_t n) {
        const float* a = d_out_words_[0] + first * width_ / 2;
        if (rest)
            Amx::add_products<false, 2>(out, out_pitch, rows, n,
                                        {{a, width_ / 2, b, pitch, width_},
                                         {a, width_ / 2, rest, pitch, width_}});
        else
            Amx::product(out, out_pitch, rows, a, width_ / 2, b, pitch, n, width_);
        if (!exact_)
            Amx::product<true>(out, out_pitch, rows, d_out_words_[1] + first * width_ / 2,
                               width_ / 2, b, pitch, n, width_);
    }

    // Compute scores, and round scores divided by denominators.
    void compute_scores() {
        for (int i = 0; i < tokens_; i += 32)
            Amx::product(scores_ + i * N, N, 32, q_.words + i * depth_ / 2, depth_ / 2, k_columns_,
                         N, i + 32, depth_);
        for (int i = 0; i < tokens_; ++i) {
            float *scores = scores_ + i * N, row[N];
            const int end = i / 32 * 32 + 32;
            for (int w = 0; w < end; w += LANES) {
                Reals score = load(scores + w);
                if (t.decays) score *= load(pairs_ + i * N + w);
                score = lane_numbers(0) <= i - w ? score : Reals{};
                store(scores + w, score);
                store(row + w, score * inverse_[i]);
            }
            Amx::round_row(row, end, score_words_ + i * N / 2);
        }
    }

    // Compute the gradients of scores as words, and those of their logarithms in terms_.
    void differentiate_scores() {
        for (int i = 0; i < tokens_; i += 32)
            multiply_output_gradients(d_scores_ + i * N, N, i, 32, v_columns_, nullptr, N, i + 32);
        for (int i = 0; i < tokens_; ++i) {
            float *d_scores = d_scores_ + i * N, rest[N];
            const int end = i / 32 * 32 + 32;
            for (int w = 0; w < end; w += LANES) {
                Reals d = (load(d_scores + w) + w_[i]) * inverse_[i];
                d = lane_numbers(0) <= i - w ? d : Reals{};
                if (needed_.decay) {
                    float* terms = terms_ + i * N + w;
                    store(terms, load(terms) + load(scores_ + i * N + w) * d);
                }
                if (t.decays) d *= load(pairs_ + i * N + w);
                store(d_scores + w, d);
                store(rest + w, d - rounded(d));
            }
            Amx::round_row(d_scores, end, d_score_words_ + i * N / 2);
            if (sums()) Amx::round_row(rest, end, d_score_rest_ + i * N / 2);
        }
    }

    // Begin the gradients of queries with those of the state's reads.
    void differentiate_reads(const State& state) {
        multiply_output_gradients(dq_, size_, 0, tokens_, high_, low_, depth_, size_);
        for (int64_t i = 0; (sums() || t.decays) && i < tokens_; ++i)
            for (int64_t d = i * size_; d < (i + 1) * size_; d += LANES) {
                const Reals sum = load(dq_ + d) + w_[i] * load(state.z + d - i * size_);
                store(dq_ + d, sum * read_decays_[i]);
            }
        if (!needed_.decay) return;
        Tile::add_lanes_of_rows(N, lanes_, [&](int64_t i) {
            Reals sum{};
            for (int64_t d = 0; d < size_; d += LANES)
                sum += widen(q_.words + i * depth_ / 2, d) * load(dq_ + i * size_ + d);
            return sum;
        });
        for (int i = 0; i < count_; ++i) read_sums_[i] += lanes_[i];
    }

    // Add the products of keys and the gradients of the scores of tokens `first` to `first` + 31.
    // With gradients of sums of weights, they cancel, so the product takes the rest after rounding
    // too.
    void add_key_products(float* dq, int64_t first) const {
        const Amx::Operands product = {d_score_words_ + first * N / 2, N / 2, k_pairs_, depth_,
                                       first + 32};
        Amx::Operands rest = product;
        rest.a = d_score_rest_ + first * N / 2;
        if (sums()) Amx::add_products<true, 2>(dq, size_, 32, size_, {product, rest});
        else Amx::add_products<true, 1>(dq, size_, 32, size_, {product});
    }

    void differentiate_queries(int64_t g) {
        for (int i = 0; i < tokens_; i += 32)
            add_key_products(dq_ + i * size_, i);
        if (t.scale != 1) Tile::scale_row(dq_, float(t.scale), tokens_ * size_, dq_);
        store_given(q_maps_[g], q_, is_token_, dq_, out_.dq, head_ * groups_ + g);
    }

    // -- decays -----------------------------------------------------------------------------------

    // Begin the gradients of log decays with those of the state and of the decayed keys.
    void begin_decays(const State& state) {
        Reals sum{};
        for (int64_t i = 0; i < values_ * depth_; i += LANES)
            sum += load(state.kv + i) * load(d_state_.kv + i);
        for (int64_t d = 0; d < size_; d += LANES)
            sum += load(state.z + d) * load(d_state_.z + d);
        d_total_ = Tile::add_lanes(sum) * total_;
        Tile::add_lanes_of_rows(N, written_sums_, [&](int64_t i) {
            Reals products{};
            for (int64_t d = 0; d < size_; d += LANES)
                products += widen(k_.words + i * depth_ / 2, d) * load(dk_ + i * size_ + d);
            return products;
        });
        std::fill_n(terms_, N * N, 0.f);
        std::fill_n(read_sums_, N, 0.f);
    }

    // Compute the gradients of log decays, see LinearBackward::differentiate_decays().
    void store_decay_gradients() {
        Reals sums[N / LANES] = {}, pairs[N];
        for (int i = N - 1; i >= 0; --i) {
            pairs[i] = Reals{};
            for (int w = 0; w < N / LANES; ++w) {
                sums[w] += load(terms_ + i * N + w * LANES);
                pairs[i] += lane_numbers(0) < i - w * LANES ? sums[w] : Reals{};
            }
        }
        Tile::add_lanes_of_rows(N, d_log_, [&](int64_t i) { return pairs[i]; });
        float read = 0, written = 0;
        for (int i = count_ - 1; i >= 0; --i) d_log_[i] += read += read_sums_[i];
        for (int i = 0; i < count_; written += written_sums_[i++]) d_log_[i] += d_total_ + written;
        this->store_rows(d_log_, 1, 1, out_.d_log_decay, head_, 0);
    }
};
