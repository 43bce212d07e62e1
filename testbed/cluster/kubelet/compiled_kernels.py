"""`python -m testbed.cluster.kubelet.compiled_kernels FOLDER` puts there what the runner's image has beside its
packages: the compiled kernels. Without them, each runner of a test would compile them for most of a minute.

It is a program of its own, since it needs torch. It makes them for this CPU alone, as users' machines do, once.
"""

import os
import shutil
import sys
from pathlib import Path

from motet_kernels.cpp import builder
from motet_kernels.cpp.compiler import cpu_flags, instruction_sets
from testbed.compiled_kernels import CACHE


def install(folder: Path) -> None:
    made = builder.build(CACHE)
    (instructions,) = [one for one in instruction_sets(cpu_flags()) if one.name == made.instructions]
    library = folder / builder.file_name(instructions)
    if not library.exists():
        library.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        unnamed = library.with_suffix(f".{os.getpid()}")
        shutil.copyfile(made.library.path, unnamed)
        unnamed.replace(library)


if __name__ == "__main__":
    install(Path(sys.argv[1]))
