// What the compiler calls for every load and store of a file compiled with -fsanitize=thread. ThreadSanitizer's own library looks for
// races there; this one writes down address and size, so that a test can say how often each byte of a row was read and written. The
// kernels are not asked, and cannot forget to tell.
//
// memcpy and its like are calls, which the compiler does not report: the linker sends them through here (--wrap).

#include <cstddef>
#include <cstdint>

namespace {

struct Access {  // as ACCESS of test_traffic.py
    uint64_t address;
    uint32_t bytes, is_write;
};

Access* log_begin = nullptr;  // null: not counting
int64_t log_capacity = 0, log_count = 0;

void record(const volatile void* p, size_t bytes, bool is_write) {
    if (!log_begin || bytes == 0) return;
    if (log_count < log_capacity) log_begin[log_count] = {reinterpret_cast<uint64_t>(p), uint32_t(bytes), is_write};
    log_count++;
}

}  // namespace

extern "C" {

#define EXPORTED __attribute__((visibility("default")))

EXPORTED void traffic_start(Access* log, int64_t capacity) {
    log_begin = log;
    log_capacity = capacity;
    log_count = 0;
}

// How many accesses there were: what exceeds the capacity is missing in the log.
EXPORTED int64_t traffic_stop() {
    log_begin = nullptr;
    return log_count;
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define ACCESSES(bytes)                                                     \
    void __tsan_read##bytes(void* p) { record(p, bytes, false); }           \
    void __tsan_write##bytes(void* p) { record(p, bytes, true); }           \
    void __tsan_unaligned_read##bytes(void* p) { record(p, bytes, false); } \
    void __tsan_unaligned_write##bytes(void* p) { record(p, bytes, true); } \
    void __tsan_volatile_read##bytes(void* p) { record(p, bytes, false); }  \
    void __tsan_volatile_write##bytes(void* p) { record(p, bytes, true); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, size_t bytes) { record(p, bytes, false); }
void __tsan_write_range(void* p, size_t bytes) { record(p, bytes, true); }

void* __real_memcpy(void* to, const void* from, size_t bytes);
void* __real_memmove(void* to, const void* from, size_t bytes);
void* __real_memset(void* to, int value, size_t bytes);

void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
    record(from, bytes, false);
    record(to, bytes, true);
    return __real_memcpy(to, from, bytes);
}

void* __wrap_memmove(void* to, const void* from, size_t bytes) {
    record(from, bytes, false);
    record(to, bytes, true);
    return __real_memmove(to, from, bytes);
}

void* __wrap_memset(void* to, int value, size_t bytes) {
    record(to, bytes, true);
    return __real_memset(to, value, bytes);
}

}  // extern "C"
