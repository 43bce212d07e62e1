"""Workloads that laws make: Punica's popularity (PU-25), and ServeGen's clients."""

from collections import Counter
from io import StringIO
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, stdev

import pytest

from motet.errors import SetupError
from motet_simulator.lines import MAX_TOKENS
from motet_simulator.workloads import jsonl
from motet_simulator.workloads.jsonl import write
from motet_simulator.workloads.popularity import Law, adapters_of, choices
from motet_simulator.workloads.punica import Made, make
from motet_simulator.workloads.servegen import HOUR, LEVELS, servegen
from motet_simulator.workloads.traces import read


def test_a_thousand_requests_have_punicas_numbers_of_adapters() -> None:
    assert [adapters_of(law, 1000) for law in (Law.DISTINCT, Law.UNIFORM, Law.SKEWED, Law.IDENTICAL)] == [
        1000, 32, 16, 1,
    ]  # fmt: skip


def test_each_law_has_its_popularity() -> None:
    def shares(law: Law, adapters: int) -> list[float]:
        seen = Counter(islice(choices(law, adapters, seed=1), 20_000))
        return [count / 20_000 for _, count in seen.most_common()]

    distinct = Counter(islice(choices(Law.DISTINCT, 50, 1), 1000))
    assert set(distinct.values()) == {20}
    uniform = shares(Law.UNIFORM, 32)
    assert len(uniform) == 32
    assert uniform[0] < 1.3 * uniform[-1]
    skewed = shares(Law.SKEWED, 16)
    assert skewed[0] == pytest.approx(1 / 3, abs=0.02)
    assert skewed[0] / skewed[1] == pytest.approx(1.5, abs=0.1)
    assert shares(Law.IDENTICAL, 9) == [1.0]
    zipf = shares(Law.ZIPF, 10_000)
    assert zipf[0] == pytest.approx(1 / 9.79, abs=0.01)
    assert len(zipf) > 2000


def test_a_workload_that_is_made_has_its_rate_and_its_lengths() -> None:
    requests = list(make(Made(requests=4000, rate=20.0, law=Law.SKEWED, seed=3)))
    assert requests[-1].at == pytest.approx(200, rel=0.1)
    assert fmean(one.prompt_tokens for one in requests) == pytest.approx(19.3, rel=0.1)
    assert fmean(one.output_tokens for one in requests) == pytest.approx(58.45, rel=0.1)
    assert 12 <= len({one.adapter for one in requests}) <= adapters_of(Law.SKEWED, 4000) == 19
    assert requests == list(make(Made(requests=4000, rate=20.0, law=Law.SKEWED, seed=3)))
    assert requests != list(make(Made(requests=4000, rate=20.0, law=Law.SKEWED, seed=4)))


def test_what_is_made_can_be_read(tmp_path: Path) -> None:
    made = Made(requests=50, rate=1.0, law=Law.ZIPF, prompt=MAX_TOKENS, output=MAX_TOKENS, most_output=MAX_TOKENS)
    with (tmp_path / "workload").open("w") as file:
        assert write(make(made), file) == 50
    assert max(row.prompt_tokens or 0 for row in read(tmp_path / "workload")) == MAX_TOKENS


def test_no_more_requests_are_written_than_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_ROWS", 50)
    assert write(make(Made(requests=50, rate=1.0, law=Law.ZIPF)), StringIO()) == 50
    with pytest.raises(SetupError, match=r"at most 50 requests"):
        write(make(Made(requests=51, rate=1.0, law=Law.ZIPF)), StringIO())


HOURS = (
    "category,model,client,hour,rate_per_s,cv,pattern,p1,p2\n"
    "reason,r1,0,5,1.0,3.0,Gamma,0.2,9\nreason,r1,1,5,0.5,1.0,Weibull,1.0,9\nreason,r1,1,6,0.5,1.0,Weibull,1.0,9\n"
    "reason,r1,2,5,9.0,1.0,Gamma,1.0,9\nlanguage,small,0,5,9.0,1.0,Gamma,1.0,9\n"
)


def lengths(client: int, field: str, low: int, high: int) -> str:
    quantiles = [low + (high - low) * level for level in LEVELS]
    return f'{{"model": "r1", "client": {client}, "field": "{field}", "quantiles": {quantiles}}}\n'


def files(folder: Path, hours: str = HOURS, more: str = "") -> tuple[Path, Path]:
    (folder / "hours").write_text(hours)
    text = "".join(
        lengths(client, "input_tokens", 10, 20) + lengths(client, "output_tokens", 100, 200) for client in (0, 1)
    )
    (folder / "lengths").write_text(text + more)
    return folder / "hours", folder / "lengths"


def test_servegens_clients_ask_at_their_rates_with_their_spread(tmp_path: Path) -> None:
    requests = list(servegen(*files(tmp_path), model="r1", first_hour=5, hours=2))
    assert [one.at for one in requests] == sorted(one.at for one in requests)
    tenants = Counter(one.tenant for one in requests)
    assert tenants.keys() == {"client-0", "client-1"}, "a client without lengths is left out"
    assert tenants["client-0"] == pytest.approx(1.0 * HOUR, rel=0.15)
    assert tenants["client-1"] == pytest.approx(0.5 * 2 * HOUR, rel=0.15)
    assert all(10 <= one.prompt_tokens <= 20 and 100 <= one.output_tokens <= 200 for one in requests)
    assert fmean(one.output_tokens for one in requests) == pytest.approx(150, rel=0.05)
    times = [one.at for one in requests if one.tenant == "client-0"]
    gaps = [after - before for before, after in pairwise(times)]
    assert stdev(gaps) / fmean(gaps) == pytest.approx(0.2**-0.5, rel=0.2), "a Gamma law of shape 0.2"
    tenth = list(servegen(*files(tmp_path), model="r1", first_hour=5, hours=2, rate_factor=0.1))
    assert len(tenth) == pytest.approx(len(requests) / 10, rel=0.35)


@pytest.mark.parametrize(
    ("hours", "more", "says"),
    [
        (HOURS + "reason,r1,0,6,-1,1,Gamma,1,1\n", "", "line 7: rate_per_s is '-1'"),
        (HOURS + "reason,r1,0,6,0,1,Gamma,1,1\n", "", "line 7: a rate must be at least 1e-09, and a shape 0.01"),
        (HOURS + "reason,r1,0,6,1,1,Weibull,1e-9,1\n", "", "line 7: a rate must be at least 1e-09, and a shape 0.01"),
        (HOURS, '{"model": "r1", "client": 0, "field": "output_tokens", "quantiles": [2, 1]}', "line 5: quantiles"),
        (HOURS, lengths(0, "input_tokens", 1, 10**30), "line 5: quantiles must be 16 numbers from 0 to 16777216"),
        ("model,client\n", "", "has no"),
        (HOURS.replace("r1", "r2"), "", "There is r2, small"),
    ],
)
def test_what_cannot_be_right_is_refused(hours: str, more: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError) as refused:
        list(servegen(*files(tmp_path, hours, more), model="r1", first_hour=5, hours=2))
    assert says in refused.value.message
