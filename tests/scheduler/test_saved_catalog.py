"""What the scheduler saves to disk, and how a successor starts from it."""

from motet_scheduler.catalog_file import CatalogFile
from motet_scheduler.policy import effects
from motet_scheduler.policy.catalog import SavedCatalog
from tests.scheduler.builders import PIRATE, SchedulerDriver, adapter, entry, ready


def saved():
    driver = ready()
    driver.attach("r0")
    driver.attach("r1")
    driver.state(adapter())
    driver.certify()
    return driver.scheduler.catalog_to_save()


def test_what_is_written_is_read_back_the_same(tmp_path):
    file = CatalogFile(tmp_path / "scheduler" / "catalog.json")
    assert file.read() is None
    assert file.write(saved())
    assert file.read() == saved()


def test_a_file_that_makes_no_sense_is_left_aside(tmp_path):
    for content in (
        "",
        "{",
        "[]",
        '{"version": 1}',
        '{"version": 99, "remembered": {}}',
        '{"version": 1, "remembered": 7}',
    ):
        (tmp_path / "catalog.json").write_text(content)
        assert CatalogFile(tmp_path / "catalog.json").read() is None


def test_a_disk_that_takes_nothing_is_not_the_end(tmp_path):
    (tmp_path / "in the way").write_text("")
    assert not CatalogFile(tmp_path / "in the way" / "catalog.json").write(saved())


def test_a_successor_places_nothing_before_the_runners_that_were_there_have_spoken():
    driver = SchedulerDriver(saved=saved(), startup_wait=0.5)
    driver.gateway()
    driver.enqueue("a", digest=PIRATE)
    assert driver.of(effects.SendPosition)[0].why.startswith("the scheduler has just started")
    driver.attach("r0", live=(entry("x", 3),))
    assert driver.where("a") == ""
    driver.attach("r1")
    assert driver.where("a") == "r0", "the fullest"


def test_it_does_not_wait_longer_than_it_takes_to_settle():
    driver = SchedulerDriver(saved=saved(), startup_wait=0.5)
    driver.gateway()
    driver.attach("r0")
    driver.enqueue("a")
    driver.wait(0.4)
    assert driver.where("a") == ""
    driver.wait(0.2)
    assert driver.where("a") == "r0"


def test_with_nothing_remembered_there_is_nothing_to_wait_for():
    driver = SchedulerDriver(saved=SavedCatalog())
    driver.gateway()
    driver.attach()
    driver.enqueue("a")
    assert driver.where("a") == "r0"


def test_the_catalog_goes_out_once_it_is_whole():
    driver = SchedulerDriver(saved=saved(), startup_wait=0.5)
    driver.gateway()
    assert not driver.of(effects.PublishCatalog)
    driver.attach("r0")
    assert not driver.of(effects.PublishCatalog)
    driver.attach("r1")
    (publish,) = driver.of(effects.PublishCatalog)
    assert publish.catalog.adapters[0].digest == PIRATE
    assert len(publish.catalog.groups[0].runners) == 2
