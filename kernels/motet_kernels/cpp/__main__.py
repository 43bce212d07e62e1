"""`python -m motet_kernels.cpp LIBRARY` tests a library. A process of its own does it: one with instructions that the
CPU lacks, or with a wrong address, ends only that one.
"""

import sys
from pathlib import Path

from motet_kernels.cpp.library import Library
from motet_kernels.cpp.self_test import SelfTestFailed, check

if __name__ == "__main__":
    try:
        check(Library(Path(sys.argv[1])))
    except (OSError, AttributeError, SelfTestFailed) as error:
        sys.exit(f"error: {error}")
