#include "packed_file.h"

/* __builtin_cpu_supports also asks whether the operating system saves the registers. */
uint64_t find_cpu_features(void) {
    uint64_t found = 0;
#ifdef __x86_64__
    __builtin_cpu_init();
    found |= (uint64_t)!!__builtin_cpu_supports("avx2") << 0;
    found |= (uint64_t)!!__builtin_cpu_supports("fma") << 1;
    found |= (uint64_t)!!__builtin_cpu_supports("bmi") << 2;
    found |= (uint64_t)!!__builtin_cpu_supports("bmi2") << 3;
    found |= (uint64_t)!!__builtin_cpu_supports("f16c") << 4;
    found |= (uint64_t)!!__builtin_cpu_supports("avx512f") << 5;
    found |= (uint64_t)!!__builtin_cpu_supports("avx512bw") << 6;
    found |= (uint64_t)!!__builtin_cpu_supports("avx512cd") << 7;
    found |= (uint64_t)!!__builtin_cpu_supports("avx512dq") << 8;
    found |= (uint64_t)!!__builtin_cpu_supports("avx512vl") << 9;
    found |= (uint64_t)!!__builtin_cpu_supports("avx512vnni") << 10;
    found |= (uint64_t)!!__builtin_cpu_supports("avx512bf16") << 11;
    found |= (uint64_t)!!__builtin_cpu_supports("lzcnt") << 12;
    found |= (uint64_t)!!__builtin_cpu_supports("popcnt") << 13;
#endif
    return found;
}
