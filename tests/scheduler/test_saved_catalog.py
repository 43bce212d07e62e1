"""What the scheduler saves to disk, and how a successor starts from it."""

import pytest
from prometheus_client import CollectorRegistry

from motet.leadership import LocalLeadership
from motet.runner_info import Failure
from motet.settings import LeaseSettings, ProcessSettings
from motet_scheduler.__main__ import catalog_file
from motet_scheduler.catalog_file import CatalogFile
from motet_scheduler.metrics import Metrics
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.catalog import SavedCatalog
from motet_scheduler.policy.values import SchedulerConfig
from motet_scheduler.service import SchedulerService
from tests.scheduler.builders import PIRATE, SchedulerDriver, adapter, entry, pool, ready, resident
from tests.support.surroundings import REAL, with_clock


def saved(**how):
    driver = ready()
    driver.attach("r0")
    driver.attach("r1")
    driver.state(adapter(), pools=(pool(**how),))
    driver.certify()
    return driver.scheduler.catalog_to_save()


def test_a_saved_catalog_is_read_back_unchanged(tmp_path):
    file = CatalogFile(tmp_path / "scheduler" / "catalog.json", REAL.disk)
    assert file.read(5) is None
    assert file.write(saved(), 4)
    assert file.read(5) == saved()


def test_a_catalog_from_before_another_scheduler_led_is_not_used(tmp_path):
    file = CatalogFile(tmp_path / "catalog.json", REAL.disk)
    assert file.write(saved(), 4)
    assert [file.read(term) for term in (4, 6, 7)] == [None, None, None]


def test_an_invalid_catalog_file_is_ignored(tmp_path):
    for content in (
        "",
        "{",
        "[]",
        '{"version": 2}',
        '{"version": 99, "term": 1, "remembered": {}}',
        '{"version": 2, "term": 1}',
        '{"version": 2, "term": 1, "remembered": 7}',
        '{"version": 2, "term": "1", "remembered": {}}',
        '{"version": 2, "remembered": {}}',
    ):
        (tmp_path / "catalog.json").write_text(content)
        assert CatalogFile(tmp_path / "catalog.json", REAL.disk).read(2) is None, content
    (tmp_path / "catalog.json").write_text('{"version": 2, "term": 1, "remembered": {}}')
    assert CatalogFile(tmp_path / "catalog.json", REAL.disk).read(2) == SavedCatalog()


def test_a_failed_write_of_the_catalog_is_no_error(tmp_path):
    (tmp_path / "in the way").write_text("")
    assert not CatalogFile(tmp_path / "in the way" / "catalog.json", REAL.disk).write(saved(), 1)


def test_after_a_failed_write_there_is_no_old_catalog_of_the_same_term(tmp_path):
    file = CatalogFile(tmp_path / "catalog.json", REAL.disk)
    assert file.write(saved(), 1)
    (tmp_path / "catalog.new").mkdir()
    assert not file.write(SavedCatalog(), 1)
    assert file.read(2) is None


class ServiceDriver(SchedulerDriver):
    """It sends each event to a scheduler's service with a catalog file, and without peers."""

    def __init__(self, folder, leadership, disk=REAL.disk):
        super().__init__()
        self._file = CatalogFile(folder / "catalog.json", disk)
        self._successor_term = leadership.term + 1
        self._service = SchedulerService(
            SchedulerConfig(),
            leadership=leadership,
            metrics=Metrics(CollectorRegistry()),
            supervisor_address=f"unix:{folder}/supervisor.sock",
            catalog_file=self._file,
            surroundings=with_clock(self.clock),
        )
        self.scheduler = self._service.scheduler

    def send(self, event):
        self._service.handle(event)
        return self.note(self.scheduler.state.effects)

    def save(self, seconds=1.0):
        self.clock.advance(seconds)
        self._service.tick()

    def for_successor(self):
        return self._file.read(self._successor_term)


@pytest.fixture
def driver(tmp_path):
    with LocalLeadership(tmp_path / "term", REAL) as alone:
        yield ServiceDriver(tmp_path, alone)


def test_a_file_that_lacks_what_gateways_have_heard_goes_until_the_next_one_is_written(driver):
    """Else a successor would serve what was there before, after gateways have served what is there now."""
    driver.state(adapter())
    driver.save()
    assert [one.spec for one in driver.for_successor().adapters] == [adapter()]
    driver.state()
    assert driver.for_successor() is None
    driver.save()
    assert driver.for_successor().adapters == ()


class SlowDisk(type(REAL.disk)):
    def __init__(self, seconds):
        self._seconds = seconds

    def replace(self, path, content):
        self.clock.advance(self._seconds)
        super().replace(path, content)


@pytest.mark.parametrize(("takes", "not_yet", "then"), [(0.05, 2.0, 0.5), (5.0, 4.5, 1.0)])
def test_what_takes_long_to_save_is_not_saved_all_the_time(tmp_path, takes, not_yet, then):
    """Thousands of adapters that come together change the catalog all the time. The pause has a bound."""
    disk = SlowDisk(takes)
    with LocalLeadership(tmp_path / "term", REAL) as alone:
        driver = ServiceDriver(tmp_path, alone, disk)
        disk.clock = driver.clock
        driver.state(adapter())
        driver.save()
        driver.state()
        driver.save(not_yet)
        assert driver.for_successor() is None
        driver.save(then)
        assert driver.for_successor().adapters == ()


def test_a_file_without_the_revision_that_gateways_have_heard_of_goes(driver):
    driver.state(adapter())
    driver.attach()
    driver.save()
    driver.certify()
    assert driver.for_successor() is None
    driver.save()
    assert [one.serving.digest for one in driver.for_successor().adapters] == [PIRATE]


def test_a_check_that_fails_leaves_the_file(driver):
    """A tenant may have an adapter whose checks fail all the time."""
    driver.state(adapter())
    driver.attach()
    driver.certify()
    driver.state(adapter(stamp="2"))
    driver.save()
    driver.certify(certificate=None, failure=Failure("adapter_invalid", "no"))
    assert driver.scheduler.adapters.by_name[adapter().ref.object].failure is not None
    assert [one.serving.digest for one in driver.for_successor().adapters] == [PIRATE]


def test_a_file_with_another_base_model_than_gateways_have_heard_of_goes(driver):
    driver.state()
    driver.attach()
    driver.save()
    driver.detach()
    assert driver.for_successor() is not None
    driver.attach(incarnation="2", base="sha256:another")
    assert driver.for_successor() is None


def test_a_file_stays_when_all_runners_go_as_when_the_scheduler_stops(driver):
    """Its streams end before it does."""
    driver.state(adapter())
    driver.attach("r0")
    driver.attach("r1")
    driver.certify()
    driver.save()
    saved = driver.for_successor()
    assert saved.runners == ("r0", "r1")
    driver.detach("r0")
    driver.detach("r1")
    assert driver.for_successor() == saved


def test_where_a_lease_decides_who_leads_no_catalog_is_saved(tmp_path):
    process = ProcessSettings(data_dir=tmp_path)
    assert catalog_file(LeaseSettings(name="scheduler", namespace="motet"), process, REAL) is None
    assert catalog_file(LeaseSettings(), process, REAL) is not None


def test_a_new_scheduler_places_nothing_before_known_runners_report():
    driver = SchedulerDriver(saved=saved(), startup_wait=0.5)
    driver.gateway()
    driver.enqueue("a", digest=PIRATE)
    assert driver.of(effects.SendPosition)[0].why.startswith("the scheduler has just started")
    driver.attach("r0", live=(entry("x", 3),))
    assert driver.where("a") == ""
    driver.attach("r1")
    assert driver.where("a") == "r0", "the fullest"


def test_the_wait_for_known_runners_has_a_limit():
    driver = SchedulerDriver(saved=saved(), startup_wait=0.5)
    driver.gateway()
    driver.attach("r0")
    driver.enqueue("a")
    driver.wait(0.4)
    assert driver.where("a") == ""
    driver.wait(0.2)
    assert driver.where("a") == "r0"


def test_without_a_saved_catalog_requests_are_placed_at_once():
    driver = SchedulerDriver(saved=SavedCatalog())
    driver.gateway()
    driver.attach()
    driver.enqueue("a")
    assert driver.where("a") == "r0"


def test_the_catalog_is_published_once_all_known_runners_report():
    driver = SchedulerDriver(saved=saved(), startup_wait=0.5)
    driver.gateway()
    assert not driver.of(effects.PublishCatalog)
    driver.attach("r0")
    assert not driver.of(effects.PublishCatalog)
    driver.attach("r1")
    (publish,) = driver.of(effects.PublishCatalog)
    assert publish.catalog.adapters[0].digest == PIRATE
    assert len(publish.catalog.groups[0].runners) == 2


def reports_after(driver, *attached):
    """How many runners hold the adapter, as a new operator is told at once and after each runner and second."""
    told = [driver.send(events.OperatorConnected())]
    driver.state(adapter(), pools=(pool(replicas=2),))
    for instance in attached:
        told.append(driver.attach(instance, resident=resident(PIRATE)))
        told.append(driver.wait(0.1))
    told += [driver.wait(1) for _ in range(11)]
    return [len(one.replicas) for some in told for one in some if isinstance(one, effects.ReportAdapter)]


def test_an_adapter_of_the_file_is_not_said_to_be_nowhere_while_runners_may_come():
    held = saved(replicas=2)
    assert reports_after(SchedulerDriver(saved=held), "r0", "r1") == [1, 2]
    assert reports_after(SchedulerDriver(saved=held)) == [0], "no runner came back"


def test_namespaces_are_saved_and_published_by_a_successor(tmp_path):
    driver = ready()
    driver.send(events.CatalogReplaced((pool(),), (), (("acme", "first"),)))
    file = CatalogFile(tmp_path / "catalog.json", REAL.disk)
    assert file.write(driver.scheduler.catalog_to_save(), 1)
    successor = SchedulerDriver(saved=file.read(2))
    successor.gateway()
    successor.attach()
    assert successor.scheduler.catalog is not None
    assert successor.scheduler.catalog.namespaces == (("acme", "first"),)
