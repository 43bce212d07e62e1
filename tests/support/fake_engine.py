"""A small engine without a model: pages, promises, overflow, parking and adapters as the real one has them.

The next token is a function of (prompt, seed, index) alone, so that a request moved or parked goes on alike and a test
can say beforehand what must come out.
"""

import random
import time
import zlib
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from motet.errors import Declined, InvalidRequest
from motet.ledger import Ledger
from motet.model import BASE, PAGE_TOKENS, Digest, RequestId, pages_for
from motet_runner.interface import (
    AdapterEntry,
    AdapterEvicted,
    AdapterLoaded,
    BookEntry,
    EngineInfo,
    EngineReport,
    Event,
    Finish,
    NewSequence,
    OverflowAhead,
    ParkedNow,
    ParkMethod,
    ResumedNow,
    SequenceOutput,
    State,
    StateChanged,
    StepOutput,
)

VOCABULARY = 1000
EOS = VOCABULARY
"""Never generated, so that every answer has its full length."""

PAGE_BYTES = 4096
ADAPTER_BYTES = 1 << 16


def token_at(prompt: tuple[int, ...], seed: int, index: int, adapter: Digest = BASE) -> int:
    return zlib.crc32(f"{prompt}{seed}{index}{adapter}".encode()) % VOCABULARY


def tokens_of(prompt: tuple[int, ...], seed: int, count: int, adapter: Digest = BASE) -> list[int]:
    """The whole answer that a request must get, wherever and however often it was moved."""
    return [token_at(prompt, seed, index, adapter) for index in range(count)]


@dataclass(slots=True)
class _Sequence:
    new: NewSequence
    promise: int
    made: int
    """Output tokens, delivered ones included."""
    held: int = 0
    """Pages."""
    state: State = State.WAITING
    wanted: int = 0
    method: ParkMethod = ParkMethod.RECOMPUTE
    parked_times: int = 0
    announced: int = 0
    """The promise whose end has been announced."""

    @property
    def tokens(self) -> int:
        return len(self.new.prompt) + self.made

    @property
    def limit(self) -> int:
        """Pages that it can ever need."""
        return pages_for(len(self.new.prompt) + self.new.sampling.max_tokens)


@dataclass(slots=True)
class _Slot:
    folder: Path
    on_device: bool = False


@dataclass
class FakeEngine:
    """An `interface.Engine`. `decline_rate` makes it decline that share of requests at random, `seed` says which."""

    pages: int = 256
    max_sequences: int = 64
    max_model_length: int = 2048
    adapter_slots: int = 8
    step_seconds: float = 0.0
    load_steps: int = 1
    """Iterations until an adapter that must be loaded is there."""
    host_pages: int = 64
    decline_rate: float = 0.0
    seed: int = 0
    target_modules: dict[str, tuple[int, int]] = field(
        default_factory=lambda: {"model.layers.0.self_attn.q_proj": (16, 16), "model.layers.0.mlp.up_proj": (16, 32)}
    )

    def __post_init__(self) -> None:
        self.info = EngineInfo(
            pages=self.pages,
            page_tokens=PAGE_TOKENS,
            page_bytes=PAGE_BYTES,
            max_sequences=self.max_sequences,
            max_model_length=self.max_model_length,
            adapter_slots=self.adapter_slots,
            max_lora_rank=64,
            host_bytes=self.host_pages * PAGE_BYTES,
            architecture="FakeForCausalLM",
            vocabulary=VOCABULARY,
            dtype="float32",
            device="cpu",
            eos_token_ids=(EOS,),
            target_modules=self.target_modules,
        )
        self.ledger: Ledger[RequestId] = Ledger(self.pages)
        self._random = random.Random(self.seed)
        self._sequences: dict[RequestId, _Sequence] = {}
        self._slots: OrderedDict[Digest, _Slot] = OrderedDict()
        self._to_load: dict[Digest, int] = {}
        self._dropping: set[Digest] = set()
        self._events: list[Event] = []
        self._supervised = False
        self._steps = 0

    # ------------------------------------------------------------------------------------------------------- commands

    def add(self, sequence: NewSequence) -> None:
        if not sequence.prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        length = len(sequence.prompt) + sequence.sampling.max_tokens
        if length > self.max_model_length:
            raise InvalidRequest(f"prompt and max_tokens are {length}, the model takes {self.max_model_length}")
        if sequence.adapter != BASE and sequence.adapter not in self._slots:
            raise Declined(f"adapter {sequence.adapter} is not here")
        if self._random.random() < self.decline_rate:
            raise Declined("not in the mood")
        if len(self._sequences) >= self.max_sequences:
            raise Declined(f"all {self.max_sequences} places are taken")
        if sequence.promise <= 0:
            raise InvalidRequest("the promise must be at least one page", param="promise")
        if missing := self.ledger.promise(sequence.request, sequence.promise):
            raise Declined(f"{missing.wanted} pages are promised to it, {missing.free} are free")
        one = _Sequence(sequence, sequence.promise, len(sequence.delivered))
        self._sequences[sequence.request] = one
        if sequence.adapter != BASE:
            self._slots.move_to_end(sequence.adapter)
            if not self._slots[sequence.adapter].on_device:
                self._to_load.setdefault(sequence.adapter, self.load_steps)
                self._turn(one, State.LOADING)

    def cancel(self, request: RequestId, epoch: int | None = None) -> bool:
        one = self._sequences.get(request)
        if one is None or epoch not in (None, one.new.epoch):
            return False
        self._remove(one)
        return True

    def extend(self, request: RequestId, epoch: int, promise: int, extended: int) -> bool:
        one = self._named(request, epoch, promise)
        if one is None or one.state is State.PARKED or self.ledger.promise(request, extended) is not None:
            return False
        one.promise = extended
        return True

    def park(self, request: RequestId, epoch: int, promise: int, wanted: int, method: ParkMethod) -> bool:
        one = self._named(request, epoch, promise)
        if one is None or one.state is State.PARKED:
            return False
        self._park(one, wanted, method, by_itself=False)
        return True

    def resume(self, request: RequestId, epoch: int, promise: int) -> bool:
        one = self._sequences.get(request)
        if one is None or one.new.epoch != epoch or one.state is not State.PARKED or one.wanted != promise:
            return False
        return self._resume(one)

    def set_supervised(self, supervised: bool) -> None:
        self._supervised = supervised

    def set_overcommit(self, factor: float) -> None:
        self.ledger.overcommit = factor

    def load_adapter(self, digest: Digest, folder: Path) -> None:
        self._dropping.discard(digest)
        slot = self._slots.setdefault(digest, _Slot(folder))
        if not slot.on_device:
            self._to_load.setdefault(digest, self.load_steps)

    def drop_adapter(self, digest: Digest) -> None:
        if digest in self._slots:
            self._dropping.add(digest)
            self._drop_idle()

    # ----------------------------------------------------------------------------------------------------------- steps

    def has_work(self) -> bool:
        return bool(self._events or self._to_load or any(self._can_move(one) for one in self._sequences.values()))

    def step(self) -> StepOutput:
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self._steps += 1
        self._load_adapters()
        if not self._supervised:
            self._resume_by_myself()
        outputs = [output for one in list(self._sequences.values()) if (output := self._advance(one)) is not None]
        self._drop_idle()
        events, self._events = self._events, []
        self.check()
        return StepOutput(self._steps, outputs, events)

    def _can_move(self, one: _Sequence) -> bool:
        return one.state is not State.PARKED or not self._supervised

    def _advance(self, one: _Sequence) -> SequenceOutput | None:
        if one.new.request not in self._sequences or one.state in (State.PARKED, State.LOADING):
            return None
        needed = pages_for(one.tokens + 1)
        if needed > one.promise and not self._supervised and not self._protect(one, needed):
            return None
        if needed > one.promise or not self._find_pages(one, needed - one.held):
            return None  # waits for an order, or for a page; the others go on
        one.held = needed
        self._turn(one, State.DECODE)
        index = one.made
        token = token_at(one.new.prompt, one.new.seed, index, one.new.adapter)
        one.made += 1
        output = SequenceOutput(one.new.request, one.new.epoch, one.new.choice, index, [token])
        if one.made >= one.new.sampling.max_tokens:
            output.finish = Finish.LENGTH
        elif token in one.new.sampling.stop_token_ids:
            output.finish = Finish.STOP
        if output.finish is not None:
            self._remove(one)
        elif self._runs_out(one):
            one.announced = one.promise
            self._events.append(OverflowAhead(one.new.request, one.new.epoch, one.promise))
        return output

    def _runs_out(self, one: _Sequence) -> bool:
        ahead = one.tokens + PAGE_TOKENS > one.promise * PAGE_TOKENS
        return ahead and one.promise < one.limit and one.announced != one.promise

    def _protect(self, one: _Sequence, needed: int) -> bool:
        """Extend if the ledger has room, else park the newest. True when this sequence may go on."""
        wanted = min(max(needed, 2 * one.promise), one.limit)
        for extended in (wanted, needed):
            if self.ledger.promise(one.new.request, extended) is None:
                one.promise = extended
                return True
        newest = next(x for x in reversed(self._sequences.values()) if x.state is not State.PARKED)
        doubled = min(2 * newest.promise, max(newest.limit, newest.promise), self.pages)
        self._park(newest, doubled, ParkMethod.RECOMPUTE, by_itself=True)
        return False

    def _find_pages(self, one: _Sequence, count: int) -> bool:
        """Pages only run out when more were promised than there are: then the newest who hold some give way."""
        for newest in reversed(list(self._sequences.values())):
            if count <= self._free() or newest is one:
                break
            if newest.held:
                self._park(newest, newest.promise, ParkMethod.RECOMPUTE, by_itself=True)
        return count <= self._free()

    def _resume_by_myself(self) -> None:
        for one in self._sequences.values():
            if one.state is State.PARKED:
                self._resume(one)

    def _resume(self, one: _Sequence) -> bool:
        if self.ledger.promise(one.new.request, one.wanted) is not None:
            return False
        one.promise = one.wanted
        self._turn(one, State.WAITING)
        self._events.append(ResumedNow(one.new.request, one.new.epoch, one.promise, one.method))
        return True

    def _park(self, one: _Sequence, wanted: int, method: ParkMethod, *, by_itself: bool) -> None:
        one.held, one.wanted, one.method = 0, wanted, method
        one.parked_times += 1
        self.ledger.release(one.new.request)
        self._turn(one, State.PARKED)
        self._events.append(ParkedNow(one.new.request, one.new.epoch, wanted, method, by_itself))

    def _load_adapters(self) -> None:
        for digest in list(self._to_load):
            self._to_load[digest] -= 1
            if self._to_load[digest] > 0 or not self._make_room():
                continue
            del self._to_load[digest]
            self._slots[digest].on_device = True
            self._events.append(AdapterLoaded(digest, ADAPTER_BYTES, self.step_seconds))
            for one in self._sequences.values():
                if one.state is State.LOADING and one.new.adapter == digest:
                    self._turn(one, State.WAITING)

    def _make_room(self) -> bool:
        resident = [digest for digest, slot in self._slots.items() if slot.on_device]
        if len(resident) < self.adapter_slots:
            return True
        idle = next((digest for digest in resident if not self._users(digest)), None)
        if idle is not None:
            self._slots[idle].on_device = False
            self._events.append(AdapterEvicted(idle))
        return idle is not None

    def _drop_idle(self) -> None:
        for digest in [digest for digest in self._dropping if not self._users(digest)]:
            self._dropping.discard(digest)
            self._to_load.pop(digest, None)
            if self._slots.pop(digest).on_device:
                self._events.append(AdapterEvicted(digest))

    # ----------------------------------------------------------------------------------------------------------- books

    def report(self) -> EngineReport:
        states = [one.state for one in self._sequences.values()]
        return EngineReport(
            steps=self._steps,
            pages_free=self._free(),
            pages_promised=self.ledger.promised,
            running=states.count(State.DECODE),
            waiting=states.count(State.WAITING) + states.count(State.LOADING),
            parked=states.count(State.PARKED),
            pending_prefill_tokens=sum(one.tokens for one in self._sequences.values() if one.held == 0),
            host_bytes_free=(self.host_pages - self._swapped()) * PAGE_BYTES,
            step_seconds=self.step_seconds,
            prefill_seconds_per_token=1e-5,
            swap_seconds_per_page=1e-5,
            book=[
                BookEntry(
                    request=one.new.request,
                    epoch=one.new.epoch,
                    promise=one.wanted if one.state is State.PARKED else one.promise,
                    pages_used=one.held,
                    state=one.state,
                    prompt_tokens=len(one.new.prompt),
                    output_tokens=one.made,
                    adapter=one.new.adapter,
                    tenant=one.new.tenant,
                    priority=one.new.priority,
                    parked_times=one.parked_times,
                )
                for one in self._sequences.values()
            ],
            adapters=[
                AdapterEntry(digest, ADAPTER_BYTES, self._users(digest), slot.on_device)
                for digest, slot in self._slots.items()
            ],
        )

    def check(self) -> None:
        """Recount the books."""
        self.ledger.check()
        assert self.ledger.promised <= self.ledger.limit
        assert self._free() >= 0

    def _swapped(self) -> int:
        parked = [one for one in self._sequences.values() if one.state is State.PARKED]
        return sum(pages_for(one.tokens) for one in parked if one.method is ParkMethod.SWAP)

    def _free(self) -> int:
        return self.pages - sum(one.held for one in self._sequences.values())

    def _users(self, digest: Digest) -> int:
        return sum(one.new.adapter == digest for one in self._sequences.values())

    def _named(self, request: RequestId, epoch: int, promise: int) -> _Sequence | None:
        one = self._sequences.get(request)
        return one if one is not None and (one.new.epoch, one.promise) == (epoch, promise) else None

    def _remove(self, one: _Sequence) -> None:
        del self._sequences[one.new.request]
        self.ledger.release(one.new.request)

    def _turn(self, one: _Sequence, state: State) -> None:
        if one.state is not state:
            one.state = state
            self._events.append(StateChanged(one.new.request, one.new.epoch, state))
