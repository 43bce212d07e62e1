"""Runs in vLLM's environment, for tests: `python vllm_process.py [TOKENS]`. Makes the calls of `Driven` that come on
stdin. TOKENS: of a block, instead of what it usually has.

A message is a pickled tuple of a method and its arguments; the answer is what it returns, or the exception it raises.
"""

import os
import pickle
import sys

from motet_runner.external.vllm.__main__ import VARIABLES


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.environ |= VARIABLES
    from motet_runner.external.vllm import surface as module

    for tokens in sys.argv[1:]:
        module.BLOCK_TOKENS = module.BLOCK_TOKENS_ON_CPU = int(tokens)
    surface = None
    while True:
        try:
            method, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if surface is None:
                surface = module.Surface(*arguments)
                found = surface.facts
            else:
                found = getattr(surface, method)(*arguments)
        except Exception as error:
            found = RuntimeError(f"{type(error).__name__}: {error}")
        pickle.dump(found, answers)
        answers.flush()


if __name__ == "__main__":
    main()
