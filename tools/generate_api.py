"""Write the Python modules of motet.api.v1 from their .proto files (`make generate`).

The result is committed beside its source; tests/repo compares. `--out DIR` writes elsewhere.
"""

import argparse
import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
COMMON = ROOT / "services" / "common"
PROTOS = COMMON / "motet" / "api" / "v1"


def generate(out: Path) -> list[Path]:
    """Generate into `out` (the folder that holds the package `motet`) and name the files written."""
    names = sorted(p.relative_to(COMMON).as_posix() for p in PROTOS.glob("*.proto"))
    arguments = [
        "protoc",
        f"-I{COMMON}",
        f"-I{resources.files('grpc_tools') / '_proto'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out={out}",
        f"--mypy_grpc_out={out}",
        *names,
    ]
    if protoc.main(arguments) != 0:
        sys.exit("protoc refused the .proto files above")
    return sorted((out / "motet" / "api" / "v1").glob("*_pb2*"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=COMMON)
    for written in generate(parser.parse_args().out):
        print(written.name)  # noqa: T201
