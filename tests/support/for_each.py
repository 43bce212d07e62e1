"""`for_each` is `pytest.mark.parametrize` with one test for all cases: they share its fixtures, such as a gateway. Its
start takes longer than most questions to it. For cases that change nothing."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

Test = Callable[..., Awaitable[None]]


def for_each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    every = [dict(zip(names, case, strict=True)) if isinstance(names, tuple) else {names: case} for case in cases]
    assert every

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        async def of_all(**fixtures: Any) -> None:
            for case in every:
                try:
                    await test(**fixtures, **case)
                except BaseException as error:
                    error.add_note(f"In the case {case!r:.1000}")
                    raise

        signature = inspect.signature(test)
        fixtures = [one for name, one in signature.parameters.items() if name not in every[0]]
        of_all.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return of_all

    return decorate
