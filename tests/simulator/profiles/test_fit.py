"""A law is found again in what was measured by it, and what was seen around it stays."""

import json
import math
import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from motet.errors import SetupError
from motet_simulator import lines
from motet_simulator.profiles import bounds, step_traces
from motet_simulator.profiles.fit import fit
from motet_simulator.profiles.identity import check_identity
from motet_simulator.profiles.profile import Profile, Residuals, Work
from motet_simulator.profiles.step_times import RUN_OF_RESIDUALS, StepTimes
from motet_simulator.profiles.step_traces import Iteration, Timed, read
from motet_simulator.profiles.tables import engine_size, from_law, from_splitwise
from motet_simulator.quantiles import quantile
from tests.simulator.setups import LAW, SIZE, profile

TIMED = Timed(machine="here", model="m", kernels="k", engine=SIZE)
ENGINE = engine_size(kv_tokens=4096, max_sequences=8, max_model_length=2048, adapter_slots=4, adapter_tokens=256)


def works(count: int, seed: int = 1) -> list[Work]:
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        decodes = chance.choice([0, 1, 2, 4, 7, 8, 20, 33, 64])
        prompt = chance.choice([0, 0, 16, 100, 512]) or (0 if decodes else 50)
        start = chance.choice([0, 0, 512])
        found.append(
            Work(
                decodes=decodes,
                context=decodes * chance.randrange(10, 2000),
                prefill=prompt,
                attended=prompt * start + prompt * (prompt + 1) // 2,
                adapters=chance.randrange(min(8, decodes + 1)),
            )
        )
    return found


def measured(count: int, noise: float, seed: int = 1) -> list[Iteration]:
    chance = random.Random(seed)
    return [Iteration(work, LAW.seconds(work) * math.exp(chance.gauss(0, noise))) for work in works(count, seed)]


def test_a_law_is_found_again() -> None:
    found = fit(TIMED, measured(3000, 0.0)).law
    for work in works(200, seed=9):
        assert found.seconds(work) == pytest.approx(LAW.seconds(work), rel=0.01), work


def test_noise_stays_in_the_residuals_and_bends_nothing() -> None:
    found = fit(TIMED, [*measured(3000, 0.4), Iteration(Work(decodes=8, context=80), 30.0)])
    for work in works(200, seed=9):
        assert found.law.seconds(work) == pytest.approx(LAW.seconds(work), rel=0.12), work
    seen = [*found.residuals.decoding, *found.residuals.prompts]
    assert quantile(seen, 0.5) == pytest.approx(1.0, abs=0.02)
    assert quantile(seen, 0.95) == pytest.approx(math.exp(1.645 * 0.4), rel=0.08)
    assert max(seen) > 500, "an iteration of half a minute happened"
    assert len(seen) == found.steps == 3001


def test_too_few_iterations_are_refused() -> None:
    with pytest.raises(SetupError, match=r"199 iterations are too few"):
        fit(TIMED, measured(199, 0.1))


def test_times_are_those_of_the_law_and_runs_of_residuals() -> None:
    one = profile(noise=0.4)
    times, work = StepTimes(one, seed=5), Work(decodes=3, context=90)
    factors = [times.seconds(step, work) / one.law.seconds(work) for step in range(4000)]
    assert quantile(factors, 0.95) == pytest.approx(quantile(list(one.residuals.decoding), 0.95), rel=0.15)
    place = min(range(500), key=lambda at: abs(one.residuals.decoding[at] - factors[0]))
    run = [one.residuals.decoding[(place + after) % 500] for after in range(RUN_OF_RESIDUALS)]
    assert factors[:RUN_OF_RESIDUALS] == pytest.approx(run), "neighbours come together"
    other = [StepTimes(one, seed=6).seconds(step, work) for step in range(64)]
    assert other != pytest.approx([times.seconds(step, work) for step in range(64)])


def test_what_disturbs_short_iterations_does_not_stretch_long_ones() -> None:
    """Every fifth iteration is 5 ms late, whatever it computes."""
    chance = random.Random(4)
    iterations = [
        Iteration(work, LAW.seconds(work) + (0.005 if number % 5 == 0 else 0.0) + chance.uniform(0, 1e-4))
        for number, work in enumerate(Work(decodes=chance.choice([1, 64]), context=100) for _ in range(4000))
    ]
    found = fit(TIMED, iterations)
    times = StepTimes(found, seed=1)
    for decodes in (1, 64):
        work = Work(decodes=decodes, context=100)
        seen = [times.seconds(step, work) for step in range(4000)]
        assert quantile(seen, 0.9) == pytest.approx(LAW.seconds(work) + 0.005, rel=0.05), f"{decodes} decodes"


@pytest.mark.parametrize("sized", [False, True])
def test_many_decodes_at_once_take_what_each_takes(sized: bool) -> None:
    one = profile(noise=0.4)
    if sized:  # the context grows beyond some borders between sizes
        sizes = tuple(LAW.seconds(Work(decodes=3, context=90 + number, adapters=2)) for number in range(500))
        one = replace(one, residuals=Residuals(decoding=one.residuals.decoding, decoding_seconds=sizes))
    at_once = StepTimes(one, 3).decoding(70, 90, Work(decodes=3, context=90, adapters=2))
    single = StepTimes(one, 3)
    assert at_once == [
        single.seconds(70 + number, Work(decodes=3, context=90 + 3 * number, adapters=2)) for number in range(90)
    ]


# -- step traces ---------------------------------------------------------------------------------------------------


def traced(iterations: list[Iteration], **of: Any) -> str:
    about = {"machine": "here", "model": "m", "kernels": "k", "engine": _engine()} | of
    rows = []
    for number, one in enumerate(iterations):
        work = one.work
        row = {"step": number, "ms": 1.0, "cycle": 1000 * one.seconds, "decode": work.decodes, "context": work.context}
        row |= {"prefill": work.prefill, "attended": work.attended, "adapters": work.adapters}
        rows.append(json.dumps(row if number else row | {"of": about}) + "\n")
    return "".join(rows)


def _engine() -> dict[str, Any]:
    return {"pages": 256, "page_bytes": 4096, "adapter_rank_bytes": 2048}


def test_a_step_trace_is_read_with_what_it_is_of(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    iterations = measured(300, 0.1)
    file.write_text(traced(iterations))
    timed, found = read([file])
    assert (timed.machine, timed.model, timed.kernels, timed.engine.pages) == ("here", "m", "k", 256)
    assert [one.work for one in found] == [one.work for one in iterations]
    assert [one.seconds for one in found] == pytest.approx([one.seconds for one in iterations])


def test_only_what_came_after_other_kernels_counts(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(traced(measured(100, 0.1), kernels="old") + traced(measured(50, 0.1), kernels="new"))
    timed, found = read([file])
    assert (timed.kernels, len(found)) == ("new", 50)


@pytest.mark.parametrize("what", ["machine", "model", "kernels"])
def test_traces_of_different_things_are_refused_by_name(what: str, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text(traced(measured(30, 0.1)))
    other.write_text(traced(measured(30, 0.1), **{what: "elsewhere"}))
    with pytest.raises(SetupError) as refused:
        read([one, other])
    assert f"{other} is of the {what} 'elsewhere', and {one} of '" in refused.value.message


def test_traces_of_different_engines_are_refused_by_the_field_that_differs(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text(traced(measured(30, 0.1)))
    other.write_text(traced(measured(30, 0.1), engine=_engine() | {"pages": 9, "max_sequences": 3}))
    with pytest.raises(SetupError) as refused:
        read([one, other])
    assert refused.value.message == (
        f"{other} is of the engine's max_sequences 3, and {one} of 64. Make a profile of each."
    )


def test_runners_may_have_different_numbers_of_pages_and_the_smaller_ones_count(tmp_path: Path) -> None:
    """Memory that is free differs from start to start, also of one runner that goes on with its trace."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text(traced(measured(30, 0.1), engine=_engine() | {"host_pages": 5}))
    other.write_text(
        traced(measured(20, 0.1), engine=_engine() | {"pages": 200, "host_pages": 9})
        + traced(measured(10, 0.1), engine=_engine() | {"pages": 300, "host_pages": 9})
    )
    timed, found = read([one, other])
    assert (timed.engine.pages, timed.engine.host_pages, len(found)) == (200, 5, 60)


def test_a_line_that_a_runner_has_not_written_whole_is_left_out(tmp_path: Path) -> None:
    """It was killed there, or writes on."""
    file = tmp_path / "trace"
    file.write_text(traced(measured(30, 0.1)) + '{"step": 30, "ms": 8.')
    assert len(read([file])[1]) == 30
    with file.open("a") as more:
        more.write("\n" + traced(measured(20, 0.1)))
    assert len(read([file])[1]) == 50


def test_a_trace_may_have_more_rows_than_a_workload_and_the_newest_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_ROWS", 50)
    monkeypatch.setattr(step_traces, "MAX_ITERATIONS", 20)
    iterations = measured(60, 0.1)
    (tmp_path / "trace").write_text(traced(iterations))
    (tmp_path / "other").write_text(traced(iterations[:5]))
    assert [one.work for one in read([tmp_path / "trace"])[1]] == [one.work for one in iterations[-20:]]
    newest = read([tmp_path / "trace", tmp_path / "other"])[1]
    assert [one.work for one in newest] == [one.work for one in (iterations[-15:] + iterations[:5])]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"step": 1, "ms": 3}\n', "line 1: a step trace begins with what it is of"),
        ('{"of": {"machine": 1}}\n', "line 1: what it is of cannot be read"),
        (
            traced([Iteration(Work(decodes=1), 1.0)], engine={"pages": None, "page_bytes": 1, "adapter_rank_bytes": 1}),
            "line 1: what it is of cannot be read (engine.pages is None: it must be a whole number from 1 to 4194304)",
        ),
        ("{]\n" + traced([Iteration(Work(decodes=1), 1.0)] * 2).partition("\n")[2], "line 1: it is no JSON"),
        (traced([Iteration(Work(decodes=1), 1.0)]) + "{]\n{]", "line 2: it is no JSON"),
        (traced([Iteration(Work(decodes=1), 1.0)]) + "{]\n", "line 2: it is no JSON"),
        (traced([Iteration(Work(decodes=1), 1.0)]) + '{"ms": -1}\n', "line 2: ms is -1"),
        ("", "has no iterations"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(SetupError) as refused:
        read([file])
    assert says in refused.value.message


# -- files and identities ------------------------------------------------------------------------------------------


def test_a_profile_is_written_and_read(tmp_path: Path) -> None:
    one = profile()
    one.write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == one


@pytest.mark.parametrize(
    "spoil",
    [
        lambda given: given.pop("law"),
        lambda given: given.update(motet_profile=9),
        lambda given: given["law"].update(fixed=0),
        lambda given: given["law"].update(context=-1),
        lambda given: given["law"].update(prefill=math.nan),
        lambda given: given["law"].update(decodes=[[8, 0.5], [4, 0.6]]),
        lambda given: given["law"].update(decodes=[[4, 0.5], [8, 0.1]]),
        lambda given: given["residuals"].update(decoding=[0.0]),
        lambda given: given["residuals"].update(decoding_seconds=[0.5]),
        lambda given: given["residuals"].update(decoding_seconds=[-0.5] * 500),
        lambda given: given["engine"].update(pages=0),
        lambda given: given["engine"].update(page_bytes=0),
        lambda given: given["engine"].update(surprise=1),
        lambda given: given["overheads"].update(delivery=math.inf),
    ],
)
def test_a_profile_with_which_no_simulation_would_end_is_refused(spoil: Any, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    profile().write(file)
    given = json.loads(file.read_text())
    spoil(given)
    file.write_text(json.dumps(given))
    with pytest.raises(SetupError, match=r"profile.json is no profile"):
        Profile.read(file)


WHOLE, REAL = [math.nan, 100.5, 10**13, "4", None, True], [math.nan, math.inf, 1e308, "4", None, True]


@pytest.mark.parametrize("part", ["engine", "law", "overheads"])
def test_every_field_of_a_profile_has_bounds(part: str, tmp_path: Path) -> None:
    """A file with something else says so, with the field's name, and is not taken."""
    table = {"engine": bounds.ENGINE, "law": bounds.LAW, "overheads": bounds.OVERHEADS}[part]
    assert table.keys() == {one.name for one in fields(getattr(profile(), part))} - {"decodes"}
    file = tmp_path / "profile.json"
    profile(noise=0.0).write(file)
    written = json.loads(file.read_text())
    for name, bound in table.items():
        values: list[Any] = ["nope", 1, None]
        if isinstance(bound, bounds.Number):
            values = [bound.least - 1, bound.most + 1, *(WHOLE if bound.kind is int else REAL)]
        for value in values:
            if value is None and isinstance(bound, bounds.Number) and bound.nullable:
                continue  # it may be absent
            file.write_text(json.dumps(written | {part: written[part] | {name: value}}))
            with pytest.raises(SetupError, match=rf"profile.json is no profile .*: {part}.{name} is .*: it must be "):
                Profile.read(file)


@pytest.mark.parametrize("text", ["fixed=1" + "0" * 309 + "s", "fixed=61s", "fixed=8ms,context=100s"])
def test_a_profile_that_no_plan_would_take_is_not_written(text: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    with pytest.raises(
        SetupError, match=r"profile.json is not written: law\.(fixed|context) is .*: it must be a number"
    ):
        from_law(text, ENGINE, machine="x", model="y").write(file)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[]", "{}", "nothing", "[" * 100_000])
def test_what_is_no_profile_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(SetupError, match=r"no profile"):
        Profile.read(tmp_path / "file")


@pytest.mark.parametrize("what", ["machine", "model", "kernels"])
def test_a_profile_of_something_else_is_refused_by_name(what: str) -> None:
    one = replace(profile(), **{what: "a GPU elsewhere"})
    check_identity(one, Path("file"), **{what: "a GPU elsewhere"})
    with pytest.raises(SetupError) as refused:
        check_identity(one, Path("file"), **{what: "ours"})
    assert f"of the {what} 'a GPU elsewhere', and the plan is for 'ours'" in refused.value.message
    assert "--anyway" in refused.value.message


# -- tables and laws -----------------------------------------------------------------------------------------------


def test_a_law_that_somebody_gives() -> None:
    law = from_law("fixed=8ms, decode=0.5ms,context=2us,prefill=0.1ms", ENGINE, machine="x", model="y").law
    assert law.seconds(Work(decodes=10, context=1000)) == pytest.approx(0.008 + 0.005 + 0.002)
    assert law.seconds(Work(prefill=100, attended=5050)) == pytest.approx(0.018)


@pytest.mark.parametrize("text", ["", "decode=1ms", "fixed=0ms", "fixed=8", "fixed=8ms,fixed=8ms", "fixed=8ms,tea=1s"])
def test_a_law_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SetupError):
        from_law(text, ENGINE, machine="x", model="y")


def splitwise(folder: Path) -> Path:
    header = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel"
    rows = [
        f"big,gpu,{prompt},{batch},128,{10 + 0.2 * prompt * batch},{20 + batch + 0.001 * batch * (prompt + 64)},8"
        for prompt in (128, 512, 2048)
        for batch in (1, 2, 4, 8, 16)
    ]
    (folder / "table.csv").write_text("\n".join([header, *rows]) + "\n")
    return folder / "table.csv"


def test_splitwises_table_becomes_a_profile_with_context_in_it(tmp_path: Path) -> None:
    found = from_splitwise(splitwise(tmp_path), ENGINE, model="big", hardware="gpu", parallel=8)
    short = found.law.seconds(Work(decodes=8, context=8 * 192))
    long = found.law.seconds(Work(decodes=8, context=8 * 2112))
    assert short == pytest.approx(0.001 * (20 + 8 + 0.001 * 8 * 192), rel=0.25)
    assert long - short == pytest.approx(0.001 * 0.001 * 8 * 1920, rel=0.4)
    assert found.machine == "8 gpu"
    with pytest.raises(SetupError, match=r"It has big on 8 gpu"):
        from_splitwise(splitwise(tmp_path), ENGINE, model="small", hardware="gpu", parallel=8)
