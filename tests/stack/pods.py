"""The five services as pods run them, with a fake operator: TCP, mutual TLS by role, probes over HTTP."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx2 as httpx
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionUserMessageParam

from motet.api.v1 import scheduler_pb2
from motet.clock import monotonic
from motet.rpc import Link
from motet.tls import TlsIdentity, acting_as
from motet.transport.methods import SYNC
from motet.transport.over_grpc import GrpcNetwork
from testbed.local_stack import BUNDLED
from testbed.ports import free_port
from tests.support.authority import Authority
from tests.support.in_process_services import adapter_entry

SERVICES = ("scheduler", "supervisor", "predictor", "runner", "gateway")
READY_WITHIN_S = 90.0
GRACE_S = 30.0
QUESTION: ChatCompletionUserMessageParam = {"role": "user", "content": "Who keeps the lighthouse of Brindle?"}


class ServicesAsPods:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority()
        self.ports = {name: free_port() for name in SERVICES}
        self.probes = {name: free_port() for name in SERVICES}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for role in (*SERVICES, "operator"):
            self.issue(role)

    def issue(self, role: str) -> Path:
        return self.authority.issue(self.folder / "tls" / role, role)

    def address(self, service: str) -> str:
        return f"127.0.0.1:{self.ports[service]}"

    @contextmanager
    def running(self, service: str, code: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
        """Run the services, of this version or of the version in a folder."""
        of_its_own = {
            "gateway": {"MOTET_GATEWAY_HOST": "127.0.0.1", "MOTET_GATEWAY_PORT": str(self.ports["gateway"])},
            "runner": {
                "MOTET_RUNNER_LISTEN": self.address("runner"),
                "MOTET_RUNNER_ADDRESS": self.address("runner"),
                "MOTET_RUNNER_POOL": "default/demo",
                "MOTET_RUNNER_MODEL_URI": (BUNDLED / "model").as_uri(),
                "MOTET_RUNNER_KV_CACHE_MIB": "64",
                "MOTET_RUNNER_DTYPE": "float32",  # two versions may choose different types
                "MOTET_RUNNER_DRAIN_SECONDS": "20",
            },
        }
        shared = {
            "MOTET_DATA_DIR": str(self.folder / service),
            "MOTET_TLS_DIR": str(self.folder / "tls" / service),
            "MOTET_METRICS_ADDRESS": f"127.0.0.1:{self.probes[service]}",
            **{
                f"MOTET_{name}_ADDRESS".upper(): self.address(name) for name in ("scheduler", "predictor", "supervisor")
            },
        }
        if code is not None:
            shared["PYTHONPATH"] = str(code)
        with self.log(service).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"motet_{service}"],
                env=os.environ | shared | of_its_own.get(service, {}),
                stdout=log,
                stderr=log,
            )
        self.processes[service] = process
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()

    def log(self, service: str) -> Path:
        return self.folder / f"{service}.log"

    def probe(self, service: str, what: str = "readyz") -> tuple[int, str]:
        try:
            # Do not load authorities for plain HTTP: ten times a second, that would take a third of a core.
            answer = httpx.get(f"http://127.0.0.1:{self.probes[service]}/{what}", timeout=2, verify=False)
        except httpx.HTTPError as error:
            return 0, str(error)
        return answer.status_code, answer.text.strip()

    async def until_ready(self, service: str) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while (answer := await asyncio.to_thread(self.probe, service)) != (200, "ok"):
            assert self.processes[service].poll() is None, self.log(service).read_text()
            assert time.monotonic() < deadline, f"{service} says {answer}:\n{self.log(service).read_text()[-2000:]}"
            await asyncio.sleep(0.1)

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[Link[scheduler_pb2.SyncUp, scheduler_pb2.SyncDown]]:
        """A fake operator that declares one pool and one adapter."""
        pool = scheduler_pb2.PoolEntry(
            pool="default/demo",
            group="default/demo",
            served_name="demo",
            model_uri="file:///demo",
            replicas=1,
            tenants=["default"],
        )
        pirate = adapter_entry("pirate", BUNDLED / "adapters" / "pirate")
        snapshot = scheduler_pb2.CatalogSnapshot(revision=1, pools=[pool], adapters=[pirate])
        link: Link[scheduler_pb2.SyncUp, scheduler_pb2.SyncDown] = Link(
            "scheduler",
            self.address("scheduler"),
            SYNC,
            network=GrpcNetwork(),
            greet=lambda: [scheduler_pb2.SyncUp(snapshot=snapshot)],
            receive=lambda _: None,
        )
        with acting_as(TlsIdentity(self.folder / "tls" / "operator", "operator", clock=monotonic)):
            running = asyncio.create_task(link.run())
        try:
            yield link
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def ask(self, model: str, *, tokens: int = 8) -> str:
        async with httpx.AsyncClient(
            base_url=f"http://{self.address('gateway')}/v1", timeout=60, verify=False
        ) as client:
            body = {
                "model": model,
                "messages": [QUESTION],
                "max_tokens": tokens,
                "temperature": 0,
            }
            deadline = time.monotonic() + 60
            while True:
                answer = await client.post("/chat/completions", json=body)
                if answer.status_code == 200:
                    return str(answer.json()["choices"][0]["message"]["content"])
                assert time.monotonic() < deadline, answer.text
                await asyncio.sleep(0.2)

    async def stream(self, model: str, *, tokens: int) -> AsyncIterator[str]:
        """Stream an answer of `tokens` tokens. Raises an error if the stream breaks."""
        async with AsyncOpenAI(
            base_url=f"http://{self.address('gateway')}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:
            chunks = await client.chat.completions.create(
                model=model,
                messages=[QUESTION],
                max_tokens=tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            reasons = []
            async for chunk in chunks:
                for choice in chunk.choices:
                    if choice.delta.content:
                        yield choice.delta.content
                    if choice.finish_reason:
                        reasons.append(choice.finish_reason)
        assert reasons == ["length"]


def all_end(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    deadline = time.monotonic() + GRACE_S
    return [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
