"""The fewest runners, and what is said of them."""

import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from xml.etree import ElementTree as ET

import pytest

from motet.errors import SetupError
from motet_simulator.plan.ahead import Ahead
from motet_simulator.plan.cluster import Cluster
from motet_simulator.plan.outcome import Outcome
from motet_simulator.plan.plot import svg
from motet_simulator.plan.search import Answered, Search, Survey
from motet_simulator.plan.sentence import as_object, as_table, sentence
from motet_simulator.plan.setup import Setup
from motet_simulator.plan.slo import Slo, shown
from motet_simulator.plan.trial import Question, Trial, _Missed
from motet_simulator.quantiles import quantile
from motet_simulator.workloads.request import WorkloadRequest
from tests.simulator.setups import profile, workload

REQUESTS = list(workload(4, 120, rate=25))
MORE = list(workload(4, 250, rate=25))


def search(
    slo: Slo,
    *,
    requests: list[WorkloadRequest] = REQUESTS,
    most_runners: int = 32,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Search:
    setup = Setup(profile=profile(max_sequences=4), runners=1, lengths="exact")
    survey = Survey.of(requests, setup.profile)
    return Search(setup, lambda: iter(requests), (), slo, survey=survey, most_runners=most_runners, progress=progress)


def request_at(at: float, *, prompt_tokens: int = 10) -> WorkloadRequest:
    return WorkloadRequest(at=at, prompt_tokens=prompt_tokens, output_tokens=5)


def test_a_search_begins_where_the_work_could_be_done_at_all() -> None:
    """Not with one runner, which would be overloaded for long, nor with more than suffice."""
    survey = Survey.of(REQUESTS, profile(max_sequences=4))
    assert survey.requests == 120
    found = search(Slo(ttft=5.0)).fewest([0])
    assert next(iter(found.trials)) == (survey.least_runners, 0)
    enough = found.fewest[0]
    assert enough is not None
    assert 2 <= survey.least_runners <= enough
    assert Survey.of([], profile()) == Survey(0, 1)
    assert Survey.of(REQUESTS[:1], profile()).least_runners == 1
    moment = [request_at(0.0), request_at(5e-324)]
    assert Survey.of(moment, profile()).least_runners > 1000


def broken_workload() -> Iterator[WorkloadRequest]:
    raise SetupError("row 7 is bad")


def test_simulations_in_other_processes_change_nothing_but_the_time() -> None:
    """Also none of what was simulated beforehand in vain is in the answer."""
    here, elsewhere = (
        Search(
            Setup(profile=profile(max_sequences=4), runners=1, lengths="exact"),
            partial(workload, 4, 120, rate=25),
            (),
            Slo(ttft=0.3),
            survey=Survey(120, 1),
            most_runners=2,
            processes=processes,
        )
        for processes in (1, 2)
    )
    found = elsewhere.fewest(range(2))
    assert found == here.fewest(range(2))
    assert list(found.trials) == [(1, 0), (2, 0), (2, 1)], "one runner was simulated with both seeds"


def test_more_runners_are_simulated_beside_the_first_guess() -> None:
    """With each number of them the search goes the same way and finds the same."""
    setup = Setup(profile=profile(max_sequences=4), runners=1, lengths="exact")
    requests = partial(workload, 4, 120, rate=25)
    found = [
        Search(setup, requests, (), Slo(ttft=1.0), survey=Survey(120, 1), most_runners=32, processes=processes).fewest(
            [0]
        )
        for processes in (1, 3)
    ]
    assert found[0] == found[1]
    assert next(iter(found[0].trials)) == (1, 0)
    assert found[0].most_tried > 2


class HangsWithThreeRunners(Question):
    def simulate(self, runners: int, seed: int, *, whole: bool) -> Trial:
        if runners == 3:
            time.sleep(3600)
        return Trial(runners, seed, Outcome(), complete=whole)


def test_what_is_expected_no_longer_is_ended() -> None:
    setup = Setup(profile=profile(), runners=1)
    question = HangsWithThreeRunners(
        setup=setup, workload=partial(workload, 4, 1), adapters=(), slo=Slo(ttft=1.0), requests=1, most_runners=4
    )
    with closing(Ahead(question, whole=False, processes=3)) as ahead:
        assert ahead.simulate(1, 0, then=[(3, 0), (2, 0)]).runners == 1
        assert multiprocessing.active_children()
        assert ahead.simulate(2, 0).runners == 2
        ended = time.monotonic() + 30
        while multiprocessing.active_children():
            assert time.monotonic() < ended
            time.sleep(0.01)


def test_what_fails_in_another_process_is_told_as_if_it_had_failed_here() -> None:
    setup = Setup(profile=profile(), runners=1)
    survey = Survey(120, 1)
    search = Search(setup, broken_workload, (), Slo(ttft=1), survey=survey, most_runners=1, processes=2)
    with pytest.raises(SetupError, match="row 7 is bad"):
        search.fewest([0, 1])


def keeps(slo: Slo, runners: int, seed: int) -> bool:
    return search(slo).exactly(runners, [seed]).fewest[seed] == runners


@pytest.mark.parametrize("ttft", [0.3, 5.0])
def test_the_answer_suffices_and_one_less_does_not(ttft: float) -> None:
    slo = Slo(ttft=ttft)
    found = search(slo).fewest([0, 1])
    for seed, runners in found.fewest.items():
        assert runners is not None
        kept = found.trials[runners, seed]
        assert kept.complete
        assert not slo.misses(kept.outcome)
        assert runners == 1 or not keeps(slo, runners - 1, seed)
    most = max(runners for runners in found.fewest.values() if runners)
    assert sentence(found, slo).startswith(f"{most} runner")


@pytest.mark.parametrize("slo", [Slo(ttft=0.3), Slo(tpot=0.013)])
def test_a_simulation_ends_as_soon_as_the_promise_is_broken(slo: Slo) -> None:
    found = search(slo, requests=MORE).fewest([0])
    early = [trial for trial in found.trials.values() if not trial.complete]
    assert early
    assert all(trial.outcome.seconds < MORE[-1].at + 5 for trial in early)


def test_a_simulation_goes_on_while_no_more_miss_the_promise_than_may() -> None:
    """Of ten requests, nine must keep it: 1 - 0.9 is a little less than a tenth."""
    requests = [request_at(0.0, prompt_tokens=1_000_000), *(request_at(4.0 * number) for number in range(9))]
    slo = Slo(ttft=1.0, share=0.9)
    setup = Setup(profile=profile(), runners=1, lengths="exact")
    survey = Survey.of(requests, setup.profile)
    found = Search(setup, lambda: iter(requests), (), slo, survey=survey, most_runners=2).fewest([0])
    assert found.fewest == {0: 1}


class Times(list[float]):
    """Refuses to be read from its beginning."""

    def __iter__(self) -> Iterator[float]:
        raise AssertionError


def test_whether_it_is_in_vain_is_asked_without_reading_all_answers_again() -> None:
    cluster = Cluster(Setup(profile=profile(max_sequences=4), runners=1, lengths="exact"))
    outcome = cluster.outcome
    outcome.first_tokens, outcome.per_token = Times(), Times()
    slo = Slo(ttft=0.3, tpot=0.03)
    missed = _Missed(slo)
    seen: list[int] = []

    def asked() -> bool:
        waits = [cluster.clock.now - one.asked.at for one in cluster.answers.values() if one.first_at < 0]
        times, per_token = outcome.first_tokens[:], outcome.per_token[:]
        expected = max(sum(one > 0.3 for one in [*times, *waits]), sum(one > 0.03 for one in per_token))
        assert missed.count(cluster) == expected
        seen.append(expected)
        return False

    cluster.run(iter(MORE), give_up=asked)
    assert len(seen) > 3
    assert 0 < seen[0] < seen[-1]


def test_nobody_can_keep_it() -> None:
    slo = Slo(ttft=2.0, tpot=0.005)
    tried: list[tuple[int, int]] = []
    found = search(slo, requests=MORE, progress=lambda *which: tried.append(which)).fewest([0, 1])
    assert set(found.fewest.values()) == {None}
    assert len(tried) == len(set(tried)), "no simulation is begun again to see its end"
    text = sentence(found, slo)
    assert text.startswith(
        "No number of runners that was tried keeps ttft 2 s and tpot 5 ms for 95 % of the requests: "
    )
    trial = min((one for one in found.trials.values() if one.complete), key=lambda one: slo.seen(one.outcome)["tpot"])
    seen = slo.seen(trial.outcome)["tpot"]
    assert f"the time per token is {shown(seen)}, {100 * (seen / 0.005 - 1):.0f} % above 5 ms" in text
    assert "time to the first token" not in text.partition(":")[2], "that promise is kept"
    assert "had nothing to do, so more would not help" in text
    assert as_object(found, slo, text)["runners"] is None


def test_no_more_runners_are_tried_than_are_allowed() -> None:
    found = search(Slo(ttft=0.2), most_runners=2).fewest([0])
    assert found.most_tried == 2
    assert found.fewest == {0: None}


def test_what_is_said_is_what_was_seen() -> None:
    slo = Slo(ttft=1.0, tpot=1.0)
    found = search(slo).fewest([0, 1])
    text = sentence(found, slo)
    columns, rows = as_table(found, slo)
    assert all(len(row) == len(columns) for row in rows)
    said = as_object(found, slo, text)
    json.dumps(said)
    best = said["runners"]
    of_best = [trial for trial in said["trials"] if trial["runners"] == best and trial["complete"]]
    assert all(trial["keeps"] for trial in of_best)
    for trial in of_best:
        assert trial["ttft_p95"] == quantile(found.trials[best, trial["seed"]].outcome.first_tokens, 0.95)
    assert shown(max(trial["ttft_p95"] for trial in of_best)) in text
    picture = ET.fromstring(svg(found, slo, text))
    texts = [one.text for one in picture.iter() if one.tag.endswith("text")]
    assert {str(best), "promised: 1 s"} <= set(texts)


def test_of_one_number_it_says_whether_it_keeps_the_promise() -> None:
    slo = Slo(ttft=0.3)
    assert "keep ttft 300 ms" in sentence(search(slo).exactly(16, [0]), slo, asked=16)
    text = sentence(search(slo).exactly(1, [0, 1]), slo, asked=1)
    assert text.startswith("1 runner does not keep ttft 300 ms for 95 % of the requests, in 2 of 2 simulations: ")
    assert "above 300 ms" in text


def test_too_many_refusals_are_said_as_such() -> None:
    """No time is named that nobody has measured."""
    outcome = Outcome(first_tokens=[0.1] * 9, per_token=[0.01] * 9, seconds=1.0, busy_seconds=(1.0,))
    outcome.refusals["pool_saturated"] = 1
    found = Answered({0: None}, {(1, 0): Trial(1, 0, outcome, complete=True)}, 1)
    assert sentence(found, Slo(ttft=0.5, tpot=0.1)) == (
        "No number of runners that was tried keeps ttft 500 ms and tpot 100 ms for 95 % of the requests: with 1 runner "
        "more than 5 % get no answer; 1 of 10 requests was refused (pool_saturated)."
    )


# -- promises ------------------------------------------------------------------------------------------------------


def test_a_promise_is_parsed() -> None:
    assert Slo.parse("ttft=500ms,tpot=0.05s") == Slo(ttft=0.5, tpot=0.05)
    assert Slo.parse("tpot=50ms", percent=99) == Slo(tpot=0.05, share=0.99)


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft=5", "ttft=5m", "ttft=0ms", "ttft=-1ms", "ttft=1s,ttft=1s", "a=1s", "ttft=1" + "0" * 309 + "s"],
)
def test_a_promise_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SetupError, match=r"ttft=500ms,tpot=50ms"):
        Slo.parse(text)


def test_a_refused_request_misses_every_promise() -> None:
    outcome = Outcome(first_tokens=[0.1] * 90 + [0.9] * 5, per_token=[0.01] * 95)
    slo = Slo(ttft=0.5, tpot=0.1, share=0.94)
    assert not Slo(ttft=0.5, tpot=0.1, share=0.9).misses(outcome)
    outcome.refusals["pool_saturated"] = 5
    assert slo.misses(outcome) == {"ttft": pytest.approx(0.9 / 0.5)}
    outcome.refusals["pool_saturated"] = 10
    assert slo.misses(outcome) == {"ttft": math.inf, "tpot": math.inf}


def test_answers_of_one_token_are_answers() -> None:
    """They have no time per token, and miss no promise of one."""
    slo = Slo(tpot=0.1)
    outcome = Outcome(first_tokens=[0.1] * 99, per_token=[])
    outcome.refusals["pool_saturated"] = 1
    assert slo.seen(outcome) == {"tpot": 0}
    outcome.per_token = [0.2]
    assert slo.seen(outcome) == {"tpot": 0.2}
    outcome.refusals["pool_saturated"] = 9
    assert slo.seen(outcome) == {"tpot": math.inf}


def test_quantiles_are_those_of_the_values() -> None:
    assert [quantile([3.0, 1.0, 2.0, 4.0], share) for share in (0, 0.25, 0.26, 0.5, 0.95, 1)] == [1, 1, 2, 2, 4, 4]
    assert quantile([], 0.5) == 0
