// Large pages for results.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace SN_ISA {

// Ask for large pages for a result that is about to be written. The system clears every page of new memory: in pages of
// 4 KB that takes as long as a third of a convolution.
inline void use_large_pages(void *memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t PAGE = 4096;
    constexpr int64_t LEAST = 2 << 20;
    if (memory == nullptr || bytes < LEAST) return;
    uintptr_t first = (reinterpret_cast<uintptr_t>(memory) + PAGE - 1) / PAGE * PAGE;
    uintptr_t last = (reinterpret_cast<uintptr_t>(memory) + uintptr_t(bytes)) / PAGE * PAGE;
    (void)madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE);  // no more than a hint
#else
    (void)memory;
    (void)bytes;
#endif
}

}  // namespace SN_ISA
