"""`engine.hostAdaptersMiB` reaches the runners, and a change of it rolls them."""

import pytest

from motet_operator.environment import runner_environment
from motet_operator.reconcile.revisions import revision_of, template_of
from tests.operator.builders import pool

NAME = "MOTET_RUNNER_HOST_ADAPTERS_MIB"


def revision(of):
    return revision_of(of.resource.object_name, template_of(of))


@pytest.mark.parametrize(("mib", "found"), [(None, None), (0, "0"), (512, "512")])
def test_runners_learn_how_much_host_memory_adapters_may_take(mib, found):
    one = pool(engine={} if mib is None else {"hostAdaptersMiB": mib})
    assert runner_environment("default/demo", "1", template_of(one)).get(NAME) == found
    assert (revision(one) == revision(pool())) is (mib is None)
