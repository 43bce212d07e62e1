"""What a confined process may do."""

import subprocess
import sys

CODE = """
import socket
from motet.confined import without_sockets
socket.socketpair()
without_sockets()
open("/proc/self/stat").close()
for family in (socket.AF_INET, socket.AF_UNIX):
    try:
        socket.socket(family)
    except PermissionError:
        print("refused")
"""


def test_a_process_without_sockets_makes_none_and_reads_files() -> None:
    said = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert said.stdout == "refused\nrefused\n"
