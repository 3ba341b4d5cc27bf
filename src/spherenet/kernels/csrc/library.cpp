// What the shared library exports, and the choice of the instruction set when it is loaded.

#include <cstdlib>
#include <cstring>

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

Choice choose() {
#if defined(SN_HAS_AVX)
    const char *wanted = std::getenv("SPHERENET_ISA");  // for tests: an instruction set below the best one
    bool any = wanted == nullptr || *wanted == 0;
    __builtin_cpu_init();
    bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (has_avx512 && (any || !std::strcmp(wanted, "avx512"))) return {avx512::table(), "avx512"};
    if (has_avx2 && (any || !std::strcmp(wanted, "avx2"))) return {avx2::table(), "avx2"};
#endif
    return {baseline::table(), "baseline"};
}

const Choice &chosen() {
    static const Choice choice = choose();
    return choice;
}

}  // namespace

#define SN_EXPORT extern "C" __attribute__((visibility("default")))

// Raised whenever a signature or a struct changes, so that an old file is refused instead of misread.
SN_EXPORT int32_t spherenet_interface_version() { return 2; }

SN_EXPORT const char *spherenet_instruction_set() { return chosen().name; }

SN_EXPORT const Kernels *spherenet_kernels() { return &chosen().kernels; }
