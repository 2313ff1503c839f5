// A thread of a CUDA block as a function with a stack of its own, which runs until it waits and is resumed later. A row takes tens of
// thousands of switches: swapcontext, which asks the kernel to set the signal mask, would make 20 ms of a row out of 2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
extern "C" void grpo_host_switch(void** save_stack, void* load_stack);
#endif

namespace grpo::host {

// Stacks that were left in the middle, or are someone else's old memory, still look occupied to AddressSanitizer.
inline void forget_frames([[maybe_unused]] void* stacks, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stacks, bytes);
#endif
}

class Fibre {
  public:
    // `run` is called on `stack` when the fibre is first resumed; it must not return.
    void start(void* stack, size_t bytes, void (*run)()) {
        stack_ = stack;
        bytes_ = bytes;
#if defined(__x86_64__)
        auto* top = reinterpret_cast<uintptr_t*>(static_cast<unsigned char*>(stack) + bytes);
        *--top = 0;  // a return address for `run`, which also puts its frame where calls expect it: 8 below a multiple of 16
        *--top = reinterpret_cast<uintptr_t>(run);
        for (int saved = 0; saved < 6; saved++) *--top = 0;
        pointer_ = top;
#else
        getcontext(&context_);
        context_.uc_stack.ss_sp = stack;
        context_.uc_stack.ss_size = bytes;
        context_.uc_link = nullptr;
        makecontext(&context_, run, 0);
#endif
    }

    // From the scheduler into the fibre, until it waits.
    void resume(Fibre& scheduler) { change(scheduler, *this); }
    // And back.
    void wait(Fibre& scheduler) { change(*this, scheduler); }

    // The first thing that `run` does: a sanitizer wants to know that the switch is complete, and whose stack was left.
    void entered([[maybe_unused]] Fibre& scheduler) {
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(nullptr, &scheduler.stack_, &scheduler.bytes_);
#endif
    }

  private:
    static void change(Fibre& from, Fibre& to) {
#if defined(__SANITIZE_ADDRESS__)
        void* fake_stack;
        __sanitizer_start_switch_fiber(&fake_stack, to.stack_, to.bytes_);
#endif
#if defined(__x86_64__)
        grpo_host_switch(&from.pointer_, to.pointer_);
#else
        swapcontext(&from.context_, &to.context_);
#endif
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
    }

#if defined(__x86_64__)
    void* pointer_ = nullptr;
#else
    ucontext_t context_{};
#endif
    // The scheduler's are not known before the first fibre was entered, and const there.
#if defined(__SANITIZE_ADDRESS__)
    const void* stack_ = nullptr;
#else
    void* stack_ = nullptr;
#endif
    size_t bytes_ = 0;
};

}  // namespace grpo::host
