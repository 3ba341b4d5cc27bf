"""Build the native CPU kernels: one shared library without torch or Python headers, loaded through ctypes.

The same source is compiled once per instruction set; the library selects one when it is loaded. The library is
optional: if it cannot be built, the package is installed without it. All other settings are in pyproject.toml.

- Linux: GCC or Clang with OpenMP. The library needs libgomp.so.1, which torch has loaded, and so shares its threads.
- macOS: Clang without OpenMP. The kernels use one thread, since Apple's compiler has no OpenMP runtime.
- Windows, or if SPHERENET_PURE=1: no library. The source uses vector extensions that MSVC does not have.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/spherenet/kernels/csrc")
# No -ffast-math: NaN and inf must propagate as documented. GCC 12 warns of uninitialized values in AVX-512 headers.
COMPILE = ["-std=c++17", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
           "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized"]  # fmt: skip
if sys.platform == "darwin":
    OPENMP, COMPILE = [], [*COMPILE, "-Wno-unknown-pragmas", "-Wno-unused-parameter", "-Wno-unused-variable"]
else:
    OPENMP, COMPILE = ["-fopenmp"], [*COMPILE, "-Wno-maybe-uninitialized"]
PURE = sys.platform == "win32" or os.environ.get("SPHERENET_PURE", "0") not in ("", "0")
X86 = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512"],
}


def instruction_sets() -> dict[str, list[str]]:
    """Return the compiler flags of every instruction set to build for."""
    return X86 if platform.machine().lower() in ("x86_64", "amd64") else {"baseline": []}


class BuildKernels(build_ext):
    """Compile kernels.cpp once per instruction set and link the objects with library.cpp."""

    def build_extension(self, ext: Extension) -> None:
        """Build the shared library."""
        extra = os.environ.get("SPHERENET_NATIVE_FLAGS", "").split()  # e.g. -fsanitize=address
        sets = instruction_sets()
        macros = [("SN_HAS_AVX", None)] if len(sets) > 1 else []
        compile_ = self.compiler.compile

        def compile_objects(
            source: str, macros: list[tuple[str, str | None]], folder: str, flags: list[str]
        ) -> list[str]:
            output = str(Path(self.build_temp, folder))
            return compile_([str(SOURCES / source)], output, macros, extra_postargs=[*COMPILE, *OPENMP, *flags, *extra])

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            jobs = [pool.submit(compile_objects, "library.cpp", macros, "library", [])]
            jobs += [pool.submit(compile_objects, "kernels.cpp", [("SN_ISA", name)], name, sets[name]) for name in sets]
            objects = [file for job in jobs for file in job.result()]
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, target, extra_postargs=[*OPENMP, *extra], target_lang="c++")

    def get_ext_filename(self, fullname: str) -> str:
        """Return a file name without the Python version, on which the library does not depend."""
        return str(Path(*fullname.split("."))) + ".so"


class PlatformWheel(bdist_wheel):
    """Tag a wheel with its platform only, because any Python 3 can load the library."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the wheel's tag."""
        return "py3", "none", super().get_tag()[2]


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
    [str(SOURCES / "kernels.cpp"), str(SOURCES / "library.cpp")],
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
