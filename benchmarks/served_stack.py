"""The whole product with a random model, as `motet up` starts it, and clients that stream its answers.

Tests have the code that starts a stack and takes it down; this module gives it a model, adapters and a tokenizer.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.engine_run import Ask
from motet.domain import BASE, Digest
from testbed.local_stack import LocalStack, running_stack

POOL, SERVED, DEFAULT = "benchmark", "base", "default"
DONE = b"data: [DONE]"


@contextmanager
def serving(
    folder: Path, model: Path, adapters: Sequence[Path], *, engine: dict[str, Any], env: dict[str, str]
) -> Iterator[LocalStack]:
    """A stack that serves this model as `base`, and its adapters by their numbers: `adapter-0`."""
    manifests = folder / "manifests"
    named = manifests / "model"
    named.mkdir(parents=True)
    for path in model.iterdir():
        (named / path.name).symlink_to(path)
    save_tokenizer(named, json.loads((model / "config.json").read_text())["vocab_size"])
    spec = {"model": {"uri": "file://model", "servedName": SERVED}, "engine": engine}
    _write(manifests, "ServingPool", POOL, spec | {"allowedNamespaces": {"from": "All"}})
    for number, adapter in enumerate(adapters):
        write_adapter(manifests, f"adapter-{number}", adapter)
    with running_stack(folder, manifests=manifests, env=env) as stack:
        yield stack


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    """Token 17 is the word `w17`. It writes a space as vocabularies of SentencePiece do."""
    tokenizer = Tokenizer(models.WordLevel({f"▁w{token}": token for token in range(vocabulary)}, unk_token="▁w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def write_adapter(manifests: Path, name: str, adapter: Path, *, namespace: str = DEFAULT) -> Path:
    pool = {"name": POOL, "namespace": DEFAULT}
    spec = {"poolRef": pool, "source": {"uri": adapter.as_uri()}}
    return _write(manifests, "LoRAAdapter", name, spec, namespace=namespace)


def _write(manifests: Path, kind: str, name: str, spec: dict[str, Any], *, namespace: str = DEFAULT) -> Path:
    metadata = {"name": name, "namespace": namespace}
    manifest = {"apiVersion": "motet.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}
    path = manifests / f"{name}.json"
    path.write_text(json.dumps(manifest))
    return path


@dataclass
class StreamingClient:
    """One connection after the other's request. It reads each event as it comes, and costs little CPU time itself."""

    port: int
    adapters: Sequence[Digest] = ()
    key: str = ""
    """Empty: the gateway asks for none."""
    arrivals: list[list[float]] = field(default_factory=list)
    """When the parts of each answer came"""
    _idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)

    async def ask_all(self, asks: Sequence[Ask]) -> list[bytes]:
        """All at once, each on a connection of its own. Returns the bodies; raises if one has not all tokens."""
        while len(self._idle) < len(asks):
            self._idle.append(await asyncio.open_connection("127.0.0.1", self.port))
        return await asyncio.gather(*(self._ask(*of, ask) for of, ask in zip(self._idle, asks, strict=False)))

    async def ask_in_turn(self, asks: Sequence[Ask], *, at_once: int) -> None:
        """In their order, at most `at_once` at a time. Raises if one has not all tokens."""
        coming = iter(asks)

        async def ask_each() -> None:
            self._idle.append(connection := await asyncio.open_connection("127.0.0.1", self.port))
            for ask in coming:
                await self._ask(*connection, ask)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(ask_each())

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
            await writer.wait_closed()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ask: Ask) -> bytes:
        body = json.dumps(self.body_of(ask)).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            + (f"authorization: Bearer {self.key}\r\n".encode() if self.key else b"")
            + b"content-length: %d\r\n\r\n" % len(body)
            + body
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.lower().startswith(b"http/1.1 200"):
            raise RuntimeError(f"the server answered {head[:12]!r} {(await reader.read(500))!r}")
        parts, arrivals = [], list[float]()
        self.arrivals.append(arrivals)
        while size := int(await reader.readuntil(b"\r\n"), 16):
            parts.append((await reader.readexactly(size + 2))[:size])
            arrivals.append(time.perf_counter())
        await reader.readexactly(2)
        answer = b"".join(parts)
        if not self.is_whole(answer, ask):
            raise RuntimeError(f"not all of {ask.output} tokens came; the answer ends with {answer[-300:]!r}")
        return answer

    def is_whole(self, answer: bytes, ask: Ask) -> bool:
        return b'"completion_tokens":%d' % ask.output in answer.replace(b" ", b"") and DONE in answer

    def body_of(self, ask: Ask) -> dict[str, Any]:
        return {
            "model": SERVED if ask.adapter == BASE else f"adapter-{self.adapters.index(ask.adapter)}",
            "prompt": list(ask.prompt),
            "max_tokens": ask.output,
            "temperature": 0,
            "ignore_eos": True,  # as vLLM's own benchmark; Motet's gateway then asks for no estimate
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def text_of(answer: bytes) -> str:
    """The text of a streamed answer."""
    events = [line[6:] for line in answer.splitlines() if line.startswith(b"data: ") and line != DONE]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["text"] for choice in choices)
