// Calls functions of a shared library on the memory of another process, page by page.
//
// The emulator runs it (emulated.py): driver LIBRARY. A request on standard input is
//     kind of result (v, i or s), length of the name, name, number of arguments, arguments
// where numbers have 8 bytes and arguments are addresses. A page that the function touches is
// requested on standard output, "p" and its address, and read from standard input, its presence
// and its bytes. The answer is "d", the result (an integer, or a string after its length), the
// number of pages, and the address and the bytes of each page; the pages are then forgotten.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, MOST_PAGES = 1 << 20, MOST_ARGUMENTS = 4 };

static char* pages[MOST_PAGES];
static size_t count;
static atomic_flag busy = ATOMIC_FLAG_INIT;

// The libraries call this in place of the C library's memset. For zeros, that one executes DC ZVA, and
// QEMU 7.2 leaves the first 16 bytes of a page unchanged where this instruction faults.
void* memset(void* to, int byte, size_t size) {
    const uint64_t word = (uint8_t)byte * (uint64_t)0x0101010101010101;
    char* x = to;
    for (; size >= sizeof word; x += sizeof word, size -= sizeof word)
        __builtin_memcpy(x, &word, sizeof word);
    for (; size; --size) *x++ = (char)byte;
    return to;
}

static void fail(const char* text) {
    fprintf(stderr, "driver: %s\n", text);
    _exit(3);
}

static void receive(void* to, size_t size) {
    for (char* x = to; size;) {
        const ssize_t got = read(0, x, size);
        if (got <= 0) _exit(got < 0);  // the other process has ended
        x += got, size -= got;
    }
}

static void send(const void* from, size_t size) {
    for (const char* x = from; size;) {
        const ssize_t sent = write(1, x, size);
        if (sent <= 0) fail("cannot write");
        x += sent, size -= sent;
    }
}

static uint64_t receive_number(void) {
    uint64_t number;
    receive(&number, sizeof number);
    return number;
}

static void send_number(uint64_t number) { send(&number, sizeof number); }

static void add_page(char* page) {
    for (size_t i = 0; i < count; ++i)
        if (pages[i] == page) return;  // another thread has touched it too
    if (count == MOST_PAGES) fail("too many pages");
    send("p", 1);
    send_number((uintptr_t)page);
    if (!receive_number()) {
        fprintf(stderr, "driver: access to unmapped memory at %p\n", (void*)page);
        _exit(3);
    }
    // Other threads see the page when it is complete
    char* filled = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (filled == MAP_FAILED) fail("no memory");
    receive(filled, PAGE);
    if (mremap(filled, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, page) != page)
        fail("cannot map a page");
    pages[count++] = page;
}

static void on_fault(int number, siginfo_t* info, void* context) {
    (void)number, (void)context;
    while (atomic_flag_test_and_set(&busy)) sched_yield();
    add_page((char*)((uintptr_t)info->si_addr & ~(uintptr_t)(PAGE - 1)));
    atomic_flag_clear(&busy);
}

typedef int64_t (*Function)(uint64_t, uint64_t, uint64_t, uint64_t);

static void answer(char kind, int64_t result) {
    send("d", 1);
    if (kind == 's') {
        const char* text = (const char*)result;
        send_number(strlen(text));
        send(text, strlen(text));
    } else {
        send_number((uint64_t)result);
    }
    send_number(count);
    for (size_t i = 0; i < count; ++i) {
        send_number((uintptr_t)pages[i]);
        send(pages[i], PAGE);
        munmap(pages[i], PAGE);
    }
    count = 0;
}

int main(int argument_count, char** arguments) {
    void* library = argument_count == 2 ? dlopen(arguments[1], RTLD_NOW) : NULL;
    if (!library) fail(argument_count == 2 ? dlerror() : "usage: driver LIBRARY");
    const struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &action, NULL);
    for (;;) {
        char kind, name[256] = "";
        uint64_t values[MOST_ARGUMENTS] = {0};
        receive(&kind, 1);
        const uint64_t length = receive_number();
        if (length >= sizeof name) fail("the name is too long");
        receive(name, length);
        const uint64_t number = receive_number();
        if (number > MOST_ARGUMENTS) fail("too many arguments");
        receive(values, number * sizeof *values);
        const Function function = (Function)dlsym(library, name);
        if (!function) fail(dlerror());
        answer(kind, function(values[0], values[1], values[2], values[3]));
    }
}
