"""What telling of one adapter costs, when many others have replaced revisions that requests use."""

from time import thread_time

from motet.domain import Digest
from motet_scheduler.policy.adapters import Revision
from tests.scheduler.builders import adapter, ready


def cost(retired: int) -> float:
    adapters = ready().scheduler.state.adapters
    for number in range(retired):
        spec = adapter(f"a{number}")
        adapters.restore(spec, Revision(key=spec.revision, digest=Digest(f"sha256:{number:064x}")))
    adapters.state(())
    assert len(adapters.retired) == retired
    adapters.restore(adapter(), None)
    (one,) = adapters
    begin = thread_time()
    for _ in range(200):
        adapters.report(one)
    return thread_time() - begin


def test_telling_of_an_adapter_does_not_look_at_the_retired_revisions_of_all_others() -> None:
    few, many = (min(cost(retired) for _ in range(3)) for retired in (1, 2000))
    assert many < 5 * few
