"""llama.cpp, compiled for this machine's processor from the sources in the package llama-cpp-python."""

import os
import shlex
import shutil
import tempfile
from pathlib import Path

from tools.peers.environment import AGAIN, Recipe, pip, python_of, run

REQUIREMENT = "llama-cpp-python==0.3.36"
WRITER = "gguf>=0.17"
"""Writes the files that llama.cpp reads."""
FLAGS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "GGML_OPENMP": "ON",
    "LLAVA_BUILD": "OFF",
    # GCC 12.2 removes the stores that configure AMX's tiles as dead ones, and products of 8 bits end with SIGSEGV.
    "CMAKE_CXX_FLAGS": "-fno-dse -fno-tree-dse",
}


def _missing() -> str | None:
    wanted = os.environ.get("CXX") or "c++"
    if shutil.which(wanted.split()[0]) is None:
        return f"llama.cpp is compiled here, and there is no {wanted}. Install a C++ compiler (Debian's package: g++)."
    return None


def _build(environment: Path, _: str | None) -> dict[str, str]:
    flags = shlex.join(f"-D{name}={value}" for name, value in FLAGS.items())
    offline = "The package index did not give all of llama.cpp; pip's message is above. Is this machine connected?"
    broken = (
        "llama.cpp was not compiled; the compiler's message is above. It needs a compiler for C11 and C++17, "
        f"with OpenMP (Debian's package: g++). {AGAIN}"
    )
    with tempfile.TemporaryDirectory(dir=environment, prefix="download-") as work:
        source = ("--no-deps", "--no-build-isolation", "--dest", work, REQUIREMENT)
        tools = ("install", "--quiet", "scikit-build-core>=0.9.2", "cmake>=3.21", "ninja", WRITER)
        pip(environment, work, *tools, otherwise=offline)
        pip(environment, work, "download", "--quiet", "--no-binary", ":all:", *source, otherwise=offline)
        (archive,) = Path(work).glob("llama_cpp_python-*.tar.gz")
        cores = str(os.cpu_count() or 1)
        build = ("install", "--quiet", "--no-build-isolation", archive)
        pip(environment, work, *build, otherwise=broken, CMAKE_ARGS=flags, CMAKE_BUILD_PARALLEL_LEVEL=cores)
    code = "import llama_cpp; print(llama_cpp.__version__)"
    cannot = "llama.cpp is installed, but cannot be loaded; the reason is above."
    return {"llama-cpp-python": run(python_of(environment), "-c", code, otherwise=cannot).strip(), "flags": flags}


LLAMA_CPP = Recipe(
    name="llama.cpp",
    requirement=REQUIREMENT,
    folder="llama-cpp",
    named_by="MOTET_LLAMA_CPP",
    room=2 * 10**9,
    downloads=lambda _: "It downloads 130 MB, and compiles for some minutes. On disk that is 500 MB.",
    build=_build,
    missing=_missing,
)
