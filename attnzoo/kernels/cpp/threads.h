// Work in the threads that torch's own products run in: others would contend with them, since they
// wait busily for milliseconds after each. Its OpenMP is loaded already and visible to all.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

extern "C" void GOMP_parallel(void (*work)(void*), void* what, unsigned threads, unsigned flags)
    __attribute__((weak));

template <class Work>
struct Shared {
    Work& work;
    const int64_t count;
    std::atomic<int64_t> next{0};

    static void run(void* it) {
        Shared& its = *static_cast<Shared*>(it);
        for (int64_t i; (i = its.next++) < its.count;) its.work(i);
    }
};

// Call work with 0 to count - 1; a thread takes the next as soon as it is ready.
template <class Work>
void in_threads(int64_t count, int64_t threads, Work work) {
    Shared<Work> shared{work, count};
    threads = std::min(threads, count);
    if (threads > 1 && GOMP_parallel) {
        GOMP_parallel(Shared<Work>::run, &shared, (unsigned)threads, 0);
        return;
    }
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; ++i) others.emplace_back(Shared<Work>::run, &shared);
    Shared<Work>::run(&shared);
    for (auto& other : others) other.join();
}
