"""Write the Python modules of motet.api.v1 from their .proto files (`make generate`).

The results are committed; tests/repo compares them with what this tool writes now. `--out DIR` writes elsewhere.
"""

import argparse
import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
COMMON = ROOT / "services" / "common"
PROTOS = COMMON / "motet" / "api" / "v1"

NOTE = "# Generated from {proto}: change that, not this file, and run `make generate`.\n"


def generate(out: Path) -> list[Path]:
    """Write into `out`, the folder with the package `motet`. Returns the files."""
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
        sys.exit("protoc did not accept the .proto files; its messages are above")
    written = sorted((out / "motet" / "api" / "v1").glob("*_pb2*"))
    for path in written:
        proto = PROTOS / f"{path.name.partition('_pb2')[0]}.proto"
        path.write_text(NOTE.format(proto=proto.relative_to(ROOT)) + path.read_text())
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=COMMON)
    for written in generate(parser.parse_args().out):
        print(written.name)  # noqa: T201
