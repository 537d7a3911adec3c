// Parallel loops on the OpenMP threads of torch.
//
// Threads that the kernels start would compete with those of torch, which spin for milliseconds
// after each parallel region. The OpenMP library is found at run time, because torch has already
// loaded it; without it, std::thread is used.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

extern "C" void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags)
    __attribute__((weak));

template <class Work>
struct ParallelLoop {
    Work& work;
    const int64_t count;
    std::atomic<int64_t> next{0};

    static void run(void* data) {
        ParallelLoop& loop = *static_cast<ParallelLoop*>(data);
        for (int64_t i; (i = loop.next++) < loop.count;) loop.work(i);
    }
};

// Call work(0) to work(count - 1) on up to `threads` threads, scheduled dynamically.
template <class Work>
void in_threads(int64_t count, int64_t threads, Work work) {
    ParallelLoop<Work> loop{work, count};
    threads = std::min(threads, count);
    if (threads > 1 && GOMP_parallel) {
        GOMP_parallel(ParallelLoop<Work>::run, &loop, (unsigned)threads, 0);
        return;
    }
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; ++i) others.emplace_back(ParallelLoop<Work>::run, &loop);
    ParallelLoop<Work>::run(&loop);
    for (auto& other : others) other.join();
}
