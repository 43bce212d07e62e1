import pytest

from tests.support.in_process_runner import short_folder


@pytest.fixture
def folder():
    with short_folder() as path:
        yield path
