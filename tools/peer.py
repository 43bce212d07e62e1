"""Build environments with the engines that benchmarks measure beside the product (`make peer`).

vLLM for CPUs is for `benchmarks.vllm_peer`, llama.cpp for `benchmarks.llama_cpp_peer`. An older vLLM,
which is built only if it is named, is for `make compat`. If one cannot be built, the others still are.
"""

import argparse
import sys

from tools.peers.environment import AGAIN, CannotBuildPeer, make_alone, say
from tools.peers.llama_cpp import LLAMA_CPP
from tools.peers.vllm import VLLM, VLLM_0_31

RECIPES = {"vllm": VLLM, "llama.cpp": LLAMA_CPP, "vllm-0.31": VLLM_0_31}
USUAL = ("vllm", "llama.cpp")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.peer", description="Build environments with other engines.")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=USUAL, help=f"which (default: {' '.join(USUAL)})")
    parser.add_argument("--torch-index", default=None, metavar="URL", help="take torch from this index")
    given = parser.parse_args()
    failed = False
    for name in given.only:
        try:
            make_alone(RECIPES[name], given.torch_index or None)
        except CannotBuildPeer as error:
            say(str(error))
            failed = True
        except KeyboardInterrupt:
            sys.exit(f"Stopped. {AGAIN}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
