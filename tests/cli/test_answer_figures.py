"""What `motet status` says about answers, from the gateway's metrics."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from motet.api.v1 import common_pb2
from motet.clock import FakeClock
from motet.time_split import TimePart, TimeSplit
from motet_cli import status
from motet_cli.answer_figures import COLUMNS, figures_of, read_figures, row, weights_made
from motet_gateway.answers.metrics import AnswerMetrics
from motet_gateway.choice_record import ChoiceRecord

ESTIMATE = common_pb2.Estimate(q50=10, q80=20, q90=30, q95=40)


def text(names: int) -> str:
    """Of two tenants: three answers and one."""
    registry = CollectorRegistry()
    metrics = AnswerMetrics(registry, clock=FakeClock(), names=names)
    for tenant, tokens in (("acme", 10), ("acme", 30), ("acme", 70), ("beta", 20)):
        split = TimeSplit(TimePart.QUEUE, 0)
        split.enter(TimePart.GENERATION, 1)
        record = ChoiceRecord(split, promised_tokens=64, parks=tokens == 70)
        metrics.count(tenant, record, now=4, prompt_tokens=4, answer_tokens=tokens, estimate=ESTIMATE)
    return generate_latest(registry).decode()


def test_the_figures_of_all_tenants_are_one_row_unless_metrics_may_name_them():
    (all_of_them,) = figures_of(text(names=0))
    assert all_of_them["tenant"] == ""
    assert row(all_of_them) == ["(all)", "25.0 %", "75.0 %", "0.0 %", "0.0 %", "48.0 %", "25.0 %", "75.0 %", "1"]
    assert [one["tenant"] for one in figures_of(text(names=9))] == ["acme", "beta"], "the busiest first"


def test_the_json_has_numbers_and_no_shares():
    (acme, _) = figures_of(text(names=9))
    assert acme == {
        "tenant": "acme",
        "seconds": {"queue": 3.0, "generation": 9.0, "penalty": 0.0, "overhead": 0.0},
        "covered": {"q50": 1.0, "q80": 1.0, "q90": 2.0, "q95": 2.0},
        "promised_tokens": 192,
        "unused_tokens": 51 + 31,
        "exceeded_tokens": 9,
        "promises": 3,
        "promises_exceeded": 1,
        "judged": 3,
        "parks": 1,
    }


@pytest.mark.parametrize("said", ["", "motet_promises_total{ 7 7", 'motet_request_split_seconds_total{other="x"} 1\n'])
def test_metrics_of_another_version_are_no_error(said):
    assert figures_of(said) == []


def test_a_gateway_or_predictor_that_does_not_answer_is_no_error(tmp_path):
    assert read_figures(tmp_path / "gateway.metrics.sock") == []
    assert weights_made(tmp_path / "predictor.metrics.sock") is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("motet_predictor_weights_made_seconds 1.7e9", "2023-11-14T22:13:20Z"),
        ("motet_predictor_weights_made_seconds 0", None),
        ("motet_other 1", None),
        ("motet_other{ 7 7", None),
    ],
)
def test_the_age_of_the_predictors_weights(monkeypatch, tmp_path, capsys, text, shown):
    async def read(_path):
        return text + "\n"

    monkeypatch.setattr("motet_cli.answer_figures.read_metrics", read)
    assert weights_made(tmp_path) == shown
    document = {"services": [], "runners": [], "pools": [], "adapters": [], "problems": [], "url": "", "answers": []}
    status.print_status(document | {"weights_made": shown}, [])
    assert capsys.readouterr().out == (f"Lengths are estimated with weights of {shown}.\n" if shown else "")


def test_the_table_has_a_column_for_each_part(capsys):
    document = {"services": [], "runners": [], "pools": [], "adapters": [], "problems": [], "url": ""}
    status.print_status(document | {"answers": figures_of(text(names=0))}, [])
    header, line = capsys.readouterr().out.splitlines()
    assert header.split("   ")[0] == "tenant"
    assert line.split()[0] == "(all)"
    assert len(COLUMNS) == len(row(figures_of(text(names=0))[0]))
