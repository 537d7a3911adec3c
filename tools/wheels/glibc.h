// Included before each C++ file of a wheel: symbols of glibc 2.28 and of GCC 8's C++ library.
//
// A library asks for the newest version of each symbol that the machine which links it has. Those
// of mathematical functions since 2.29 differ in errno only.

#pragma once

#include <new>

#if defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define OLDEST "GLIBC_2.17"
#endif

__asm__(".symver exp,exp@" OLDEST);
__asm__(".symver exp2,exp2@" OLDEST);
__asm__(".symver log,log@" OLDEST);
__asm__(".symver log2,log2@" OLDEST);
__asm__(".symver pow,pow@" OLDEST);
#undef OLDEST

namespace std {
// Containers of GCC 11 and later call it; the C++ library has it since GLIBCXX_3.4.29.
__attribute__((visibility("hidden"), weak, noreturn)) void __throw_bad_array_new_length() {
    throw bad_array_new_length();
}
}  // namespace std
