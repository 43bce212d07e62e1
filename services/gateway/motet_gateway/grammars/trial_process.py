"""`python -m motet_gateway.grammars.trial_process TOKENIZER VOCABULARY EOS CPU_SECONDS MEMORY_BYTES`

Tries grammars with a model's tokenizer: each that comes on stdin, in a fork of this process, which has made what a
tokenizer needs in a second or more. A grammar may take endless time or memory, and end the process that compiles it by
too deep a recursion. So the kernel limits each fork, and there the stack is smaller than in an engine.

On stdin: the length of a message `Sampling`, which has the grammar, then this. On stdout: the fork's exit status and
the length of why the grammar cannot be served, then that; nothing if it can.
"""

import os
import signal
import struct
import sys
import threading
from pathlib import Path
from typing import NoReturn

from motet.api.v1 import runner_pb2
from motet.confined import confine, end_with_parent
from motet.errors import MotetError
from motet.grammars.compiler import Grammars
from motet.grammars.grammar import Grammar

ASKED = struct.Struct("!I")
SAID = struct.Struct("!iI")
STACK_BYTES = 2 << 20
MAX_SAID = 4096


def main() -> None:
    end_with_parent()
    file, vocabulary, eos, cpu_seconds, memory_bytes = sys.argv[1:]
    grammars = Grammars(Path(file), int(vocabulary), [int(one) for one in eos.split(",") if one])
    here = os.getpid()
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    while header := asked.read(ASKED.size):
        grammar = Grammar.from_proto(runner_pb2.Sampling.FromString(asked.read(*ASKED.unpack(header))))
        assert grammar is not None
        reads, writes = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reads)
            confine(int(memory_bytes), parent=here)
            _try(grammars, grammar, writes, float(cpu_seconds))
        os.close(writes)
        with os.fdopen(reads, "rb") as pipe:
            said = pipe.read(MAX_SAID)
        _, status = os.waitpid(child, 0)
        answers.write(SAID.pack(os.waitstatus_to_exitcode(status), len(said)) + said)
        answers.flush()


def _try(grammars: Grammars, grammar: Grammar, writes: int, cpu_seconds: float) -> NoReturn:
    def tried() -> None:
        try:
            grammars.try_grammar(grammar)
        except MotetError as error:
            os.write(writes, error.message.encode()[:MAX_SAID])
        ended.append(True)

    ended: list[bool] = []
    threading.stack_size(STACK_BYTES)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    thread = threading.Thread(target=tried)
    thread.start()
    thread.join()
    os._exit(0 if ended else 1)


if __name__ == "__main__":
    main()
