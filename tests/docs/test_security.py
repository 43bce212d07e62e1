"""What the page on security says of rights and holes is what the chart makes; that is tested in tests/charts."""

import re

from testbed.tree import ROOT
from tests.charts.test_rbac import OPERATOR, POOLS, SCHEDULER, Right
from tests.docs.pages import DOCS, rows

PAGE = DOCS / "security.md"
WHERE = {"all namespaces": "*", "pool namespaces": POOLS, "release namespace": "motet-system"}
NAMES = {
    "gateways": "gateway",
    "runners": "runner",
    "operator": "operator",
    "scheduler": "scheduler",
    "schedulers": "scheduler",
}


def held_by(who: str) -> set[Right]:
    return {
        (WHERE[where], _as_the_chart(what), verb.strip())
        for name, where, whats, verbs in rows(PAGE, "What may be done with the API server")
        if name == who
        for what in whats.split(",")
        for verb in verbs.split(",")
    }


def _as_the_chart(what: str) -> str:
    """`deployments.apps` is apps/deployments there, and a name comes behind `=`."""
    kind, _, name = what.strip().partition(" ")
    plural, _, rest = kind.partition(".")
    group, _, subresource = rest.partition("/")
    return f"{group}/{plural}" + (f"/{subresource}" if subresource else "") + (f"={name}" if name else "")


def test_the_permissions_are_those_of_the_chart() -> None:
    assert held_by("operator") == OPERATOR
    assert held_by("scheduler") == SCHEDULER


def test_the_callers_of_each_port_are_those_of_the_network_policies() -> None:
    template = (ROOT / "charts/motet/templates/networkpolicies.yaml").read_text()
    calls = {(caller, called) for caller, called in re.findall(r"{from: (\w+), to: (\w+)}", template)}
    said = {
        (NAMES[caller.strip()], called)
        for called, _, callers in rows(PAGE, "Network")
        if called in ("scheduler", "predictor", "supervisor", "runner")
        for caller in callers.split(",")
    }
    assert said == {call for call in calls if call != ("test", "gateway")}
