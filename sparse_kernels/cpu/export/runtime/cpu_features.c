#include "packed_file.h"

#ifdef __x86_64__
#include <cpuid.h>

/* The registers that the operating system saves; the processor must have OSXSAVE. */
static unsigned find_saved_registers(void) {
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static uint64_t pick(unsigned word, int bit, int feature) { return (uint64_t)(word >> bit & 1) << feature; }

/* From the processor itself: compilers know different names of features. */
uint64_t find_cpu_features(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    unsigned saved = c >> 27 & 1 ? find_saved_registers() : 0;
    int ymm = (saved & 0x06) == 0x06, zmm = (saved & 0xE6) == 0xE6;
    uint64_t found = pick(c, 23, 13) | pick(c, 22, 14) | pick(c, 26, 15) | pick(c, 13, 16);
    if (ymm) found |= pick(c, 12, 1) | pick(c, 29, 4);
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        unsigned pages = a;
        found |= pick(b, 3, 2) | pick(b, 8, 3);
        if (ymm) found |= pick(b, 5, 0);
        if (zmm) {
            found |= pick(b, 16, 5) | pick(b, 30, 6) | pick(b, 28, 7) | pick(b, 17, 8) | pick(b, 31, 9);
            found |= pick(c, 11, 10);
            if (pages >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) found |= pick(a, 5, 11);
        }
    }
    if (__get_cpuid(0x80000001, &a, &b, &c, &d)) found |= pick(c, 5, 12);
    return found;
}
#else
uint64_t find_cpu_features(void) { return 0; }
#endif
