"""A device that only pretends: it knows which token's KV lies where, and notices when it is not what it should be."""

from motet.domain import PAGE_TOKENS, RequestId
from motet_runner.interface import Finish, NewSequence, Sampling
from motet_runner.plan import Book, Iteration, Sequence, Tier, preset_named

VOCABULARY = 50


def make_book(*, pages: int = 32, preset: str = "paged-chunk", places: int = 8, chunk_tokens: int = 24, **more) -> Book:
    return Book(
        pages=pages,
        preset=preset_named(preset),
        places=places,
        chunk_tokens=chunk_tokens,
        max_length=more.pop("max_length", 10_000),
        vocabulary=VOCABULARY,
        **more,
    )


def new(request: str, *, prompt: int = 5, max_tokens: int = 10, promise: int | None = None, **more) -> NewSequence:
    epoch, adapter, priority = more.pop("epoch", 1), more.pop("adapter", ""), more.pop("priority", 1)
    delivered, engines_lost = more.pop("delivered", ()), more.pop("engines_lost", 0)
    ids = tuple((sum(map(ord, request)) * 7 + i * i) % VOCABULARY for i in range(prompt))
    return NewSequence(
        request=RequestId(request),
        epoch=epoch,
        prompt=ids,
        delivered=delivered,
        adapter=adapter,
        promise=promise or -(-(prompt + max_tokens) // PAGE_TOKENS),
        priority=priority,
        engines_lost=engines_lost,
        sampling=Sampling(max_tokens=max_tokens, **more),
    )


def next_token(sequence: Sequence) -> int:
    """A stand-in for the model: decided by who it is and where it stands, like greedy decoding."""
    return (len(sequence.tokens) * 31 + sum(map(ord, sequence.request))) % VOCABULARY


class FakeDevice:
    def __init__(self, book: Book) -> None:
        self.book = book
        self.memory: dict[tuple[int, int], tuple[str, int, int]] = {}
        self.host: dict[tuple[int, int], tuple[str, int, int]] = {}
        self.iterations: dict[str, int] = {}
        self.finished: dict[str, tuple[list[int], Finish]] = {}
        self.given_up: list[str] = []
        self.steps = 0

    def step(self) -> Iteration:
        iteration, given_up = self.book.next_iteration()
        self.given_up += [sequence.request for sequence, _ in given_up]
        self._copy_pages()
        self.steps += bool(iteration)
        for work in iteration.work:
            self._compute(work.sequence, work.start, work.count)
            self.iterations[work.sequence.request] = self.iterations.get(work.sequence.request, 0) + 1
        for work in iteration.work:
            self.book.computed(work)
            if work.samples:
                token = next_token(work.sequence)
                finish = self.book.sampled(work.sequence, token)
                if finish:
                    output = work.sequence.tokens[work.sequence.prompt_tokens :]
                    self.finished[work.sequence.request] = output, finish
        self.book.check()
        return iteration

    def run(self, at_most: int = 10_000) -> None:
        for _ in range(at_most):
            if not self.book.has_work():
                return
            self.step()
        raise AssertionError("there is still work after so many iterations")

    def _copy_pages(self) -> None:
        memory = {Tier.DEVICE: self.memory, Tier.HOST: self.host}
        for copy in self.book.copies:
            for page, to in zip(copy.pages, copy.to, strict=True):
                for offset in range(PAGE_TOKENS):
                    held = memory[copy.source].get((page, offset))
                    if held is not None:
                        memory[copy.target][to, offset] = held
                    else:
                        memory[copy.target].pop((to, offset), None)
        self.book.copies.clear()

    def _compute(self, sequence: Sequence, start: int, count: int) -> None:
        def place(position: int) -> tuple[int, int]:
            return sequence.pages[position // PAGE_TOKENS], position % PAGE_TOKENS

        assert start == sequence.computed
        for position in range(start):
            expected = sequence.request, position, sequence.tokens[position]
            assert self.memory.get(place(position)) == expected, "the KV of an earlier token is not there"
        for position in range(start, start + count):
            self.memory[place(position)] = sequence.request, position, sequence.tokens[position]
