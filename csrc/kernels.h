// The C++ face of the kernels: what the glue calls, alike in grpo::cpu and grpo::cuda. No torch here: pointers and sizes, checked
// by the Python above.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "objective.h"

namespace grpo {

enum class DType : int { float32 = 0, bfloat16 = 1, float16 = 2 };

// batch x time rows of `vocab` logits, contiguous within a row. Strides count elements.
struct Rows {
    void* data;
    int64_t batch_stride, time_stride;
};

struct Shape {
    DType dtype;
    int64_t batch, time, vocab;
};

// What every kernel is told about a row: (batch, time) contiguous.
struct Targets {
    const int64_t* token_ids;
    const uint8_t* active;  // null: every row. An inactive row is read nowhere.
    const float* temperature;
};

// What the forward leaves for the backward. Row maximum and log of the sum are kept apart: their rounded sum would lose the small
// one, and with it the precision of a logit far from 0.
struct RowOutputs {
    float* logps;
    float* row_max;  // null in the one pass, which has no backward
    float* log_sum;  // null likewise
    float* entropy;
};

struct SavedRows {
    const float* row_max;
    const float* log_sum;
    const float* entropy;
};

enum class AdvantageScale : int { group = 0, batch = 1, none = 2 };
enum class Baseline : int { mean = 0, leave_one_out = 1 };

// Group g holds values[order[k]] for offsets[g] <= k < offsets[g + 1]; without `order`, values[k].
struct Groups {
    const double* values;
    const int64_t* order;
    const int64_t* offsets;
    int64_t count, groups;
};

namespace cpu {

void logprobs_forward(const Shape&, const Rows& logits, const Targets&, const RowOutputs&, int num_threads);
void objective(int64_t rows, const float* logps, const float* entropy, const TokenInputs&, const uint8_t* active, const ObjectiveParams&,
               const TokenOutputs&, int num_threads);
void logprobs_backward(const Shape&, const Rows& logits, const Targets&, const SavedRows&, const float* dlogps, const float* dentropy,
                       const Rows& dlogits, int num_threads);
void loss_and_grad(const Shape&, const Rows& logits, const Targets&, const TokenInputs&, const ObjectiveParams&, const RowOutputs&,
                   const TokenOutputs&, const Rows& dlogits, int num_threads);
void scale(const Shape&, const Rows& dlogits, float factor, int num_threads);

// Outcome supervision: one advantage a value. NaN values are excluded and get 0.
void group_advantages(const Groups&, AdvantageScale, Baseline, int ddof, double eps, float* out);
// Process supervision: values are (batch, steps), out (batch, time) the reverse cumulative sum of what group_advantages gives.
void process_advantages(const Groups&, AdvantageScale, Baseline, int ddof, double eps, const int64_t* step_ends, int64_t batch,
                        int64_t steps, int64_t time, float* out);

std::string isa();                // the instruction set in use
std::vector<std::string> isas();  // those that this machine can run, best last

}  // namespace cpu

// Tensors on one GPU. Every function queues its kernels on the stream and returns; none synchronises.
namespace cuda {

struct Queue {
    int device;
    void* stream;  // cudaStream_t
};

void logprobs_forward(const Shape&, const Rows& logits, const Targets&, const RowOutputs&, const Queue&);
void objective(int64_t rows, const float* logps, const float* entropy, const TokenInputs&, const uint8_t* active, const ObjectiveParams&,
               const TokenOutputs&, const Queue&);
void logprobs_backward(const Shape&, const Rows& logits, const Targets&, const SavedRows&, const float* dlogps, const float* dentropy,
                       const Rows& dlogits, const Queue&);
void loss_and_grad(const Shape&, const Rows& logits, const Targets&, const TokenInputs&, const ObjectiveParams&, const RowOutputs&,
                   const TokenOutputs&, const Rows& dlogits, const Queue&);
void scale(const Shape&, const Rows& dlogits, const float* factor, const Queue&);

void group_advantages(const Groups&, AdvantageScale, Baseline, int ddof, double eps, float* out, const Queue&);
// `normalised` is scratch: (batch, steps) doubles.
void process_advantages(const Groups&, AdvantageScale, Baseline, int ddof, double eps, const int64_t* step_ends, int64_t batch,
                        int64_t steps, int64_t time, double* normalised, float* out, const Queue&);

std::vector<int> archs();  // what is inside: 80, 90, 100

// Over how many blocks a row is split from now on, for measurements and tests: 1, 2, 4 or 8; 0: by the table, which is how it starts.
void force_split(int split);

}  // namespace cuda
}  // namespace grpo
