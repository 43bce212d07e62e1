"""This version and the one before run side by side, as during an upgrade and during a rollback."""

import asyncio
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

import motet_runner
from tests.stack.pods import GRACE_S, SERVICES, ServicesAsPods
from tests.support.previous_version import run_before, version_before

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

OTHERS = tuple(name for name in SERVICES if name != "runner")
TOKENS = 200


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return version_before(tmp_path_factory.mktemp("before"))


async def test_row_45_runners_of_each_version_serve_beside_services_of_the_other(tmp_path: Path, before: Path) -> None:
    """First this version's runner, then the other one's. All processes find what those before them have written."""
    pods, answers = ServicesAsPods(tmp_path), []
    for version, others in ((None, before), (before, None)):
        with ExitStack() as stack:
            for service in OTHERS:
                stack.enter_context(pods.running(service, others))
            async with pods.operator():
                answers.append(await served_by(pods, version))
    assert answers[0] == answers[1], "the two versions answer differently"
    assert_no_service_complains(pods)


@pytest.mark.parametrize(
    "others_are_old",
    [
        pytest.param(False, id="beside-this-version"),
        pytest.param(True, id="beside-the-version-before", marks=pytest.mark.soak),
    ],
)
async def test_row_45_runners_of_two_versions_serve_side_by_side_and_replace_each_other(
    tmp_path: Path, before: Path, others_are_old: bool
) -> None:
    pods = ServicesAsPods(tmp_path)
    versions = [None, before, None] if others_are_old else [before, None, before]
    with ExitStack() as stack:
        for service in OTHERS:
            stack.enter_context(pods.running(service, before if others_are_old else None))
        async with pods.operator():
            answers = [await served_by(pods, version) for version in versions]
    assert len({tuple(each) for each in answers}) == 1, "the two versions answer differently"
    assert_no_service_complains(pods)


async def served_by(pods: ServicesAsPods, version: Path | None) -> list[str]:
    """What a runner of the version answers. Before the next one starts, requests on this one finish."""
    with pods.running("runner", version) as runner:
        for service in SERVICES:
            await pods.until_ready(service)
        answers = [await pods.ask(model) for model in ("demo", "pirate")]
        received: list[str] = []
        async for text in pods.stream("pirate", tokens=TOKENS):
            if not received:
                runner.send_signal(signal.SIGTERM)
            received.append(text)
        assert await asyncio.to_thread(runner.wait, 20 + GRACE_S) == 0
    return [*answers, "".join(received)]


def assert_no_service_complains(pods: ServicesAsPods) -> None:
    for service in SERVICES:
        lines = pods.log(service).read_text().splitlines()
        assert [line for line in lines if "Traceback" in line or '"level": "error"' in line] == [], service


def test_the_previous_version_has_other_code(before: Path) -> None:
    """Otherwise the tests in this file would prove nothing."""
    asked = run_before(before, "-c", "import motet_runner; print(motet_runner.__file__)")
    assert Path(asked.stdout.strip()).parent == before / "motet_runner", asked
    ours = Path(motet_runner.__file__).parent
    assert (before / "motet_runner" / "service.py").read_text() != (ours / "service.py").read_text()
