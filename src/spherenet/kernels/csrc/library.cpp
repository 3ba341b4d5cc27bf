// What the shared library exports, and the choice of the instruction set when it is loaded.

#include <cstdlib>
#include <cstring>

#if defined(SN_HAS_AVX)
#include <cpuid.h>
#endif

#include "api.h"

namespace baseline {
Kernels table();
}
#if defined(SN_HAS_AVX)
namespace avx2 {
Kernels table();
}
namespace avx512 {
Kernels table();
}
#endif

namespace {

struct Choice {
    Kernels kernels;
    const char *name;
};

#if defined(SN_HAS_AVX)
// What the processor has and the system saves. __builtin_cpu_supports needs a runtime that not every compiler has.
struct Processor {
    bool avx2 = false, avx512 = false;
    Processor() {
        unsigned a, b, basic, d, extended, c, saved, high;
        constexpr unsigned FMA = 1u << 12, OSXSAVE = 1u << 27, F16C = 1u << 29;
        if (!__get_cpuid(1, &a, &b, &basic, &d) || (basic & OSXSAVE) == 0) return;
        if (!__get_cpuid_count(7, 0, &a, &extended, &c, &d)) return;
        __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
        bool ymm = (saved & 0x06) == 0x06, zmm = (saved & 0xe6) == 0xe6;
        constexpr unsigned AVX512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
        avx2 = ymm && (basic & FMA) && (basic & F16C) && (extended & 1u << 5);
        avx512 = avx2 && zmm && (extended & AVX512) == AVX512;
    }
};
#endif

Choice choose() {
#if defined(SN_HAS_AVX)
    const char *wanted = std::getenv("SPHERENET_ISA");  // for tests: an instruction set below the best one
    bool any = wanted == nullptr || *wanted == 0;
    Processor processor;
    if (processor.avx512 && (any || !std::strcmp(wanted, "avx512"))) return {avx512::table(), "avx512"};
    if (processor.avx2 && (any || !std::strcmp(wanted, "avx2"))) return {avx2::table(), "avx2"};
#endif
    return {baseline::table(), "baseline"};
}

const Choice &chosen() {
    static const Choice choice = choose();
    return choice;
}

}  // namespace

#if defined(_WIN32)
#define SN_EXPORT extern "C" __declspec(dllexport)
#else
#define SN_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// Raised whenever a signature or a struct changes, so that an old file is refused instead of misread.
SN_EXPORT int32_t spherenet_interface_version() { return 6; }

SN_EXPORT const char *spherenet_instruction_set() { return chosen().name; }

SN_EXPORT const Kernels *spherenet_kernels() { return &chosen().kernels; }
