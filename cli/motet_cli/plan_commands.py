"""`motet plan`: how many runners a workload needs, by simulating it."""

import json
import os
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from motet.errors import SetupError
from motet_cli.printer import Printer
from motet_simulator.output_file import output_file
from motet_simulator.plan.plot import svg
from motet_simulator.plan.search import Answered, Search, Survey
from motet_simulator.plan.sentence import as_object, as_table, sentence
from motet_simulator.plan.setup import Lengths, Setup
from motet_simulator.plan.slo import Slo
from motet_simulator.profiles.identity import check_identity
from motet_simulator.profiles.limits import MAX_PAGES_SIMULATED
from motet_simulator.profiles.profile import Profile
from motet_simulator.workloads.complete import Completion, adapters_asked_for, workload

MIN_REQUESTS_AT_A_TIME = 2000
"""In workloads of fewer requests a simulation takes about as long as the start of a process for it."""

NOT_KEPT = 1
"""Exit status: no number of runners that was tried keeps the promise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    trace: Path
    profile: Path
    slo: Slo
    completion: Completion
    runners: int | None
    most_runners: int
    seeds: int
    lengths: Lengths
    max_tokens: int
    rank: int
    machine: str
    model: str
    kernels: str
    anyway: bool
    plot: Path | None
    as_json: bool


def plan(question: Question) -> int:
    profile = Profile.read(question.profile)
    if not question.anyway:
        check_identity(
            profile, question.profile, machine=question.machine, model=question.model, kernels=question.kernels
        )
    _check_size(question, profile)
    trace, completion = question.trace, question.completion
    survey = Survey.of(workload(trace, completion), profile)
    if not survey.requests:
        raise SetupError(f"{trace} has no requests.")
    adapters = adapters_asked_for(trace, completion)
    setup = Setup(
        profile=profile, runners=1, lengths=question.lengths, max_tokens=question.max_tokens, rank=question.rank
    )
    with nullcontext() if question.plot is None else output_file(question.plot) as picture:
        found = _searched(question, setup, survey, adapters)
        text = sentence(found, question.slo, asked=question.runners)
        if picture is not None:
            picture.write(svg(found, question.slo, text))
    printer = Printer(width_of_a_pipe=200)
    if question.as_json:
        print(json.dumps(as_object(found, question.slo, text) | {"profile": _whose(profile)}))  # noqa: T201
    else:
        printer.line(text)
        printer.line(
            f"{survey.requests} requests, {len(adapters)} adapters; profile of {profile.model} with {profile.kernels} "
            f"on {profile.machine}."
        )
        printer.table(*as_table(found, question.slo))
    return NOT_KEPT if None in found.fewest.values() else 0


def _check_size(question: Question, profile: Profile) -> None:
    option, runners = ("--runners", question.runners) if question.runners else ("--most-runners", question.most_runners)
    pages = profile.engine.pages
    if runners * pages > MAX_PAGES_SIMULATED:
        raise SetupError(
            f"{option} {runners}: {question.profile} is of runners with {pages:,} pages each, and a simulation has at "
            f"most {MAX_PAGES_SIMULATED:,}. Choose a number from 1 to {MAX_PAGES_SIMULATED // pages}."
        )


def _processes(question: Question, profile: Profile) -> int:
    """How many simulations run at a time: one more than there are processors, so that these are in use to the end; and
    together no more pages than one may have."""
    pages = (question.runners or question.most_runners) * profile.engine.pages
    return max(1, min((os.cpu_count() or 1) + 1, MAX_PAGES_SIMULATED // pages))


def _searched(question: Question, setup: Setup, survey: Survey, adapters: Iterable[str]) -> Answered:
    spinner = Printer(to_errors=True).waiting()

    def progress(runners: int, seed: int) -> None:
        if spinner is not None:
            spinner.update(f"{runners} runners, simulation {seed + 1}")

    search = Search(
        setup,
        partial(workload, question.trace, question.completion),
        adapters,
        question.slo,
        survey=survey,
        most_runners=question.most_runners,
        progress=progress,
        processes=_processes(question, setup.profile) if survey.requests >= MIN_REQUESTS_AT_A_TIME else 1,
    )
    seeds = range(question.seeds)
    try:
        return search.exactly(question.runners, seeds) if question.runners else search.fewest(seeds)
    finally:
        if spinner is not None:
            spinner.stop()


def _whose(profile: Profile) -> dict[str, str]:
    return {"machine": profile.machine, "model": profile.model, "kernels": profile.kernels}


def lengths_named(name: str) -> Lengths:
    known: tuple[Lengths, ...] = get_args(Lengths)
    for one in known:
        if name == one:
            return one
    raise SetupError(f"--estimate {name!r}: choose one of {', '.join(known)}.")
