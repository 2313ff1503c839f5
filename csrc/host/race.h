// Finds races in shared memory: two accesses to one word by different threads, at least one a write, with no barrier between that both
// threads passed. By order and not by luck: whatever the fibres' turns were, a missing barrier is seen.
//
// A thread's clock counts the barriers that it has passed. An access is over before another begins where the other thread has since
// passed a barrier that this one reached after its access. Shuffles order nothing here, as on a GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace grpo::host {

struct Clock {
    int16_t thread = -1;                              // within the cluster; -1: nobody
    uint8_t block = 0;                                // likewise
    uint8_t cluster_arrivals = 0, cluster_waits = 0;  // at barriers that order memory
    uint16_t block_barriers = 0;

    bool is_after(const Clock& other) const {
        if (other.thread < 0 || thread == other.thread || cluster_waits > other.cluster_arrivals) return true;
        return block == other.block && block_barriers > other.block_barriers;
    }
};

// The shared memory of one block.
class RaceLog {
  public:
    explicit RaceLog(size_t bytes) : words_((bytes + 3) / 4) {}

    // False, and the fault in words, if something is wrong with this access.
    bool access(size_t offset, size_t bytes, bool write, const Clock& now, std::string& fault) {
        bool is_right = true;
        for (size_t word = offset / 4; word * 4 < offset + bytes; word++) {
            Word& w = words_[word];
            const Clock* earlier = now.is_after(w.writer) ? nullptr : &w.writer;
            for (const Clock& reader : w.readers)
                if (write && !now.is_after(reader)) earlier = &reader;
            if (earlier)
                fault = "race in shared memory, byte " + std::to_string(word * 4) + ": thread " + std::to_string(earlier->thread) +
                        (earlier == &w.writer ? " wrote" : " read") + ", thread " + std::to_string(now.thread) +
                        (write ? " writes" : " reads") + ", no barrier between";
            const bool is_empty = !write && w.writer.thread < 0;
            if (is_empty)
                fault = "thread " + std::to_string(now.thread) + " reads shared memory that nobody wrote, byte " + std::to_string(word * 4);
            is_right = is_right && !earlier && !is_empty;
            write ? w.wrote(now) : w.read(now);
        }
        return is_right;
    }

  private:
    struct Word {
        Clock writer;
        Clock readers[2];  // the latest, and the latest of another thread: a thread that writes is at most one of them

        void wrote(const Clock& now) { writer = now; }
        void read(const Clock& now) {
            if (readers[0].thread != now.thread) readers[1] = readers[0];
            readers[0] = now;
        }
    };
    std::vector<Word> words_;
};

}  // namespace grpo::host
