// The machine behind cuda_on_host.h: a scheduler of fibres, the barriers and shuffles that they wait at, and the runtime's few functions.

#include "host/cuda_on_host.h"

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/barriers.h"
#include "host/fibre.h"
#include "host/race.h"
#include "host/testing.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

#if defined(__x86_64__)
// Saves what a function must keep, changes the stack, restores. The floating-point modes are the same in every fibre.
asm(R"(
    .text
    .type grpo_host_switch, @function
    .hidden grpo_host_switch
    .globl grpo_host_switch
grpo_host_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size grpo_host_switch, .-grpo_host_switch
)");
#endif

namespace grpo::host {
namespace {

constexpr size_t kStackBytes = 128 * 1024;  // of address space; what is never touched costs nothing
constexpr int kWarp = 32;

struct Thread {
    Fibre fibre;
    Clock clock;
    int64_t block_barriers = 0, cluster_barriers = 0, shuffles = 0;  // reached
    const int64_t* waits_for = nullptr;                              // goes on once this counter has come to `until`
    int64_t until = 0;
    bool is_relaxed = false;    // the barrier of the cluster that it last arrived at
    bool knows_others = false;  // to have begun: it passed some barrier of the cluster
    bool done = true;
};

struct Warp {
    int arrived = 0;
    int64_t shuffles = 0;
    alignas(16) unsigned char values[2][kWarp][64];  // by turns: a quick lane may be one shuffle ahead
};

struct Block {
    Block(size_t bytes, int warps) : shared_bytes(bytes), log(bytes), warps(warps) {
        shared.reset(static_cast<unsigned char*>(::operator new(bytes + 1, std::align_val_t(128))));
        std::memset(shared.get(), 0xff, bytes);  // NaN, where somebody reads it all the same
    }
    struct Free {
        void operator()(void* p) const { ::operator delete(p, std::align_val_t(128)); }
    };
    std::unique_ptr<unsigned char, Free> shared;
    size_t shared_bytes;
    RaceLog log;
    std::vector<Warp> warps;
    int arrived = 0;
    int64_t barriers = 0;
    int last_touched = -1;  // by a thread of another block, which had then arrived at so many barriers of the cluster
};

// One kernel at a time, one cluster of it at a time.
struct Machine {
    std::mutex mutex;
    int arch = 90;
    int dropped_barrier = -1;
    std::vector<Launches> launches;
    std::vector<std::string> reports;

    void (*kernel)(void*) = nullptr;
    void* arguments = nullptr;
    int threads_per_block = 0;
    std::vector<Block> blocks;
    std::vector<std::unique_ptr<Thread>> threads;
    unsigned char* stacks = nullptr;
    int arrived = 0;  // at the cluster's barrier
    int64_t barriers = 0;
    Fibre scheduler;
    int current = -1;
    bool given_up = false;
    std::string fault;

    Thread& thread() { return *threads[current]; }
    int block_rank() const { return current / threads_per_block; }
    Block& block() { return blocks[block_rank()]; }

    // The running fibre goes on once `counter` has come to `value`.
    void wait_for(const int64_t* counter, int64_t value) {
        if (*counter >= value) return;
        thread().waits_for = counter;
        thread().until = value;
        thread().fibre.wait(scheduler);
    }

    // What a GPU answers with a fault, or with wrong numbers now and then, ends the launch. The fibre is never resumed: it must hold
    // nothing that wants to be freed.
    void fail(const char* what) {
        if (current < 0) throw std::logic_error(what);
        fault = what;
        give_up();
    }
    void give_up() {
        fault = "block " + std::to_string(blockIdx.x) + ": " + fault;
        given_up = true;
        thread().fibre.wait(scheduler);
    }

    void start_cluster(int size, size_t shared_bytes);
    void run_cluster(unsigned first_block);
};

Machine machine;

void run_thread() {
    machine.thread().fibre.entered(machine.scheduler);
    machine.kernel(machine.arguments);
    if (int(machine.thread().clock.cluster_waits) <= machine.block().last_touched)
        machine.fail("a thread leaves while other blocks may still use its block's shared memory");
    machine.thread().done = true;
    machine.thread().fibre.wait(machine.scheduler);
}

void Machine::start_cluster(int size, size_t shared_bytes) {
    const size_t count = size_t(size) * threads_per_block;
    if (count > threads.size()) {
        if (stacks) {
            forget_frames(stacks, threads.size() * kStackBytes);  // or whoever gets these addresses next is blamed for them
            munmap(stacks, threads.size() * kStackBytes);
        }
        while (threads.size() < count) threads.push_back(std::make_unique<Thread>());
        void* memory = mmap(nullptr, count * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        stacks = static_cast<unsigned char*>(memory);
        forget_frames(stacks, threads.size() * kStackBytes);
    }
    blocks.clear();
    for (int rank = 0; rank < size; rank++) blocks.emplace_back(shared_bytes, threads_per_block / kWarp);
    arrived = 0;
    barriers = 0;
    for (size_t i = 0; i < count; i++) {
        const Fibre fibre = threads[i]->fibre;
        *threads[i] = Thread();
        threads[i]->fibre = fibre;
        threads[i]->fibre.start(stacks + i * kStackBytes, kStackBytes, run_thread);
        threads[i]->clock.thread = int16_t(i);
        threads[i]->clock.block = uint8_t(i / threads_per_block);
        threads[i]->done = false;
    }
}

// Every thread that can goes on until it waits, in turn, until all are done or none can.
void Machine::run_cluster(unsigned first_block) {
    const int count = int(blocks.size()) * threads_per_block;
    for (int left = count; left > 0 && !given_up;) {
        bool moved = false;
        for (current = 0; current < count && !given_up; current++) {
            Thread& t = thread();
            if (t.done || (t.waits_for && *t.waits_for < t.until)) continue;
            t.waits_for = nullptr;
            blockIdx = {first_block + unsigned(block_rank()), 0, 0};
            threadIdx = {unsigned(current % threads_per_block), 0, 0};
            t.fibre.resume(scheduler);
            moved = true;
            if (t.done) left--;
        }
        if (!moved && !given_up) {
            fault = "a barrier or a shuffle that some threads never reach";
            given_up = true;
        }
    }
    current = -1;
}

}  // namespace

unsigned char* shared_memory() { return machine.block().shared.get(); }

void shared_access(const void* address, size_t bytes, bool write) {
    check_alignment(address, bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : 4);
    for (size_t rank = 0; rank < machine.blocks.size(); rank++) {
        Block& block = machine.blocks[rank];
        const auto offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(block.shared.get());
        if (offset > block.shared_bytes || offset + bytes > block.shared_bytes) continue;
        const Clock& now = machine.thread().clock;
        if (int(rank) != machine.block_rank()) {
            if (!machine.thread().knows_others) machine.fail("an access to shared memory of a block that need not have begun");
            block.last_touched = std::max(block.last_touched, int(now.cluster_arrivals));
        }
        if (!block.log.access(offset, bytes, write, now, machine.fault)) machine.give_up();
        return;
    }
    machine.fail("an access outside the shared memory of the block");
}

bool is_dropped(int barrier) { return barrier == machine.dropped_barrier; }

void count_launch(const char* kernel, int cluster) {
    const std::lock_guard<std::mutex> lock(machine.mutex);
    for (Launches& l : machine.launches)
        if (l.kernel == kernel && l.split == cluster) {
            l.count++;
            return;
        }
    machine.launches.push_back({kernel, cluster, 1});
}

void check_alignment(const void* address, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(address) % bytes != 0) machine.fail("a misaligned access");
}

void shuffle_xor(const void* value, void* result, size_t bytes, int mask) {
    Thread& t = machine.thread();
    const int in_block = machine.current % machine.threads_per_block, lane = in_block % kWarp;
    Warp& warp = machine.block().warps[in_block / kWarp];
    if (bytes > sizeof warp.values[0][0]) throw std::logic_error("a shuffle of too many bytes");
    auto& values = warp.values[t.shuffles % 2];
    std::memcpy(values[lane], value, bytes);
    if (++warp.arrived == kWarp) {
        warp.arrived = 0;
        warp.shuffles++;
    }
    machine.wait_for(&warp.shuffles, ++t.shuffles);
    std::memcpy(result, values[lane ^ mask], bytes);
}

void* of_block(const void* address, unsigned rank) {
    return machine.blocks.at(rank).shared.get() + (static_cast<const unsigned char*>(address) - shared_memory());
}

cudaError_t run(const cudaLaunchConfig_t& config, void (*kernel)(void*), void* arguments) {
    const std::lock_guard<std::mutex> lock(machine.mutex);
    int cluster = 1;
    for (unsigned i = 0; i < config.numAttrs; i++)
        if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = int(config.attrs[i].val.clusterDim.x);
    const unsigned blocks = config.gridDim.x;
    if (blocks == 0 || blocks > 0x7fffffffu || config.blockDim.x > 1024 || config.blockDim.x % kWarp != 0 || blocks % cluster != 0 ||
        cluster > 8 || config.dynamicSmemBytes > 227 * 1024)
        return cudaErrorInvalidConfiguration;
    machine.kernel = kernel;
    machine.arguments = arguments;
    machine.threads_per_block = int(config.blockDim.x);
    machine.given_up = false;
    machine.fault.clear();
    gridDim = config.gridDim;
    blockDim = config.blockDim;
    for (unsigned first = 0; first < blocks && !machine.given_up; first += cluster) {
        machine.start_cluster(cluster, config.dynamicSmemBytes);
        machine.run_cluster(first);
    }
    if (!machine.given_up) return cudaSuccess;
    forget_frames(machine.stacks, machine.threads.size() * kStackBytes);
    machine.reports.push_back(machine.fault);
    return cudaErrorLaunchFailure;
}

// --- testing.h ---------------------------------------------------------------------------------------------------------------------

std::vector<Launches> launches() { return machine.launches; }

std::vector<std::string> reports() { return machine.reports; }

void forget() {
    machine.launches.clear();
    machine.reports.clear();
}

std::vector<std::string> barriers() { return {std::begin(kBarrierNames), std::end(kBarrierNames)}; }

void drop_barrier(const std::string& name) {
    const auto* found = std::find(std::begin(kBarrierNames), std::end(kBarrierNames), name);
    if (found == std::end(kBarrierNames) && !name.empty()) throw std::invalid_argument("no barrier is called " + name);
    machine.dropped_barrier = name.empty() ? -1 : int(found - std::begin(kBarrierNames));
}

void set_arch(int arch) { machine.arch = arch; }

}  // namespace grpo::host

// --- CUDA's names ------------------------------------------------------------------------------------------------------------------

using grpo::host::machine;

void __syncthreads() {
    auto& block = machine.block();
    auto& thread = machine.thread();
    if (++block.arrived == machine.threads_per_block) {
        block.arrived = 0;
        block.barriers++;
    }
    machine.wait_for(&block.barriers, ++thread.block_barriers);
    thread.clock.block_barriers++;
}

void __cluster_barrier_arrive_relaxed() {
    auto& thread = machine.thread();
    if (++machine.arrived == int(machine.blocks.size()) * machine.threads_per_block) {
        machine.arrived = 0;
        machine.barriers++;
    }
    thread.cluster_barriers++;
    thread.is_relaxed = true;
}

void __cluster_barrier_arrive() {
    __cluster_barrier_arrive_relaxed();
    machine.thread().is_relaxed = false;
    machine.thread().clock.cluster_arrivals++;
}

void __cluster_barrier_wait() {
    auto& thread = machine.thread();
    machine.wait_for(&machine.barriers, thread.cluster_barriers);
    thread.knows_others = true;
    if (!thread.is_relaxed) thread.clock.cluster_waits++;
}

unsigned __clusterRelativeBlockRank() { return unsigned(machine.block_rank()); }
unsigned __clusterSizeInBlocks() { return unsigned(machine.blocks.size()); }

// The runtime: one device, which is this machine.
extern "C" {

cudaError_t CUDARTAPI cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaSetDevice(int) { return cudaSuccess; }

cudaError_t CUDARTAPI cudaGetLastError() { return cudaSuccess; }

const char* CUDARTAPI cudaGetErrorString(cudaError_t error) {
    if (error == cudaErrorLaunchFailure && !machine.reports.empty()) return machine.reports.back().c_str();
    return error == cudaErrorInvalidConfiguration ? "invalid configuration argument" : "error";
}

cudaError_t CUDARTAPI cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t CUDARTAPI cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    attributes->ptxVersion = attributes->binaryVersion = machine.arch;
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    const bool is_90 = machine.arch >= 90;
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor:
            *value = machine.arch / 10;
            return cudaSuccess;
        case cudaDevAttrComputeCapabilityMinor:
            *value = machine.arch % 10;
            return cudaSuccess;
        case cudaDevAttrMultiProcessorCount:
            *value = is_90 ? 132 : 108;
            return cudaSuccess;
        case cudaDevAttrL2CacheSize:
            *value = (is_90 ? 50 : 40) << 20;
            return cudaSuccess;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = (is_90 ? 227 : 163) << 10;
            return cudaSuccess;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            *value = (is_90 ? 228 : 164) << 10;
            return cudaSuccess;
        default:
            return cudaErrorInvalidValue;
    }
}
}
