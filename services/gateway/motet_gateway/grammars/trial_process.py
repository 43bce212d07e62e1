"""`python -m motet_gateway.grammars.trial_process CPU_SECONDS MEMORY_BYTES`: compiles the grammar that comes on stdin.

It says on stdout why it cannot be served; nothing if it can. A grammar may take endless time or memory, and end the
process that compiles it by too deep a recursion. So the kernel limits this one, and here the stack is smaller than in
an engine.
"""

import signal
import sys
import threading

from motet.errors import MotetError
from motet.grammars.compiler import try_grammar
from motet.grammars.grammar import Grammar, GrammarForm
from motet_gateway.confined import confine

STACK_BYTES = 2 << 20


def main() -> None:
    cpu_seconds, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    form, _, text = sys.stdin.buffer.read().decode().partition("\n")
    threading.stack_size(STACK_BYTES)
    confine(memory_bytes)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    thread = threading.Thread(target=_try, args=(Grammar(GrammarForm(form), text),))
    thread.start()
    thread.join()


def _try(grammar: Grammar) -> None:
    try:
        try_grammar(grammar)
    except MotetError as error:
        sys.stdout.write(error.message)


if __name__ == "__main__":
    main()
