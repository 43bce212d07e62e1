"""Java's own client, which asks for an upgrade to HTTP/2 with each request over plain text."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from tests.common.waiting import PATIENCE_S
from tests.gateway.conftest import Served


@pytest.mark.needs(lambda: shutil.which("java") and shutil.which("javac"), "a JDK (java and javac)")
async def test_javas_client_gets_its_answers(served: Served) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 4})
    program = str(Path(__file__).with_name("Ask.java"))
    process = await asyncio.create_subprocess_exec(
        "java", "-XX:TieredStopAtLevel=1", program, f"{served.url}/v1/completions", body, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(PATIENCE_S):
        output, _ = await process.communicate()
    lines = output.decode().splitlines()
    assert [line[:4] for line in lines] == ["200 ", "200 "], lines
