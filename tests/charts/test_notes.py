"""What Helm prints after an installation: the commands work without changes."""

import re

import pytest
import yaml

from motet.resources import LoRAAdapter, ServingPool, read_text
from tests.charts.helm import MOTET, NAMESPACE, RELEASE, helm, named, render


def notes(*options: str) -> str:
    said = helm("install", RELEASE, str(MOTET), f"--namespace={NAMESPACE}", "--dry-run=client", *options)
    return said.split("\nNOTES:\n", 1)[1]


def test_the_notes_begin_with_the_next_three_commands() -> None:
    assert re.findall(r"^(\d)\. ", notes(), re.MULTILINE) == ["1", "2", "3"]


def manifests_of(said: str) -> list[tuple[str, str]]:
    return re.findall(r"<<(\w+)\n(.*?)\n\1$", said, re.MULTILINE | re.DOTALL)


def test_their_manifests_are_handled_by_an_operator_with_a_class() -> None:
    for _, text in manifests_of(notes("--set=operator.class=staging")):
        assert yaml.safe_load(text)["metadata"]["labels"] == {"motet.dev/operator-class": "staging"}


def test_their_manifests_are_valid_for_the_first_pool_namespace() -> None:
    manifests = manifests_of(notes("--set=pools.namespaces={models,more}"))
    pool, adapter = (read_text(text) for _, text in manifests)
    assert [*pool.problems, *adapter.problems] == []
    (made,), (mine,) = pool.manifests, adapter.manifests
    assert isinstance(made.resource, ServingPool)
    assert isinstance(mine.resource, LoRAAdapter)
    assert made.resource.metadata.namespace == "models"
    assert str(mine.resource.group) == "models/base"


def test_the_notes_name_the_installed_gateway() -> None:
    (service,) = re.findall(r"port-forward service/(\S+) 8000:8000", notes())
    assert named(render(), "Service", service)["spec"]["ports"][0]["port"] == 8000


CAREFUL = (
    "--set=image.registry=registry.example",
    "--set=networkPolicy.apiServer.to[0].ipBlock.cidr=172.20.0.1/32",
)
"""Each of these options removes one warning about a default."""
OF_THE_DEFAULTS = (
    "image.registry is empty",
    "networkPolicy.apiServer.to names every address",
)


@pytest.mark.parametrize(("option", "sentence"), [*zip(CAREFUL, OF_THE_DEFAULTS, strict=True)], ids=OF_THE_DEFAULTS)
def test_they_warn_about_each_wide_default_until_it_is_set(option: str, sentence: str) -> None:
    assert f"WARNING: {sentence}" in notes(*(one for one in CAREFUL if one != option))


def test_they_do_not_warn_if_everything_is_set() -> None:
    assert "WARNING" not in notes(*CAREFUL)


def test_they_warn_about_names_in_metrics_that_every_pod_may_read() -> None:
    with_names = (*CAREFUL, "--set=metrics.names=200")
    assert "WARNING: metrics.names is set" in notes(*with_names)
    assert "(networkPolicy.enabled is false). Set networkPolicy.metrics" in notes(
        *with_names, "--set=networkPolicy.enabled=false"
    )
    prometheus = "--set=networkPolicy.metrics[0].namespaceSelector.matchLabels.team=prometheus"
    assert "WARNING" not in notes(*with_names, prometheus)


def test_they_warn_about_what_is_switched_off() -> None:
    assert "WARNING: tls.enabled is false" in notes(*CAREFUL, "--set=tls.enabled=false")
    assert "There is no database" in notes()
    assert "There is no database" not in notes("--set=database.existingSecret.name=postgres")
