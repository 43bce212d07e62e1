import pytest

from tests.support.runners import short_folder


@pytest.fixture
def folder():
    with short_folder() as path:
        yield path
