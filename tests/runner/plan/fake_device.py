"""A device that only pretends: it knows which token's KV lies where, and notices when it is not what it should be."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from motet.domain import BASE, PAGE_TOKENS, Digest, RequestId
from motet.errors import AdapterError, AdapterUnproved
from motet_runner.adapters.layout import AdapterLayout, FileStamp
from motet_runner.adapters.proof import Proof
from motet_runner.interface import Event, Finish, Logprobs, NewSequence, ProofEnded, Sampling
from motet_runner.plan import (
    AdapterLoad,
    LoadArrived,
    LoadedContents,
    LoadFailed,
    Planner,
    Preset,
    ProofResult,
    RowStep,
    StepPlan,
    StepResult,
    Tier,
    preset_named,
)
from motet_runner.plan.host_adapters import BLOCK_BYTES
from motet_runner.plan.prompt_scores import PromptScores, places_to_score

VOCABULARY = 50


def make_planner(
    *,
    page_tokens: int = PAGE_TOKENS,
    pages: int = 32,
    preset: str | Preset = "paged-chunk",
    places: int = 8,
    chunk_tokens: int = 24,
    **more,
) -> Planner:
    return Planner(
        page_tokens=page_tokens,
        pages=pages,
        preset=preset_named(preset) if isinstance(preset, str) else preset,
        places=places,
        chunk_tokens=chunk_tokens,
        max_length=more.pop("max_length", 10_000),
        vocabulary=VOCABULARY,
        max_adapters=more.pop("max_adapters", 4),
        pages_of_rank=more.pop("pages_of_rank", lambda rank: rank),
        **more,
    )


def adapter_layout(rank: int, *, slab: str = "") -> AdapterLayout:
    """An adapter that nobody reads. It takes as many pages as its rank is."""
    return replace(AdapterLayout.of(Path("nowhere"), FileStamp(0, 0, 0), rank, ()), slab=slab)


def new(
    request: str, *, prompt: int = 5, max_tokens: int = 10, promise: int | None = None, like: str = "", **more
) -> NewSequence:
    """Two prompts like the same request are equal as far as both go. With a salt, they may share pages."""
    epoch, adapter, priority = more.pop("epoch", 1), more.pop("adapter", ""), more.pop("priority", 1)
    delivered, engines_lost = more.pop("delivered", ()), more.pop("engines_lost", 0)
    parent, salt, quantiles = more.pop("parent", None), more.pop("salt", b""), more.pop("quantiles", None)
    tenant, weight = more.pop("tenant", ""), more.pop("weight", 1)
    ids = tuple((sum(map(ord, like or request)) * 7 + i * i) % VOCABULARY for i in range(prompt))
    return NewSequence(
        request=RequestId(request),
        epoch=epoch,
        prompt=ids,
        delivered=delivered,
        adapter=adapter,
        promise=promise or -(-(prompt + max_tokens) // PAGE_TOKENS),
        quantiles=quantiles,
        priority=priority,
        tenant=tenant,
        weight=weight,
        engines_lost=engines_lost,
        parent=parent,
        prefix_salt=salt,
        sampling=Sampling(max_tokens=max_tokens, **more),
    )


@dataclass
class Row:
    """What a worker knows of a sequence."""

    request: str
    tokens: list[int]
    prompt_tokens: int
    adapter: Digest
    content: list[int]
    """What the KV of each token depends on: adapter, salt, and all tokens up to it. The first entry is for none."""
    pages: list[int | None] = field(default_factory=list)
    """None: a page that the window has left."""
    to_score: int | None = None

    def content_at(self, position: int) -> int:
        for token in self.tokens[len(self.content) - 1 : position + 1]:
            self.content.append(hash((self.content[-1], token)))
        return self.content[position + 1]

    def scores(self, step: RowStep, *, finite: bool) -> PromptScores | None:
        """The log probability of each token stands for its place."""
        if self.to_score is None:
            return None
        places = places_to_score(step.start, step.count, first=self.to_score, prompt_tokens=self.prompt_tokens)
        return PromptScores(places.start, [Logprobs(-place) for place in places], finite) if places else None

    def next_token(self) -> int:
        """It stands for the model: request and position decide, as in greedy decoding."""
        return (len(self.tokens) * 31 + sum(map(ord, self.request))) % VOCABULARY


class FakeDevice:
    """A worker and the loop around it. With `ahead`, it launches that many iterations more before it collects one."""

    def __init__(self, planner: Planner, *, ahead: int = 0, checks_each: int = 1) -> None:
        """`checks_each`: after how many steps everything is counted anew. Between, nobody looks at the sequences."""
        self.planner = planner
        self.checks_each = checks_each
        self.pages = planner.memory.pages
        self.page_tokens = planner.memory.page_tokens
        self.ahead = ahead
        self.memory: dict[tuple[int, int], object] = {}
        """(page, place in it) → what lies there: a number of KV, or a part of an adapter"""
        self.host: dict[tuple[int, int], object] = {}
        self.rows: dict[int, Row] = {}
        self.launched: deque[tuple[StepPlan, StepResult]] = deque()
        self.iterations: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        """Tokens, also those that were computed again."""
        self.first_index: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.scored: dict[str, list[int]] = {}
        """Which tokens of a prompt have come with their log probability, by their places."""
        self.finished: dict[str, tuple[list[int], Finish]] = {}
        self.given_up: list[str] = []
        self.not_finite: set[str] = set()
        """Requests whose results are not numbers."""
        self.loads: dict[int, tuple[AdapterLoad, int]] = {}
        """Loads under way, and how many of its pages each has copied."""
        self.kept: dict[int, Digest] = {}
        """Which adapter is in a block of the host's memory for adapters"""
        self.leaving: dict[int, AdapterLoad] = {}
        """Loads that were given up, whose threads write to that memory for one plan more"""
        self.read_from_disk: list[str] = []
        self.adapters: dict[str, int] = {}
        """Adapters that have arrived, and their pages."""
        self.loads_fail: set[str] = set()
        self.hung: set[str] = set()
        """Adapters whose disks do not answer"""
        self._silent: set[int] = set()
        """Loads of which the planner knows this"""
        self.unproved: set[str] = set()
        """Adapters whose proofs fail"""
        self.damaged_slabs: set[str] = set()
        """Adapters whose proofs fail only if they were loaded from their slab"""
        self.from_slab: dict[str, bool] = {}
        self.given_up_proofs: set[str] = set()
        """Adapters whose proofs are given up"""
        self.proof_parts = 1
        """The number of plans that a proof takes"""
        self.kernels = ""
        self.proving: tuple[int, int, str] = 0, 0, ""
        """The newest attempt: its number, how many of its parts are done, and the kernels with which it began"""
        self.disk_answers = True
        self.events: list[Event] = []
        self.steps = 0

    def step(self) -> StepPlan:
        """Returns the plan that was launched last; an empty one if there was nothing to do."""
        plan: StepPlan | None = None
        while len(self.launched) <= self.ahead:
            following = self.planner.plan()
            if following is None:
                break
            plan = following
            self.launch(plan)
            self._check()
        if self.launched:
            self.planner.collect(self.launched.popleft()[1])
        self._take_outputs()
        self._check()
        return plan or StepPlan(number=self.steps)

    def _check(self) -> None:
        if self.steps % self.checks_each == 0:
            self.planner.check()

    def run(self, at_most: int = 10_000) -> None:
        for _ in range(at_most):
            if not self.planner.has_work():
                return
            self.step()
        raise AssertionError("there is still work after all these iterations")

    def requests(self, steps: Iterable[RowStep]) -> list[str]:
        """Whose rows they are, in the plan that was launched last."""
        return [self.rows[step.row].request for step in steps]

    def launch(self, plan: StepPlan) -> None:
        for digest in plan.gone:
            self.adapters.pop(digest, None)
        self._copy_pages(plan)
        for moves in plan.moves:
            for row in self.rows.values():
                row.pages = [moves.get(page, page) for page in row.pages]
        for row in plan.leaves:
            del self.rows[row]
        for join in plan.joins:
            assert join.row not in self.rows, "the row is taken"
            sequence = self.planner.sequences.get(join.request)
            assert sequence is not None
            root = hash((join.adapter, sequence.new.prefix_salt or join.request))
            self.rows[join.row] = Row(
                join.request,
                list(join.tokens),
                join.prompt_tokens,
                join.adapter,
                [root],
                [None] * join.left_pages,
                join.to_score,
            )
        left = self._write_late(plan)
        arrived, failed = self._load_some(plan)
        silent = {number for number, (load, _) in self.loads.items() if load.digest in self.hung}
        new, self._silent = silent - self._silent, self._silent | silent
        proved = self._prove_some(plan)
        self._check_adapters(plan)
        self.steps += bool(plan.rows)
        for step in plan.rows:
            row = self.rows[step.row]
            row.pages += step.new_pages
            self._compute(row, step.start, step.count)
            self.computed[row.request] = self.computed.get(row.request, 0) + step.count
            self.iterations[row.request] = self.iterations.get(row.request, 0) + 1
        scores = {}
        for step in plan.prefills:
            row = self.rows[step.row]
            scores[step.row] = row.scores(step, finite=row.request not in self.not_finite)
        sampled: list[int | None] = []
        for step in plan.rows:
            if step.samples:
                row = self.rows[step.row]
                row.tokens.append(row.next_token())
                sampled.append(None if row.request in self.not_finite else row.tokens[-1])
        result = StepResult(
            number=plan.number,
            sampled=tuple(sampled),
            prompt_logprobs={row: one for row, one in scores.items() if one is not None},
            arrived=tuple(arrived),
            failed=tuple(failed),
            silent=tuple(new),
            left=tuple(left),
            proved=proved,
        )
        self.launched.append((plan, result))

    def _write_late(self, plan: StepPlan) -> list[int]:
        """Threads of loads that were given up before the last plan write once more, and end."""
        left = list(self.leaving)
        for load in self.leaving.values():
            self._write(load, load.layout.rank)
        self.leaving = {
            number: load
            for number, (load, _) in self.loads.items()
            if number not in plan.loading and load.host is not None
        }
        return left

    def _write(self, load: AdapterLoad, count: int) -> None:
        if load.host is not None and load.host.contents is None:
            first = load.host.begin // BLOCK_BYTES
            self.kept |= dict.fromkeys(range(first, first + count), load.digest)

    def _load_some(self, plan: StepPlan) -> tuple[list[LoadArrived], list[LoadFailed]]:
        """Copy one page of each adapter that loads, or in a hurry all of them."""
        self.loads = {number: load for number, load in self.loads.items() if number in plan.loading}
        self.loads |= {load.number: (load, 0) for load in plan.loads}
        arrived, failed = [], []
        for number, (load, copied) in list(self.loads.items()):
            host = None if load.host is None else load.host.contents
            if load.digest in self.loads_fail and host is None:
                if load.host is not None:
                    self.leaving[number] = load
                failed.append(LoadFailed(number, AdapterError("its weights are damaged")))
                del self.loads[number]
                continue
            pages = load.layout.rank
            answers = host is not None or (self.disk_answers and load.digest not in self.hung)
            until = copied if not answers else pages if plan.hurry else copied + 1
            self._write(load, until)
            for index in range(copied, until):
                for offset in range(self.page_tokens):
                    self.memory[plan.loading[number] + index, offset] = (load.digest, index)
            self.loads[number] = load, until
            if until == pages:
                del self.loads[number]
                contents = host or LoadedContents(frozenset([load.digest]), False, bool(load.layout.slab))
                arrived.append(LoadArrived(number, 0.5, contents=None if load.host is None else contents))
                self.adapters[load.digest] = pages
                self.from_slab[load.digest] = contents.from_slab
                self._check_kept(load, contents)
                if host is None:
                    self.read_from_disk.append(load.digest)
        return arrived, failed

    def _check_kept(self, load: AdapterLoad, contents: LoadedContents) -> None:
        assert contents.linears == {load.digest}, "this is said of another adapter"
        if load.host is not None:
            first = load.host.begin // BLOCK_BYTES
            found = {self.kept.get(block) for block in range(first, first + load.layout.rank)}
            assert found == {load.digest}, "another adapter is in its place"

    def _prove_some(self, plan: StepPlan) -> ProofResult | None:
        """Do a part of the proof, or with a hurry all of them."""
        step, (number, done, kernels) = plan.proof, self.proving
        if step is None or step.number < number:
            return None
        for index in range(self.adapters[step.digest]):
            for offset in range(self.page_tokens):
                assert self.memory[step.first_page + index, offset] == (step.digest, index), "it is not there"
        if step.number > number:
            done, kernels = 0, self.kernels
        elif done >= self.proof_parts:
            return None  # it has ended, which the planner does not know yet
        done += 0 if step.paused else self.proof_parts if plan.hurry else 1
        self.proving = step.number, done, kernels
        if done < self.proof_parts:
            return None
        if step.digest in self.unproved:
            return ProofResult(step.number, AdapterUnproved("its results are wrong"))
        if step.digest in self.damaged_slabs and self.from_slab[step.digest]:
            return ProofResult(step.number, AdapterUnproved("its slab is damaged"), from_slab=True)
        if step.digest in self.given_up_proofs:
            return ProofResult(step.number, AdapterError("its file is gone"))
        return ProofResult(step.number, Proof(kernels, 1.0, 0.0))

    def _check_adapters(self, plan: StepPlan) -> None:
        used = {self.rows[step.row].adapter for step in plan.rows} - {BASE}
        assert used == plan.adapters.keys(), "the plan must say where the adapters of its rows are"
        for digest, first in plan.adapters.items():
            for index in range(self.adapters[digest]):
                for offset in range(self.page_tokens):
                    assert self.memory[first + index, offset] == (digest, index), f"{digest} is not there"

    def _take_outputs(self) -> None:
        outputs, events = self.planner.take_outputs()
        self.events += events
        for event in events:
            if isinstance(event, ProofEnded) and isinstance(event.found, Proof):
                assert event.found.kernels == self.kernels, "other kernels have proved it"
        for output in outputs:
            if output.error is not None:
                self.given_up.append(output.request)
                continue
            places = [int(-one.logprob) for one in output.prompt_logprobs]
            assert not places or places[0] == output.prompt_index
            self.scored.setdefault(output.request, []).extend(places)
            tokens = self.tokens.setdefault(output.request, [])
            first = self.first_index.setdefault(output.request, output.index)
            assert output.index == first + len(tokens), "a token is missing or was given twice"
            tokens += output.tokens
            if output.finish is not None:
                self.finished[output.request] = tokens, output.finish

    def _copy_pages(self, plan: StepPlan) -> None:
        memory = {Tier.DEVICE: self.memory, Tier.HOST: self.host}
        for copy in plan.copies:
            assert copy.source is not copy.target or not set(copy.pages) & set(copy.to), "it reads what it writes"
            for page, to in zip(copy.pages, copy.to, strict=True):
                for offset in range(self.page_tokens):
                    held = memory[copy.source].get((page, offset))
                    if held is not None:
                        memory[copy.target][to, offset] = held
                    else:
                        memory[copy.target].pop((to, offset), None)

    def _compute(self, row: Row, start: int, count: int) -> None:
        def place(position: int) -> tuple[int, int]:
            return row.pages[position // self.page_tokens], position % self.page_tokens

        window = self.planner.window
        for position in range(0 if window is None else max(0, start - window + 1), start):
            expected = row.content_at(position)
            assert self.memory.get(place(position)) == expected, "the KV of an earlier token is not there"
        for position in range(start, start + count):
            assert not self.pages.is_shared(place(position)[0]), "the page has another holder, too"
            page, at = place(position)
            found = [self.memory.get((page, offset)) for offset in range(self.page_tokens)]
            if not at:
                for offset in range(self.page_tokens):  # a worker clears what it begins
                    self.memory.pop((page, offset), None)
            else:
                assert not any(isinstance(one, tuple) for one in found), "an adapter was written into its page"
            self.memory[place(position)] = row.content_at(position)
