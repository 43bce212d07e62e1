"""Renders chat templates in separate processes. They are started when needed and then kept."""

import asyncio
import hashlib
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, cast

import orjson
import structlog

from motet.errors import AdapterIncompatible, Internal, InvalidRequest, MotetError, Overloaded
from motet.room_per_tenant import RoomPerTenant
from motet_gateway.tokens.chat_template import CannotRender
from motet_gateway.tokens.namespace_turns import NamespaceTurns
from motet_gateway.tokens.render_parent import Fork, RenderParent
from motet_gateway.tokens.render_process import BROKEN, DONE, LENGTH_BYTES, NO_MEMORY, OUT_OF_TIME, REFUSED

log = structlog.get_logger(__name__)

LONG_BYTES = 64 * 1024
"""Messages above this size wait in a queue of their own, so that they never stand before short ones."""
MAX_BATCH = 64
"""Messages of one queue that are handed over together. What arrives together stays together on its further way, and a
crossing between processes costs more than most renderings."""
MAX_TEMPLATES = 64
"""The most templates of models that a process renders. Then it is replaced, which frees their memory."""
RENDER_TIMEOUT_SECONDS = 60.0
"""Limit of real time, including the start of a process. Normally the kernel ends a rendering by its CPU time long
before."""
OF_MODELS = (None, None)
IDLE_BYTES = 100 << 20
"""What processes that wait for their next job may take in all, where nobody says how much."""
_GAVE_UP = "The gateway could not render the chat template. Try again soon."


class TemplateText:
    """A chat template as the model or an adapter has it, or as a request brings it, not parsed yet."""

    __slots__ = ("_content", "adapter_of", "brought_by", "declared", "digest", "special_tokens", "text", "whose")

    def __init__(
        self,
        text: str,
        special_tokens: Mapping[str, str],
        *,
        brought_by: str | None = None,
        adapter_of: str | None = None,
        declared: bytes = b"",
        content: bytes = b"",
    ) -> None:
        """`declared` and `content`: of the same text and special tokens, where they are known."""
        self.text: Final = text
        self.brought_by: Final = brought_by
        """The tenant whose request brings it; None: it is the model's, or an adapter's."""
        self.adapter_of: Final = adapter_of
        """The namespace whose adapter has it; None: it is not an adapter's."""
        self.special_tokens: Final = special_tokens
        # A copy: what orjson has made keeps room for more, up to one and a half times as much again.
        said = {"text": text, "special_tokens": dict(special_tokens)}
        self.declared: Final = declared or bytes(memoryview(orjson.dumps(said)))
        # No two tenants share a process for what they bring: how fast an answer comes would betray the other's text.
        self.whose: Final = (brought_by, adapter_of)
        self._content: Final = content or hashlib.sha256(self.declared).digest()
        self.digest: Final = hashlib.sha256(orjson.dumps(self.whose) + self._content).digest()

    def for_adapters_of(self, namespace: str) -> "TemplateText":
        """The same one. It costs no copy of the text."""
        return TemplateText(
            self.text, self.special_tokens, adapter_of=namespace, declared=self.declared, content=self._content
        )

    def error(self, error: CannotRender) -> InvalidRequest:
        if error.field:
            return InvalidRequest(f"{error.field}: {error.why}", param=error.field)
        if self.brought_by is not None:
            return InvalidRequest(f"chat_template: it {error.why}", param="chat_template")
        whose = "model" if self.adapter_of is None else "adapter"
        return InvalidRequest(f"the {whose}'s chat template {error.why}", param="messages")

    def broken(self, why: str) -> MotetError:
        if self.brought_by is not None:
            return InvalidRequest(f"chat_template: {why}", param="chat_template")
        if self.adapter_of is not None:
            return AdapterIncompatible(f"the adapter has a broken chat template: {why}")
        return Internal(f"the model has a broken chat template: {why}")


def encoded(
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> bytes:
    """What `ChatTemplate.render` takes, as JSON. Raises InvalidRequest for what no JSON can hold."""
    context = {
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "extra": extra,
    }
    try:
        return orjson.dumps(context)
    except TypeError as error:
        raise InvalidRequest(
            f"messages: cannot be passed to the chat template as JSON: {error}", param="messages"
        ) from None


def asks_whether_it_reads(variable: str) -> bytes:
    """What to render a template with, to be answered `YES` or not."""
    return orjson.dumps({"reads": variable})


@dataclass(slots=True, eq=False)
class _RenderJob:
    tenant: str
    context: bytes
    """Empty once nobody waits for it: a job stays in the queue for its turn."""
    answer: "asyncio.Future[bytes]"


class _TemplateQueue:
    """The queue of one template, and the task that serves it."""

    def __init__(self) -> None:
        self.jobs = RoomPerTenant[_RenderJob](sys.maxsize)
        self.task: asyncio.Task[None] | None = None
        self._left = 0

    def left(self) -> None:
        """A job has ended, perhaps in the queue. What nobody waits for never has most of it: its turn may be far."""
        self._left += 1
        if self._left > max(MAX_BATCH, len(self.jobs) // 2):
            self._left = 0
            for job in self.jobs.take(len(self.jobs)):
                if not job.answer.done():
                    self.jobs.add(job)


class _Died(Overloaded):
    """A process ended without an answer, and not because of its CPU time."""


class RenderPool:
    """Renders each template, short and long messages apart, one after the other, and in each queue of one tenant after
    the other: a template or a request that takes its time makes only its own queue wait. A template that a request
    brings has a process of its own, so that it leaves no memory taken where others are rendered. So have the adapters
    of each namespace, which takes its turns (`NamespaceTurns`). Up to `processes` are at work. Those that wait for
    their next job take `idle_bytes` in all. If they take more, one ends that is no model's, whichever: if it were the
    one that has waited longest, each of many namespaces that take turns would find its own ended."""

    def __init__(self, *, processes: int, cpu_seconds: float, memory_bytes: int, idle_bytes: int = IDLE_BYTES) -> None:
        self._cpu_seconds = cpu_seconds
        self._memory_bytes = memory_bytes
        self.most: Final = processes
        self._idle_bytes = idle_bytes
        self.turns: Final = NamespaceTurns(processes, time.monotonic)
        self._free_processes = asyncio.Semaphore(processes)
        self._busy = 0
        self._queues: dict[tuple[bytes, bool], _TemplateQueue] = {}
        self._idle: list[_RenderProcess] = []
        self._parent = RenderParent(cpu_seconds, memory_bytes)
        self._closed = False

    async def render(self, template: TemplateText, context: bytes, *, tenant: str = "") -> str:
        """The prompt as text, from what `encoded` has made. Raises InvalidRequest when it cannot be rendered within the
        limits."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if template.adapter_of is None:
            return await self._render(template, _RenderJob(tenant, context, answer))
        with self.turns.waiting(template.adapter_of, tenant, answer):
            return await self._render(template, _RenderJob(tenant, context, answer))

    async def _render(self, template: TemplateText, job: "_RenderJob") -> str:
        key = (template.digest, len(job.context) > LONG_BYTES)
        if (queue := self._queues.get(key)) is None:
            queue = self._queues[key] = _TemplateQueue()
            queue.task = asyncio.create_task(self._serve(key, template, queue), name="render")
        queue.jobs.add(job)
        try:
            return self._text(template, await job.answer)
        except CannotRender as error:
            raise template.error(error) from None
        finally:
            job.context = b""
            queue.left()

    async def metered_code(self, template: TemplateText) -> bytes:
        """See `metered_template`. Raises ValueError if the template's work can't be counted, OSError, or MotetError."""
        async with self._process_free(template):
            process = await self._start(template)  # no other template has run in it
            try:
                answer = await process.metered_code(template)
            except CannotRender:
                raise ValueError(f"it takes more than {self._cpu_seconds:g} s of CPU time to compile it") from None
            finally:
                process.kill()
        if answer[:1] != DONE:
            raise ValueError(answer[1:].decode() or "it needs too much memory")
        return answer[1:]

    async def close(self) -> None:
        self._closed = True
        self.turns.close()
        for process in self._idle:
            process.kill()
        self._idle.clear()
        await self._parent.close()
        serving = [queue.task for queue in self._queues.values() if queue.task is not None]
        await asyncio.gather(*serving, return_exceptions=True)

    async def _serve(self, key: tuple[bytes, bool], template: TemplateText, queue: _TemplateQueue) -> None:
        _, long = key
        batch: list[_RenderJob] = []
        alone = 0
        try:
            while queue.jobs:
                taken = queue.jobs.take(1 if long or alone else MAX_BATCH)
                alone = max(0, alone - 1)
                if batch := [job for job in taken if not job.answer.done()]:  # some clients may have disconnected
                    alone = await self._answer(template, batch) or alone
                    queue.jobs.put_back([job for job in batch if not job.answer.done()])
        finally:
            del self._queues[key]
            for job in (*batch, *queue.jobs.take(len(queue.jobs))):
                _resolve(job.answer, Overloaded(_GAVE_UP))

    async def _answer(self, template: TemplateText, batch: list[_RenderJob]) -> int:
        """Answer the jobs of a batch that can be answered together. Returns how many of the others, which come next,
        are to be rendered each by itself, in turn with other tenants'."""
        try:
            answers = await self._ask(template, batch)
        except OSError as error:
            log.error("render_process_start_failed", reason=str(error))
            for job in batch:
                _resolve(job.answer, Overloaded(_GAVE_UP))
            return 0
        except (MotetError, CannotRender) as error:
            if len(batch) > 1 and not self._closed:
                return len(batch)  # one of them caused the error
            for job in batch:
                _resolve(job.answer, error)
            return 0
        for job, said in zip(batch, answers, strict=False):
            if said[:1] == NO_MEMORY and len(batch) > 1:
                return 1  # others of the batch may have used the memory
            _resolve(job.answer, said)
        return 0

    async def _ask(self, template: TemplateText, batch: list[_RenderJob]) -> list[bytes]:
        """Try once more with a new process if one dies: a signal or a lack of memory may have killed it. Only if the
        second dies, too, the messages are at fault. The same if one has no memory and has rendered before. Those that
        have left before their turn leave the batch."""
        async with self._process_free(template):
            batch[:] = [job for job in batch if not job.answer.done()]
            if not batch:
                return []
            contexts = [job.context for job in batch]
            waiting = self._waiting_process(template)
            try:
                answers = await self._ask_one(waiting or await self._start(template), template, contexts)
            except _Died:
                if self._closed:
                    raise
            else:
                if waiting is None or answers[-1][:1] != NO_MEMORY:
                    return answers
            return await self._ask_one(await self._start(template), template, contexts)

    @asynccontextmanager
    async def _process_free(self, template: TemplateText) -> AsyncIterator[None]:
        turn = nullcontext() if template.adapter_of is None else self.turns.turn(template.adapter_of)
        async with turn, self._free_processes:
            self._busy += 1
            try:
                yield
            finally:
                self._busy -= 1

    def _waiting_process(self, template: TemplateText) -> "_RenderProcess | None":
        self._idle = [process for process in self._idle if process.alive]
        for at in reversed(range(len(self._idle))):
            if self._idle[at].serves(template):
                return self._idle.pop(at)
        return None

    async def _ask_one(self, process: "_RenderProcess", template: TemplateText, contexts: list[bytes]) -> list[bytes]:
        try:
            with self._timed(process, template):
                answers = await process.ask(template, contexts)
        except BaseException:
            process.kill()  # it must never return this answer to another request
            raise
        if len(process.known) < MAX_TEMPLATES and answers[-1][:1] != NO_MEMORY:
            self._keep(process)
        else:
            process.kill()
        return answers

    @contextmanager
    def _timed(self, process: "_RenderProcess", template: TemplateText) -> Iterator[None]:
        began, used = time.monotonic(), process.fork.cpu_seconds
        try:
            yield
        finally:
            if template.adapter_of is not None:
                now = process.fork.cpu_seconds
                self.turns.took(
                    template.adapter_of,
                    time.monotonic() - began if used is None or now is None else now - used,
                )

    def _keep(self, process: "_RenderProcess") -> None:
        """Of the bytes, one may take a quarter: so a namespace whose processes are large ends few of others'."""
        process.idle_bytes = process.fork.bytes_taken
        if process.idle_bytes > self._idle_bytes // 4:
            process.kill()
            return
        self._idle.append(process)
        while sum(one.idle_bytes for one in self._idle) > self._idle_bytes and len(self._idle) > 1:
            self._end_one(self._idle[:-1])

    def _end_one(self, some: "list[_RenderProcess]") -> None:
        ended = random.choice([one for one in some if one.whose != OF_MODELS] or some)  # noqa: S311
        self._idle.remove(ended)
        ended.kill()

    def _text(self, template: TemplateText, answer: bytes) -> str:
        kind, content = answer[:1], answer[1:]
        if kind == REFUSED:
            raise CannotRender(*orjson.loads(content))
        if kind == BROKEN:
            raise template.broken(content.decode())
        if kind == NO_MEMORY:
            raise CannotRender(f"needs more than {self._memory_bytes >> 20} MiB for these messages")
        return content.decode()

    async def _start(self, template: TemplateText) -> "_RenderProcess":
        if self._closed:
            raise Overloaded(_GAVE_UP)
        while (some := [one for one in self._idle if not one.of_namespace]) and len(some) + self._busy > self.most:
            self._end_one(some)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                async with asyncio.timeout(RENDER_TIMEOUT_SECONDS):
                    fork = await self._parent.fork(theirs, together=template.adapter_of is not None)
            process = _RenderProcess(fork, self._cpu_seconds, template.whose)
            ours.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: process, sock=ours)
        except BaseException:
            ours.close()
            raise
        return process


def _resolve(answer: "asyncio.Future[bytes]", how: bytes | Exception) -> None:
    if answer.done():  # its client has disconnected
        return
    if isinstance(how, Exception):
        answer.set_exception(how)
    else:
        answer.set_result(how)


class _RenderProcess(asyncio.Protocol):
    """One at work, or waiting for the next job."""

    def __init__(self, fork: Fork, cpu_seconds: float, whose: tuple[str | None, str | None]) -> None:
        self.fork: Final = fork
        self.whose: Final = whose
        """Of its templates: `TemplateText.whose`"""
        self.idle_bytes = 0
        """What it takes while it waits"""
        self._cpu_seconds = cpu_seconds
        self._received = bytearray()
        self._answer: asyncio.Future[None] | None = None
        self._answers: list[bytes] = []
        self._wanted = 0
        self.known: set[bytes] = set()

    def serves(self, template: TemplateText) -> bool:
        """One that a request has brought has its process for itself."""
        return template.digest in self.known or (template.brought_by is None and template.whose == self.whose)

    @property
    def of_namespace(self) -> bool:
        """It renders the templates of a namespace's adapters."""
        _, namespace = self.whose
        return namespace is not None

    async def ask(self, template: TemplateText, contexts: list[bytes]) -> list[bytes]:
        """An answer for each, or fewer if the last one has used up the memory."""
        assert contexts
        assert all(contexts), "the process would wait for what it is to answer, and we for it"
        declared = b"" if template.digest in self.known else template.declared
        self.known.add(template.digest)
        return await self._exchange((template.digest, declared, b"[" + b",".join(contexts) + b"]"), len(contexts))

    async def metered_code(self, template: TemplateText) -> bytes:
        (answer,) = await self._exchange((template.digest, template.declared, b""), 1)
        return answer

    async def _exchange(self, parts: tuple[bytes, ...], wanted: int) -> list[bytes]:
        loop = asyncio.get_running_loop()
        self._received.clear()
        self._wanted, self._answers = wanted, []
        self._answer = loop.create_future()
        self._transport.write(b"".join(len(part).to_bytes(LENGTH_BYTES, "big") + part for part in parts))
        backstop = loop.call_later(RENDER_TIMEOUT_SECONDS, self.kill)
        try:
            await self._answer
        except EOFError:
            raise await self._death_reason() from None
        finally:
            backstop.cancel()
            self._answer = None
        return self._answers

    @property
    def alive(self) -> bool:
        return not self._transport.is_closing()

    def kill(self) -> None:
        self._transport.abort()
        self.fork.kill()

    async def _death_reason(self) -> Exception:
        """The error for a process that ended without an answer."""
        status = await self.fork.status()
        if status == -OUT_OF_TIME:
            log.warning("render_stopped", cpu_seconds=self._cpu_seconds)
            return CannotRender(f"takes more than {self._cpu_seconds:g} s of CPU time for these messages")
        log.error("render_process_died", status=status)
        return _Died(_GAVE_UP)

    # ------------------------------------------------------------------------------------------- called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are not subclasses of it

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while len(received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES], "big")
            if len(received) < end:
                return
            self._answers.append(bytes(received[LENGTH_BYTES:end]))
            del received[:end]
        waiter = self._answer
        answers = self._answers
        if not answers or (len(answers) < self._wanted and answers[-1][:1] != NO_MEMORY):
            return
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def connection_lost(self, _error: Exception | None) -> None:
        if (answer := self._answer) is not None and not answer.done():
            answer.set_exception(EOFError())
