"""A second gateway of a stack: apart from the database and the services behind them, the two share nothing."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from motet.processes.linux import environment_of
from testbed.local_stack import LocalStack
from testbed.ports import free_port


@contextmanager
def second_gateway(stack: LocalStack, folder: Path, *, log: Path) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Run a second gateway. Gives its URL and its process, which a test may kill."""
    first = environment_of(stack.service("gateway")["pid"])
    shared = ("MOTET_DATABASE_URL", "MOTET_SCHEDULER_ADDRESS", "MOTET_PREDICTOR_ADDRESS")
    port = free_port()
    own = {"MOTET_DATA_DIR": str(folder), "MOTET_GATEWAY_PORT": str(port), "MOTET_LOG_FORMAT": "json"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "motet_gateway"],
            env=stack.environment() | {name: first[name] for name in shared} | own,
            stdout=output,
            stderr=output,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx2.Client(base_url=url, trust_env=False, verify=False) as http:
            stack.until(lambda: serves(http))
        yield url, process
    finally:
        process.terminate()
        assert process.wait(60) in (0, -signal.SIGKILL), log.read_text()


def serves(http: httpx2.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx2.TransportError:
        return False
