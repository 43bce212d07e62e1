"""`python watched.py PROGRAM…` runs a program, and kills it if this script's parent ends in any way.

Standard input is a pipe that nobody writes to. The pipe ends when the parent ends. Then the script kills the process
group of the program, which includes what the program has started, such as the parts of a compiler. A signal at the
parent's death (PR_SET_PDEATHSIG) would reach only the program.

The script imports nothing of this package: the imports would take longer than most programs that it runs.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from threading import Thread


def _kill_without_parent(program: "subprocess.Popen[bytes]") -> None:
    os.read(0, 1)
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)


def main() -> int:
    try:
        program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"error: {sys.argv[1]} could not run: {error.strerror}\n")
        return 127
    Thread(target=_kill_without_parent, args=(program,), daemon=True).start()
    return program.wait()


if __name__ == "__main__":
    status = main()
    if status < 0:  # end by the signal that ended the program
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
