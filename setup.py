"""Build the native CPU kernels: one shared library without torch or Python headers, loaded through ctypes.

The same source is compiled once per instruction set; the library selects one when it is loaded. The library is
optional: if it cannot be built, the package is installed without it. All other settings are in pyproject.toml.

- Linux: GCC or Clang with OpenMP. The library needs libgomp.so.1, which torch has loaded, and so shares its threads.
- macOS: Clang without OpenMP. The kernels use one thread, since Apple's compiler has no OpenMP runtime.
- Windows: Clang with OpenMP, from the package ziglang, because MSVC has no vector extensions and GCC does not align the
  stack for AVX. The library needs libiomp5md.dll, which torch has loaded, and so shares its threads. It can be built
  on any system: SPHERENET_CROSS=windows.
- Windows on other processors, or if SPHERENET_PURE=1: no library.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("src/spherenet/kernels/csrc")
# No -ffast-math: NaN and inf must propagate as documented. GCC 12 warns of uninitialized values in AVX-512 headers.
COMPILE = ["-std=c++17", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
           "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized"]  # fmt: skip
WINDOWS = sys.platform == "win32" or os.environ.get("SPHERENET_CROSS") == "windows"
PURE = os.environ.get("SPHERENET_PURE", "0") not in ("", "0")
PURE |= sys.platform == "win32" and platform.machine().lower() not in ("x86_64", "amd64")
if sys.platform == "darwin" and not WINDOWS:
    OPENMP, COMPILE = [], [*COMPILE, "-Wno-unknown-pragmas", "-Wno-unused-parameter", "-Wno-unused-variable"]
elif WINDOWS:
    OPENMP, COMPILE = ["-fopenmp"], [flag for flag in COMPILE if flag != "-fPIC"]  # all code is relocatable there
else:
    OPENMP, COMPILE = ["-fopenmp"], [*COMPILE, "-Wno-maybe-uninitialized"]
STRIP = [] if sys.platform == "darwin" else ["-Wl,--strip-all"]
X86 = {
    "baseline": ["-Os"],  # for processors before 2013: a third smaller
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512"],
}
ZIG_TARGET = "x86_64-windows-gnu"
OPENMP_IMPORTS = [  # the functions that Clang calls for the directives of csrc/
    "__kmpc_barrier",
    "__kmpc_dispatch_deinit",
    "__kmpc_dispatch_init_8",
    "__kmpc_dispatch_next_8",
    "__kmpc_end_serialized_parallel",
    "__kmpc_for_static_fini",
    "__kmpc_for_static_init_8",
    "__kmpc_fork_call",
    "__kmpc_global_thread_num",
    "__kmpc_push_num_threads",
    "__kmpc_serialized_parallel",
]


def instruction_sets() -> dict[str, list[str]]:
    """Return the compiler flags of every instruction set to build for."""
    return X86 if WINDOWS or platform.machine().lower() in ("x86_64", "amd64") else {"baseline": []}


def run_zig(*arguments: str) -> None:
    """Run the compiler of the package ziglang."""
    try:
        subprocess.run([sys.executable, "-m", "ziglang", *arguments], check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"ziglang failed: {error}") from error


def zig_compile(
    sources: list[str], output: str, macros: list[tuple[str, str | None]], extra_postargs: list[str]
) -> list[str]:
    """Compile sources for 64-bit Windows and return the objects, as distutils' compilers do."""
    Path(output).mkdir(parents=True, exist_ok=True)
    defined = [f"-D{name}" if value is None else f"-D{name}={value}" for name, value in macros]
    objects = [str(Path(output, Path(source).stem + ".obj")) for source in sources]
    for source, target in zip(sources, objects, strict=True):
        run_zig("c++", "-target", ZIG_TARGET, *defined, *extra_postargs, "-c", source, "-o", target)
    return objects


def zig_link(objects: list[str], target: Path, folder: Path) -> None:
    """Link a DLL. Its OpenMP runtime is the one of torch, for which an import library is made from OPENMP_IMPORTS."""
    definition, imports = folder / "libiomp5md.def", folder / "libiomp5md.lib"
    definition.write_text("\n".join(["LIBRARY libiomp5md.dll", "EXPORTS", *OPENMP_IMPORTS, ""]))
    run_zig("dlltool", "-m", "i386:x86-64", "-d", str(definition), "-l", str(imports))
    built = folder / target.name
    run_zig("c++", "-target", ZIG_TARGET, "-shared", "-s", *objects, str(imports), "-o", str(built))
    shutil.copyfile(built, target)


class BuildKernels(build_ext):
    """Compile kernels.cpp and winograd.cpp once per instruction set and link the objects with library.cpp."""

    def build_extension(self, ext: Extension) -> None:
        """Build the shared library."""
        extra = os.environ.get("SPHERENET_NATIVE_FLAGS", "").split()  # e.g. -fsanitize=address
        sets = instruction_sets()
        macros = [("SN_HAS_AVX", None)] if len(sets) > 1 else []
        compile_ = zig_compile if WINDOWS else self.compiler.compile

        def compile_objects(
            source: str, macros: list[tuple[str, str | None]], folder: str, flags: list[str]
        ) -> list[str]:
            output = str(Path(self.build_temp, folder))
            return compile_([str(SOURCES / source)], output, macros, extra_postargs=[*COMPILE, *OPENMP, *flags, *extra])

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            jobs = [pool.submit(compile_objects, "library.cpp", macros, "library", [])]
            jobs += [
                pool.submit(compile_objects, source, [("SN_ISA", name)], name, sets[name])
                for source in ("kernels.cpp", "winograd.cpp")
                for name in sets
            ]
            objects = [file for job in jobs for file in job.result()]
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        if WINDOWS:
            zig_link(objects, Path(target), Path(self.build_temp))
            return
        self.compiler.link_shared_object(
            objects, target, extra_postargs=[*OPENMP, *(extra or STRIP)], target_lang="c++"
        )

    def get_ext_filename(self, fullname: str) -> str:
        """Return a file name without the Python version, on which the library does not depend."""
        return str(Path(*fullname.split("."))) + (".dll" if WINDOWS else ".so")


class PlatformWheel(bdist_wheel):
    """Tag a wheel with its platform only, because any Python 3 can load the library."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the wheel's tag."""
        return "py3", "none", "win_amd64" if WINDOWS else super().get_tag()[2]


def long_description() -> str:
    """Return README.md for PyPI: links and images of this repository become absolute.

    Images are read from the raw files; other links open the page of the file. Code blocks stay as they are.
    """
    repository = re.search(r'^Repository = "(.*)"$', Path("pyproject.toml").read_text("utf-8"), re.MULTILINE)[1]

    def absolute(link: re.Match[str]) -> str:
        folder = "raw" if link[1].startswith("!") else "blob"
        return f"{link[1]}({repository}/{folder}/main/{link[2]})"

    sections = re.split(r"(^```.*?^```$)", Path("README.md").read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    sections[::2] = [re.sub(r"(!?\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)", absolute, text) for text in sections[::2]]
    return "".join(sections)


KERNELS = Extension(
    "spherenet.kernels._native",
    [str(SOURCES / name) for name in ("kernels.cpp", "library.cpp", "winograd.cpp")],
    depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
    optional=True,
)

if __name__ == "__main__":
    setup(
        long_description=long_description(),
        long_description_content_type="text/markdown",
        ext_modules=[] if PURE else [KERNELS],
        cmdclass={} if PURE else {"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
    )
