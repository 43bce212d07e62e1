"""Whether a version of vLLM for GPUs has what Motet uses of it (`make surface VLLM=0.33.0`).

The package is downloaded and read, and not installed.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from motet_runner.external.vllm.names import differing
from tools.peers.environment import say


def compared(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        there = set(archive.namelist())

        def read(file: str) -> str | None:
            name = f"vllm/{file}"
            return archive.read(name).decode() if name in there else None

        return differing(read)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.surface", description="Compare a version of vLLM.")
    parser.add_argument("version", help="such as 0.33.0")
    version = parser.parse_args().version
    with tempfile.TemporaryDirectory(prefix="motet-surface-") as folder:
        asked = ["download", "--quiet", "--no-deps", "--only-binary=:all:", f"--dest={folder}", f"vllm=={version}"]
        if subprocess.run([sys.executable, "-m", "pip", *asked], check=False).returncode:
            sys.exit(f"The package index gave no vllm {version}; pip's message is above.")
        found = compared(next(Path(folder).glob("*.whl")))
    if found:
        sys.exit("\n".join((f"vLLM {version} differs from what Motet uses:", *(f"  {one}" for one in found))))
    say(f"vLLM {version} has the names and parameters that Motet uses.")


if __name__ == "__main__":
    main()
