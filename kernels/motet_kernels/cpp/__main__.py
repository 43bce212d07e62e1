"""`python -m motet_kernels.cpp LIBRARY` tests a library in a process of its own: instructions that the CPU lacks, or a
wrong address, crash only this process.

`python -m motet_kernels.cpp --install` builds an image's libraries, for all CPUs of this architecture.
"""

import sys
from pathlib import Path

from motet_kernels.cpp.builder import WRONG, checked, install
from motet_kernels.cpp.compiler import CompilerError, NotNow
from motet_kernels.cpp.self_test import SelfTestFailed

if __name__ == "__main__":
    try:
        if sys.argv[1:] == ["--install"]:
            sys.stdout.writelines(f"{path}\n" for path in install())
        else:
            checked(Path(sys.argv[1]))
    except SelfTestFailed as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(WRONG)
    except (CompilerError, NotNow, OSError) as error:
        sys.exit(f"error: {error}")
