// One row of logits, held by one block or dealt out to the blocks of a cluster, in two sweeps: statistics, then gradient. Every entry
// point composes these, so that a row's log-probability has the same bits whichever asked for it.
//
// Which thread sees which column, and when, follows from V, the dtype, the number of threads and of blocks, never from an address: a row
// that does not start at 16 bytes takes narrower loads for the same mapping. Nor is it left to the compiler which product and sum become
// one fused instruction, which might differ from kernel to kernel: the build says -fmad=false, and the loops say fmaf.
#pragma once

#include "cuda/storage.cuh"
#include "online_softmax.h"

namespace grpo {
inline namespace GRPO_ISA {

// The columns that one block holds of a row: a run of vectors. A thread's step is a pack, its vectors `threads` apart, so that a warp's
// loads are contiguous.
//
// A pack is what shares one rebase of the running maximum and one two-sum: two vectors, 16 logits of 16 bits, for 17 exponentials. With a
// vector a pack, bfloat16 would take more instructions a logit than an H200 issues in the time that it reads one.
template <class Storage>
struct Part {
    using Element = typename Storage::Element;
    static constexpr int kColumns = Storage::kColumns;
    static constexpr int kVectors = 2, kPack = kVectors * kColumns;
    struct Pack {
        uint4 vectors[kVectors];
    };

    int first;    // column
    int vectors;  // the last one may be partial
    int columns;
    int whole_steps;  // in which every thread has whole vectors

    __device__ Part(int64_t vocab, int blocks, int rank) {
        const int total = int((vocab + kColumns - 1) / kColumns), at_most = (total + blocks - 1) / blocks;
        const int begin = min(rank * at_most, total);
        first = begin * kColumns;
        vectors = min(at_most, total - begin);
        columns = min(vectors * kColumns, int(vocab) - first);
        whole_steps = columns / (kPack * int(blockDim.x));
    }

    __device__ int steps() const { return (vectors + kVectors * int(blockDim.x) - 1) / (kVectors * int(blockDim.x)); }
    __device__ int vector(int step, int k) const { return (step * kVectors + k) * int(blockDim.x) + int(threadIdx.x); }

    // Whether this thread is the one that sees the column.
    __device__ bool has(int64_t column) const {
        const bool is_here = column >= first && column < first + columns;
        return is_here && unsigned(column - first) / kColumns % blockDim.x == threadIdx.x;
    }

    // `again`: the row is read once more soon, and is to stay in the L2 cache. What is no column of the row reads as -inf.
    template <bool again>
    __device__ Pack load(const Element* row, int step) const {
        const auto read = [](const auto* address) { return again ? __ldcg(address) : __ldcs(address); };
        const Element* part = row + first;
        const bool is_aligned = reinterpret_cast<uintptr_t>(part) % sizeof(uint4) == 0;
        Pack pack;
        if (is_aligned && step < whole_steps) {
            GRPO_UNROLL
            for (int k = 0; k < kVectors; k++) pack.vectors[k] = read(reinterpret_cast<const uint4*>(part) + vector(step, k));
            return pack;
        }
        GRPO_UNROLL
        for (int k = 0; k < kVectors; k++) {
            const int column = vector(step, k) * kColumns;
            if (is_aligned && column + kColumns <= columns) {
                pack.vectors[k] = read(reinterpret_cast<const uint4*>(part + column));
                continue;
            }
            Element elements[kColumns];
            GRPO_UNROLL
            for (int c = 0; c < kColumns; c++) elements[c] = column + c < columns ? read(part + column + c) : Storage::kMinusInf;
            memcpy(&pack.vectors[k], elements, sizeof elements);
        }
        return pack;
    }

    // Past the caches: nobody reads it soon.
    __device__ void store(Element* row, int step, const Pack& pack) const {
        Element* part = row + first;
        const bool is_aligned = reinterpret_cast<uintptr_t>(part) % sizeof(uint4) == 0;
        if (is_aligned && step < whole_steps) {
            GRPO_UNROLL
            for (int k = 0; k < kVectors; k++) __stcs(reinterpret_cast<uint4*>(part) + vector(step, k), pack.vectors[k]);
            return;
        }
        GRPO_UNROLL
        for (int k = 0; k < kVectors; k++) {
            const int column = vector(step, k) * kColumns;
            if (is_aligned && column + kColumns <= columns) {
                __stcs(reinterpret_cast<uint4*>(part + column), pack.vectors[k]);
                continue;
            }
            Element elements[kColumns];
            memcpy(elements, &pack.vectors[k], sizeof elements);
            GRPO_UNROLL
            for (int c = 0; c < kColumns; c++)
                if (column + c < columns) __stcs(part + column + c, elements[c]);
        }
    }

    __device__ void fill(Element* row, Element value) const {
        Element elements[kColumns];
        GRPO_UNROLL
        for (auto& element : elements) element = value;
        Pack pack;
        GRPO_UNROLL
        for (auto& vector : pack.vectors) memcpy(&vector, elements, sizeof elements);
        for (int step = 0; step < steps(); step++) store(row, step, pack);
    }
};

template <class Storage>
__device__ void unpack(const typename Part<Storage>::Pack& pack, float (&values)[Part<Storage>::kPack]) {
    constexpr int kWords = sizeof pack / 4, kPerWord = Part<Storage>::kPack / kWords;
    uint32_t words[kWords];
    memcpy(words, &pack, sizeof pack);
    GRPO_UNROLL
    for (int i = 0; i < kWords; i++) Storage::unpack(words[i], values + i * kPerWord);
}

template <class Storage>
__device__ typename Part<Storage>::Pack pack_of(const float (&values)[Part<Storage>::kPack]) {
    typename Part<Storage>::Pack pack;
    constexpr int kWords = sizeof pack / 4, kPerWord = Part<Storage>::kPack / kWords;
    uint32_t words[kWords];
    GRPO_UNROLL
    for (int i = 0; i < kWords; i++) words[i] = Storage::pack(values + i * kPerWord);
    memcpy(&pack, words, sizeof pack);
    return pack;
}

// --- Statistics --------------------------------------------------------------------------------------------------------------------

using Softmax = OnlineSoftmax<float>;

template <int count>
__device__ float tree_sum(const float* values) {
    if constexpr (count == 1)
        return values[0];
    else
        return tree_sum<count / 2>(values) + tree_sum<count / 2>(values + count / 2);
}

template <int count>
__device__ void push(Softmax& softmax, const float (&z)[count], const Exponential<float>& exp) {
    float highest = z[0];
    GRPO_UNROLL
    for (int i = 1; i < count; i++) highest = maximum(highest, z[i]);
    softmax.raise(highest, exp);

    float e[count], weighted[2] = {0.0f, 0.0f};
    GRPO_UNROLL
    for (int i = 0; i < count; i++) {
        float exponent;
        e[i] = exp(z[i], softmax.max, exponent);
        weighted[i % 2] = fmaf(exponent, e[i], weighted[i % 2]);
    }
    softmax.sum.add(tree_sum<count>(e));
    softmax.weighted.add(weighted[0] + weighted[1]);
}

// The same bits whichever comes first, so that lanes that merge with each other agree.
__device__ inline Softmax merged(Softmax a, Softmax b, const Exponential<float>& exp) {
    a.raise(b.max, exp);
    b.raise(a.max, exp);
    a.sum.error += b.sum.error;
    a.sum.add(b.sum.value);
    a.weighted.error += b.weighted.error;
    a.weighted.add(b.weighted.value);
    return a;
}

__device__ inline Softmax merged_over_warp(Softmax softmax, const Exponential<float>& exp) {
    for (int mask = kWarp / 2; mask > 0; mask /= 2) softmax = merged(softmax, shuffle_xor(softmax, mask), exp);
    return softmax;
}

// A block's dynamic shared memory: the statistics of every warp of the row, what the first thread makes of them, and the part of the row.
constexpr int kMaxWarps = 12, kMaxBlocks = 8;

struct Coefficients;

constexpr size_t kStatisticsBytes = kMaxBlocks * kMaxWarps * sizeof(Softmax);
constexpr size_t kCoefficientsBytes = 32;
constexpr size_t kRowOffset = kStatisticsBytes + kCoefficientsBytes;
static_assert(kRowOffset % sizeof(uint4) == 0, "the row is held in vectors");

// The statistics of the whole row, in the first warp of every block; one exchange between the blocks. Before it, every thread has
// read what it wants of the row, so that after it the row may be overwritten.
__device__ inline Softmax merged_over_row(Softmax softmax, int blocks, int rank, const Exponential<float>& exp) {
    const Shared<Softmax> statistics(0);
    softmax = merged_over_warp(softmax, exp);
    if (blocks == 1) {
        if (lane() == 0) statistics.write(warp(), softmax);
        block_barrier(Barrier::row_statistics);
    } else {
        cluster_wait(Barrier::row_begun);
        if (lane() < blocks) statistics.of_block(lane()).write(rank * warps() + warp(), softmax);
        cluster_arrive(Barrier::row_statistics);
        cluster_wait(Barrier::row_statistics);
    }
    softmax = Softmax();
    if (warp() == 0) {
        for (int i = lane(); i < blocks * warps(); i += kWarp) softmax = merged(softmax, statistics.read(i), exp);
        softmax = merged_over_warp(softmax, exp);
    }
    return softmax;
}

struct RowStats {
    float max;
    float log_sum;  // of exp((z - max) / temperature); NaN for a degenerate row
    float logp, entropy;
};

// NaN for a row that holds NaN or +inf, or nothing but -inf; `chosen`, the logit of the token, is NaN where there is no such token.
__device__ inline RowStats row_stats(const Softmax& softmax, float chosen, float temperature) {
    const float weighted = softmax.weighted.value + softmax.weighted.error;
    if (!(softmax.sum.value > 0.0f) || std::isnan(weighted)) return {softmax.max, NAN, NAN, NAN};
    // The maximum's own exponential is 1. Without it the others keep their digits where p is near 1.
    const float log_sum = log1pf((softmax.sum.value - 1.0f) + softmax.sum.error);
    const float entropy = log_sum - Exponential<float>::kNats * weighted / softmax.sum.value;
    return {softmax.max, log_sum, (chosen - softmax.max) / temperature - log_sum, entropy};
}

// --- Gradient ----------------------------------------------------------------------------------------------------------------------

enum class Row : int { computed, zero, nan };

// What a thread needs to know to write its columns of the gradient row
//   dlogits_j = (a (1[j = y] - p_j) - b p_j (log p_j + H)) / temperature, with a = dloss / dlogp and b = dloss / dentropy:
// (base + slope x) 2^x, where x = (z - max) scale.
struct Coefficients {
    Row row;
    float max, base, slope;
    float target;  // the gradient at y
};
static_assert(sizeof(Coefficients) <= kCoefficientsBytes, "its place in shared memory");

struct RowGrad {
    float a, b;
    float max, log_sum, entropy;
    float temperature;

    // `chosen`: the target's logit, NaN where there is no such token.
    __device__ Coefficients coefficients(float chosen) const {
        if (std::isnan(log_sum) || std::isnan(a) || std::isnan(b) || std::isnan(chosen)) return {Row::nan, 0.0f, 0.0f, 0.0f, 0.0f};
        if (a == 0.0f && b == 0.0f) return {Row::zero, 0.0f, 0.0f, 0.0f, 0.0f};
        const float p_max = expf(-log_sum);
        const float base = -(a + b * (entropy - log_sum)) * p_max / temperature;
        const float slope = -b * Exponential<float>::kNats * p_max / temperature;
        // 1 - p by expm1: near p = 1 the difference would have no digits left.
        const float logp = (chosen - max) / temperature - log_sum, p = expf(logp);
        const float entropy_term = p > 0.0f ? b * p * (logp + entropy) : 0.0f;
        return {Row::computed, max, base, slope, (-a * expm1f(logp) - entropy_term) / temperature};
    }
};

// Writes a part of a gradient row from its logits, which read(step) gives. `dlogits` may be the logits: a thread reads a pack before it
// writes it, and nobody else reads it.
template <class Storage, bool backwards, class Read>
__device__ void write_gradient(const Part<Storage>& part, const Read& read, typename Storage::Element* dlogits, int64_t token_id,
                               const Coefficients& c, const Exponential<float>& exp) {
    if (c.row != Row::computed) return part.fill(dlogits, c.row == Row::zero ? typename Storage::Element(0) : Storage::kNan);
    constexpr int kPack = Part<Storage>::kPack;
    const int steps = part.steps();
    for (int i = 0; i < steps; i++) {
        const int step = backwards ? steps - 1 - i : i;
        float z[kPack];
        unpack<Storage>(read(step), z);
        GRPO_UNROLL
        for (int k = 0; k < kPack; k++) {
            float exponent;
            const float e = exp(z[k], c.max, exponent);
            z[k] = e * fmaf(c.slope, exponent, c.base);
        }
        part.store(dlogits, step, pack_of<Storage>(z));
    }
    if (part.has(token_id)) dlogits[token_id] = bits_of<Storage>(c.target);
}

}  // namespace GRPO_ISA
}  // namespace grpo
