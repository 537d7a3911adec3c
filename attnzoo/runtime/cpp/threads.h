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
#if defined(__APPLE__)
#include <dlfcn.h>
#endif

using Parallel = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);

#if defined(__APPLE__)
// Return GOMP_parallel, or null. Apple's linker refuses an undefined weak symbol; the OpenMP
// library of LLVM, which torch brings there, has this function of GCC's too.
inline Parallel openmp() {
    static const auto found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return found;
}
#else
extern "C" void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags)
    __attribute__((weak));

inline Parallel openmp() { return GOMP_parallel; }
#endif

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
    const Parallel parallel = threads > 1 ? openmp() : nullptr;
    if (parallel) return parallel(ParallelLoop<Work>::run, &loop, (unsigned)threads, 0);
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; ++i) others.emplace_back(ParallelLoop<Work>::run, &loop);
    ParallelLoop<Work>::run(&loop);
    for (auto& other : others) other.join();
}
