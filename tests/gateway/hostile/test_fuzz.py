"""Minutes of hostile bytes against a live gateway: honest streams keep their pace, and its memory stays flat."""

import asyncio
import os
import random
import sys
import time
from asyncio.subprocess import PIPE
from datetime import UTC, datetime
from pathlib import Path

import httpx2
import psutil
import pytest

from motet import keys
from motet.keys import ApiKey, KeyScope
from testbed.fake_services import FakeServices
from testbed.ports import free_port
from tests.common.waiting import PATIENCE_S
from tests.gateway.test_process import answers, process

FUZZ_SECONDS = float(os.environ.get("MOTET_FUZZ_SECONDS", "600"))
"""`MOTET_FUZZ_SECONDS=30` is a quick look."""
CALM_SECONDS = max(5.0, FUZZ_SECONDS / 20)
STREAMS = 8
STEP_SECONDS = 0.02
MAX_SLOWDOWN = 2.0
MAX_GROWTH_BYTES = 16 << 20
"""Between the second third of the time and the last one."""


def a_key(tenant: str) -> tuple[str, str]:
    """A key, and its line in a file of keys."""
    made = keys.new_key()
    scopes = frozenset({KeyScope.USER})
    return str(made), keys.to_line(
        ApiKey(id=made.id, tenant=tenant, scopes=scopes, hash=made.hash, created=datetime.now(UTC))
    )


async def gaps(http: httpx2.AsyncClient, seconds: float) -> list[float]:
    """Seconds between the tokens of honest streams, which follow each other."""
    found: list[float] = []
    until = time.monotonic() + seconds
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 60, "ignore_eos": True, "stream": True}

    async def one() -> None:
        while time.monotonic() < until:
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200, await answer.aread()
                before, done = 0.0, False
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        if before:
                            found.append(now - before)
                        before = now
                    done = done or line == "data: [DONE]"
                assert done

    await asyncio.gather(*(one() for _ in range(STREAMS)))
    return sorted(found)


def p99(sorted_values: list[float]) -> float:
    return sorted_values[int(len(sorted_values) * 0.99)]


async def memory(of: psutil.Process, into: list[int]) -> None:
    while True:
        into.append(of.memory_info().rss)
        await asyncio.sleep(1)


@pytest.mark.soak
@pytest.mark.timeout(FUZZ_SECONDS * 2 + 300)
async def test_a_fuzzed_gateway_serves_honest_streams_as_before(tmp_path: Path, cluster: FakeServices) -> None:
    port, (honest, first), (other, second) = free_port(), a_key("default"), a_key("acme")
    (tmp_path / "keys").write_text(f"{first}\n{second}\n")
    cluster.runners[0].step_seconds = STEP_SECONDS
    cluster.scheduler.keeps_record = cluster.runners[0].keeps_record = cluster.predictor.keeps_record = False
    environment = {"MOTET_GATEWAY_KEYS_FILE": str(tmp_path / "keys"), "MOTET_LOG_LEVEL": "error"}
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    async with (
        process(tmp_path, port, cluster, **environment) as started,
        httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            timeout=PATIENCE_S,
            headers={"authorization": f"Bearer {honest}"},
            trust_env=False,
        ) as http,
    ):
        await answers(http, "/health")
        await gaps(http, 1)
        calm = await gaps(http, CALM_SECONDS)
        resident: list[int] = []
        watch = asyncio.create_task(memory(psutil.Process(started.pid), resident))
        fuzz = await asyncio.create_subprocess_exec(
            "nice", sys.executable, "-m", "tests.gateway.hostile.fuzz", str(port), str(FUZZ_SECONDS), str(seed), other,
            stdout=PIPE,
        )  # fmt: skip
        fuzzed = await gaps(http, FUZZ_SECONDS)
        output, _ = await fuzz.communicate()
        watch.cancel()
        assert started.returncode is None
        third = len(resident) // 3
        middle, last = max(resident[third : 2 * third]), max(resident[2 * third :])
        print(
            f"{int(output)} hostile clients; p99 gap {p99(calm) * 1e3:.1f} ms, fuzzed {p99(fuzzed) * 1e3:.1f} ms; "
            f"memory {resident[0] >> 20} MiB, middle {middle >> 20} MiB, last {last >> 20} MiB"
        )
        assert int(output) > 0
        assert p99(fuzzed) <= MAX_SLOWDOWN * p99(calm)
        assert last - middle <= MAX_GROWTH_BYTES
