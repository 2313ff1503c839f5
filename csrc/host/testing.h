// What a test may ask of the CUDA kernels that run on a CPU: which ran, what was wrong with them, and what they do without one of
// their barriers. bindings.cpp offers it from the module that `make cuda-on-host` builds, and nowhere else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace grpo::host {

// How often a kernel was launched with `split` blocks for a row (1: no cluster), since the last `forget`.
struct Launches {
    std::string kernel;
    int split;
    int64_t count;
};
std::vector<Launches> launches();

// One sentence for every fault that was seen since the last `forget`: a race in shared memory, an access that is misaligned, outside the
// block's shared memory or to a block that has not begun, a barrier that not every thread reached. The launch that showed it also throws.
std::vector<std::string> reports();

void forget();

// The barriers of the kernels by name, and one that every thread walks through from now on; "" restores it. std::invalid_argument for
// another name. With a barrier dropped a launch may leave wrong numbers behind, and must leave a report.
std::vector<std::string> barriers();
void drop_barrier(const std::string& name);

// The architecture that is emulated, 90 unless set: what the table of splits is asked for.
void set_arch(int arch);

}  // namespace grpo::host
