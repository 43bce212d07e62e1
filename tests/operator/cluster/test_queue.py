import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_operator.cluster.work_queue import WorkQueue


def drained(queue: WorkQueue[str], now: float = 0.0) -> list[str]:
    found = []
    while (key := queue.pop(now)) is not None:
        found.append(key)
        queue.done(key)
    return found


def test_repeated_requests_for_a_key_are_done_once() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for _ in range(3):
        queue.add("a", "tenant")
    assert drained(queue) == ["a"]


def test_namespaces_take_turns_so_that_a_thousand_of_one_do_not_delay_the_first_of_another() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for number in range(1000):
        queue.add(f"large-{number}", "large")
    queue.add("small-0", "small")
    assert drained(queue)[:3] == ["large-0", "small-0", "large-1"]


def test_urgent_keys_come_before_all_namespaces() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for number in range(200):
        queue.add(f"status of {number}", f"tenant {number}")
    for number in range(2):
        queue.add(f"runners {number}", "pools", urgent=True)
    assert drained(queue)[:3] == ["runners 0", "runners 1", "status of 0"]


def test_a_request_during_the_work_repeats_it_once() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a", "tenant")
    assert queue.pop(0.0) == "a"
    queue.add("a", "tenant")
    assert queue.pop(0.0) is None
    queue.done("a")
    assert drained(queue) == ["a"]


def test_failed_work_waits_longer_each_time_up_to_a_maximum() -> None:
    queue: WorkQueue[str] = WorkQueue(first_wait=1.0, last_wait=8.0)
    queue.add("a", "tenant")
    now, waits = 0.0, []
    for _ in range(12):
        assert queue.pop(now) == "a"
        waits.append(queue.failed("a", now))
        queue.add("a", "tenant")
        assert queue.pop(now) is None
        assert queue.next_due() == pytest.approx(now + waits[-1])
        now += waits[-1]
    assert all(0.5 * 2.0**number <= wait <= 2.0**number for number, wait in enumerate(waits[:3]))
    assert all(4.0 <= wait <= 8.0 for wait in waits[4:])


def test_success_forgets_the_failures() -> None:
    queue: WorkQueue[str] = WorkQueue(first_wait=1.0)
    queue.add("a", "tenant")
    queue.pop(0.0)
    queue.failed("a", 0.0)
    assert queue.failures("a") == 1
    assert queue.pop(100.0) == "a"
    queue.done("a")
    assert queue.failures("a") == 0


def test_dropped_work_is_not_done_even_if_a_retry_is_due() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("waiting", "tenant")
    queue.pop(0.0)
    queue.failed("waiting", 0.0)
    queue.add("ready", "tenant")
    queue.drop("waiting")
    queue.drop("ready")
    assert queue.pop(1e6) is None
    assert len(queue) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "drop", "pop", "done", "failed"]), st.integers(0, 5)),
        max_size=60,
    )
)
def test_nothing_is_lost_and_nothing_is_done_twice_at_once(steps: list[tuple[str, int]]) -> None:
    queue: WorkQueue[int] = WorkQueue(first_wait=1.0)
    wanted: set[int] = set()
    busy: list[int] = []
    now = 0.0
    for step, key in steps:
        now += 1.0
        match step:
            case "add":
                queue.add(key, str(key % 2), urgent=key > 3)
                wanted.add(key)
            case "drop":
                queue.drop(key)
                wanted.discard(key)
            case "pop":
                if (popped := queue.pop(now)) is not None:
                    assert popped not in busy
                    busy.append(popped)
                    wanted.discard(popped)
            case "done" | "failed" if busy:
                finished = busy.pop()
                if step == "failed":
                    queue.failed(finished, now)
                    wanted.add(finished)
                else:
                    queue.done(finished)
    for key in busy:
        queue.done(key)
    assert wanted <= set(drained_ints(queue))


def drained_ints(queue: WorkQueue[int]) -> list[int]:
    found = []
    while (key := queue.pop(1e9)) is not None:
        found.append(key)
        queue.done(key)
    return found
