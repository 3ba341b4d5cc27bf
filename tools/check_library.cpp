// Load a native library built for another system and print results of its kernels, to compare them between systems.
//
// Compile for the system of the library, and run it there or under an emulator, with library and number of threads:
//     x86_64-w64-mingw32-g++ -std=c++17 -static tools/check_library.cpp -o check_library.exe
//     KMP_AFFINITY=disabled wine64 check_library.exe _native.dll 2
//     aarch64-linux-gnu-g++ -std=c++17 tools/check_library.cpp -o check_library
//     qemu-aarch64 -L /usr/aarch64-linux-gnu check_library _native.so 2
// The first line names the instruction set. Each further line is the sum of outputs or gradients and their norm.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../src/spherenet/kernels/csrc/api.h"

#if defined(_WIN32)
#include <windows.h>
static void *open_library(const char *path) { return reinterpret_cast<void *>(LoadLibraryA(path)); }
static void *symbol(void *library, const char *name) {
    return reinterpret_cast<void *>(GetProcAddress(static_cast<HMODULE>(library), name));
}
#else
#include <dlfcn.h>
static void *open_library(const char *path) { return dlopen(path, RTLD_NOW); }
static void *symbol(void *library, const char *name) { return dlsym(library, name); }
#endif

static std::vector<float> values(size_t count, unsigned seed) {
    std::vector<float> result(count);
    for (float &value : result) {
        seed = seed * 1664525u + 1013904223u;
        value = float(seed >> 8) / float(1 << 24) - 0.5f;
    }
    return result;
}

static void print(const char *name, const std::vector<float> &data) {
    double sum = 0, squares = 0;
    for (float value : data) sum += value, squares += double(value) * value;
    std::printf("%-12s %.5f %.5f\n", name, sum, std::sqrt(squares));
}

int main(int count, char **arguments) {
    void *library = open_library(count > 1 ? arguments[1] : "");
    if (library == nullptr) return std::puts("the library cannot be loaded"), 1;
    auto version = reinterpret_cast<int32_t (*)()>(symbol(library, "spherenet_interface_version"));
    auto table = reinterpret_cast<const Kernels *(*)()>(symbol(library, "spherenet_kernels"));
    auto name = reinterpret_cast<const char *(*)()>(symbol(library, "spherenet_instruction_set"));
    if (!version || !table || !name) return std::puts("a symbol is missing"), 1;
    int32_t threads = count > 2 ? std::atoi(arguments[2]) : 1;
    std::printf("version %d, %s, %d threads\n", version(), name(), threads);
    const Kernels &kernels = *table();

    // A pointwise layer on rows: forward, backward and the correction of the gradient; g is linear in the angle.
    const int64_t images = 4, side = 24, channels = 48, filters = 40, pixels = images * side * side;
    const Geometry geometry{images, channels, filters, 1, {1, side, side}, {1, side, side}, {1, 1, 1},
                            {1, 1, 1}, {0, 0, 0}, {1, 1, 1}, 1, 1};
    for (int32_t type : {COSINE, LINEAR, SQUARE_COSINE}) {
        Angle angle{};
        angle.type = type;
        angle.alpha = 1;
        std::vector<float> x = values(pixels * channels, 1), weight = values(filters * channels, 2);
        std::vector<float> unit(weight.size()), scale(filters), inverse_norm(pixels), cosine(pixels * filters);
        kernels.unit_weight(weight.data(), unit.data(), scale.data(), filters, channels, 1e-12, 0, FLOAT32, FLOAT32,
                            threads);
        std::vector<float> product(pixels * filters);
        for (int64_t pixel = 0; pixel < pixels; ++pixel)
            for (int64_t filter = 0; filter < filters; ++filter) {
                double sum = 0;
                for (int64_t c = 0; c < channels; ++c)
                    sum += double(x[pixel * channels + c]) * unit[filter * channels + c];
                product[pixel * filters + filter] = float(sum);
            }
        kernels.forward(&geometry, &angle, x.data(), product.data(), product.data(), inverse_norm.data(), nullptr,
                        cosine.data(), 1e-12, FLOAT32, threads);
        print("unit weight", unit);
        print("output", product);
        print("cosine", cosine);
        std::vector<float> grad = values(product.size(), 3), grad_product(product.size()), spread(pixels);
        std::vector<float> sums(4 * filters), grad_x = values(x.size(), 4);
        Backward pointers{};
        pointers.grad = grad.data(), pointers.saved = cosine.data(), pointers.inverse_norm = inverse_norm.data();
        pointers.grad_product = grad_product.data(), pointers.spread = spread.data(), pointers.sums = sums.data();
        pointers.saved_map = SAVED_COSINE;
        kernels.backward(&geometry, &angle, &pointers, FLOAT32, threads);
        kernels.correct(&geometry, grad_x.data(), x.data(), spread.data(), nullptr, FLOAT32, threads);
        print("gradient", grad_product);
        print("spread", spread);
        print("correction", grad_x);
    }
    return 0;
}
