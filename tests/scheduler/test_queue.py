from motet.domain import BASE, RequestId, Tenant
from motet.runner_info import RequestClass
from motet_scheduler.policy.queue import Queue
from motet_scheduler.policy.requests import Request
from tests.scheduler.builders import GROUP

INTERACTIVE, STANDARD, BATCH = RequestClass


class Line:
    """A queue and the requests in it, by name."""

    def __init__(self, max_passed_over=3):
        self.queue = Queue(max_passed_over)
        self.by_name = {}

    def add(self, name, *, age=0.0, tenant="acme", request_class=STANDARD):
        request = Request(
            id=RequestId(name),
            gateway="g0",
            tenant=Tenant(tenant),
            group=GROUP,
            digest=BASE,
            request_class=request_class,
            prompt_tokens=1,
            max_tokens=1,
            asked_at=100.0 - age,
            sequence=len(self.by_name),
        )
        self.by_name[name] = request
        self.queue.add(request)

    def names(self):
        return [request.id for request in self.queue]

    def oldest_of_each_tenant(self):
        found = []
        for _, class_queue in self.queue.class_queues():
            turn = 0
            while (head := class_queue.head(turn)) is not None:
                found.append(head.id)
                turn += 1
        return found


def test_the_more_urgent_class_comes_first_whatever_the_age():
    line = Line()
    line.add("old", age=60, request_class=BATCH)
    line.add("normal", request_class=STANDARD)
    line.add("urgent", request_class=INTERACTIVE)
    assert line.names() == ["urgent", "normal", "old"]


def test_inside_a_class_the_oldest_is_first_even_if_it_arrives_late():
    line = Line()
    line.add("young", age=1)
    line.add("moved here with its age", age=9)
    assert line.names() == ["moved here with its age", "young"]


def test_equal_ages_go_in_the_order_they_came():
    line = Line()
    for name in "abc":
        line.add(name)
    assert line.names() == ["a", "b", "c"]


def test_each_tenant_offers_only_its_oldest():
    line = Line()
    line.add("a1", age=9, tenant="a")
    line.add("a2", age=8, tenant="a")
    line.add("b1", age=7, tenant="b")
    assert line.oldest_of_each_tenant() == ["a1", "b1"]
    assert not line.queue.has_turn(line.by_name["a2"])


def test_a_tenants_next_request_is_ordered_by_its_own_age():
    line = Line()
    line.add("a1", age=9, tenant="a")
    line.add("a2", age=5, tenant="a")
    line.add("b1", age=7, tenant="b")
    line.queue.remove_placed(line.by_name["a1"])
    assert line.oldest_of_each_tenant() == ["b1", "a2"]


def test_removing_from_the_middle_keeps_the_others_in_order():
    line = Line()
    for name in "abcde":
        line.add(name)
    line.queue.remove(line.by_name["c"])
    assert line.names() == ["a", "b", "d", "e"]
    assert len(line.queue) == 4


def test_only_an_overdue_request_may_be_placed():
    line = Line(max_passed_over=2)
    line.add("patient", tenant="a")
    for n in range(3):
        line.add(f"quick{n}", tenant=f"b{n}")
    line.queue.remove_placed(line.by_name["quick0"])
    assert line.queue.overdue(STANDARD) is None
    line.queue.remove_placed(line.by_name["quick1"])
    assert line.queue.overdue(STANDARD) is line.by_name["patient"]
    line.queue.remove_placed(line.by_name["patient"])
    assert line.queue.overdue(STANDARD) is None


def test_more_urgent_requests_go_first_without_counting_as_a_pass():
    line = Line(max_passed_over=3)
    line.add("batch", request_class=BATCH)
    for n in range(9):
        line.add(f"chat{n}", request_class=INTERACTIVE)
        line.queue.remove_placed(line.by_name[f"chat{n}"])
    assert line.queue.passed_over(line.by_name["batch"]) == 0
    assert line.queue.overdue(BATCH) is None


def test_a_less_urgent_request_that_is_placed_first_counts_as_passing():
    line = Line(max_passed_over=2)
    line.add("large", request_class=INTERACTIVE)
    for n in range(2):
        line.add(f"small{n}", age=60, request_class=BATCH)
    line.queue.remove_placed(line.by_name["small0"])
    assert line.queue.overdue(BATCH) is None
    line.queue.remove_placed(line.by_name["small1"])
    assert line.queue.overdue(BATCH) is line.by_name["large"]


def test_an_overdue_request_only_holds_back_its_own_and_less_urgent_classes():
    line = Line(max_passed_over=1)
    line.add("large", tenant="a")
    line.add("small", tenant="b")
    line.queue.remove_placed(line.by_name["small"])
    assert line.queue.overdue(INTERACTIVE) is None
    assert line.queue.overdue(STANDARD) is line.queue.overdue(BATCH) is line.by_name["large"]


def test_an_earlier_less_urgent_placement_does_not_count_for_a_later_request():
    line = Line(max_passed_over=2)
    line.add("large", age=9, request_class=INTERACTIVE)
    line.add("small", age=8, request_class=BATCH)
    line.queue.remove_placed(line.by_name["small"])
    line.add("later", request_class=INTERACTIVE)
    assert line.queue.passed_over(line.by_name["large"]) == 1
    assert line.queue.passed_over(line.by_name["later"]) == 0


def test_placing_in_order_passes_no_request_over():
    line = Line(max_passed_over=1)
    for name in "abcd":
        line.add(name)
    for name in "abc":
        line.queue.remove_placed(line.by_name[name])
        assert line.queue.overdue(STANDARD) is None


def test_earlier_passes_do_not_count_for_a_later_request():
    line = Line(max_passed_over=2)
    line.add("first", age=9, tenant="a")
    line.add("quick", age=5, tenant="b")
    line.queue.remove_placed(line.by_name["quick"])
    line.add("later", tenant="c")
    assert line.queue.passed_over(line.by_name["first"]) == 1
    assert line.queue.passed_over(line.by_name["later"]) == 0
