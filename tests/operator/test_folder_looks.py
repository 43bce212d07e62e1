"""Looks at folders of which some do not answer."""

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import structlog

from motet.clock import monotonic
from motet_operator.local import folder_looks, pauses
from motet_operator.local.folder_looks import FolderLooks, ManyFolders
from motet_operator.local.manifest_folder import MISSING, stamp_of

MAX_SLOW, MAX_THREADS = 4, 10


class Volume:
    """Folders that do not answer until they are told to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.answers: dict[Path, threading.Event] = {}
        self.looks: list[Path] = []

    def folder(self, name: str, *, hangs: bool = False) -> Path:
        folder = self.root / name
        folder.mkdir()
        self.answers[folder] = threading.Event()
        if not hangs:
            self.answers[folder].set()
        return folder

    def stamp_of(self, folder: Path) -> str:
        self.looks.append(folder)
        self.answers[folder].wait()
        return stamp_of(folder)


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Volume]:
    volume = Volume(tmp_path)
    monkeypatch.setattr(folder_looks, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(folder_looks, "SLOW_SECONDS", 0.3)
    monkeypatch.setattr(folder_looks, "MAX_SLOW", MAX_SLOW)
    monkeypatch.setattr(folder_looks, "MAX_THREADS", MAX_THREADS)
    monkeypatch.setattr(folder_looks, "stamp_of", volume.stamp_of)
    yield volume
    for answers in volume.answers.values():
        answers.set()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def look(looks: ManyFolders, folders: Collection[Path]) -> None:
    looks.want(folders)
    await looks.look()


async def test_a_folder_that_does_not_answer_hides_no_changes_of_others(volume: Volume) -> None:
    folders = [volume.folder("a"), volume.folder("hangs", hangs=True), volume.folder("z")]
    changes: list[tuple[set[Path], bool]] = []
    with closing(ManyFolders("test", lambda: changes.append(({*looks.stamps}, bool(looks.problems))))) as looks:
        async with asyncio.timeout(10):
            await look(looks, folders)
        assert looks.stamps.keys() == {folders[0], folders[2]}
        assert [problem.place.file for problem in looks.problems] == [str(folders[1])]
        assert changes[0][0] == {folders[0]}, "it waits for none behind it"
        assert changes[-2:] == [({folders[0]}, True), ({folders[0], folders[2]}, True)]
        assert len(changes) <= 3
        before = looks.stamps[folders[2]]
        (folders[2] / "new").write_text("x")
        async with asyncio.timeout(10):
            await look(looks, folders)
        assert looks.stamps[folders[2]] != before
        assert volume.looks.count(folders[1]) == 1, "nobody looks there again"
        volume.answers[folders[1]].set()
        await until(lambda: not looks.problems)
        await look(looks, folders)
        assert looks.stamps.keys() == {*folders}


async def test_a_folder_that_no_longer_answers_stays_as_it_was(volume: Volume) -> None:
    folder = volume.folder("a")
    with closing(ManyFolders("test", lambda: None)) as looks:
        await look(looks, [folder])
        before = looks.stamps[folder]
        volume.answers[folder].clear()
        (folder / "new").write_text("x")
        await look(looks, [folder])
        assert looks.stamps == {folder: before}
        assert looks.problems
        await look(looks, [])
        assert not looks.stamps


async def test_a_volume_that_does_not_answer_costs_two_threads(volume: Volume) -> None:
    """Not one for each of its folders."""
    folders = [volume.folder(f"{number}") for number in range(20)]
    with closing(ManyFolders("test", lambda: None)) as looks:
        await look(looks, folders)
        for folder in folders:
            volume.answers[folder].clear()
        volume.looks.clear()
        await look(looks, folders)
        await look(looks, folders)
        assert (len(looks.problems), len(volume.looks)) == (2, 2)
        assert len(looks.stamps) == 20


async def test_many_folders_that_never_answered_keep_a_bounded_number_of_threads(volume: Volume) -> None:
    folders = [volume.folder(f"{number}", hangs=True) for number in range(MAX_SLOW + 3)]
    with closing(ManyFolders("test", lambda: None)) as looks:
        async with asyncio.timeout(10):
            await look(looks, folders)
            await look(looks, folders)
        assert len(volume.looks) == len(looks.problems) == MAX_SLOW
        for answers in volume.answers.values():
            answers.set()
        await until(lambda: not looks.problems)
        await look(looks, folders)
        assert len(looks.stamps) == len(folders)


async def test_however_many_folders_do_not_answer_the_changes_of_others_are_seen(volume: Volume) -> None:
    good = volume.folder("good")
    with closing(ManyFolders("test", lambda: None)) as looks:
        await look(looks, [good])
        before = looks.stamps[good]
        folders = [good, *(volume.folder(f"{number}", hangs=True) for number in range(MAX_SLOW + 1))]
        async with asyncio.timeout(10):
            await look(looks, folders)
            (good / "new").write_text("x")
            await look(looks, folders)
        assert looks.stamps[good] != before


async def test_folders_that_are_missing_are_on_no_common_volume(volume: Volume) -> None:
    folders = [volume.folder(f"{number}") for number in range(3)]
    for folder in folders:
        folder.rmdir()
    with closing(ManyFolders("test", lambda: None)) as looks:
        await look(looks, folders)
        for folder in folders:
            folder.mkdir()
        for folder in folders[:2]:
            volume.answers[folder].clear()
        await look(looks, folders)
        await look(looks, folders)
        assert [looks.stamps[folder] == MISSING for folder in folders] == [True, True, False]


async def test_a_folder_that_nobody_names_any_more_is_no_problem(volume: Volume) -> None:
    folders = [volume.folder(f"{number}", hangs=True) for number in range(MAX_SLOW)]
    with closing(ManyFolders("test", lambda: None)) as looks:
        await look(looks, folders)
        assert len(looks.problems) == MAX_SLOW
        good = volume.folder("good")
        async with asyncio.timeout(10):
            await look(looks, [good])
        assert not looks.problems
        assert looks.stamps.keys() == {good}


async def test_folders_that_nobody_names_any_more_keep_a_bounded_number_of_threads(volume: Volume) -> None:
    with closing(ManyFolders("test", lambda: None)) as looks:
        for change in range(4):
            await look(looks, [volume.folder(f"{change}-{number}", hangs=True) for number in range(MAX_SLOW)])
        assert len(volume.looks) == MAX_THREADS


async def test_a_folder_that_answers_late_is_not_taken_for_the_next_one(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers while somebody sees that it has taken too long."""
    late, next_one = (volume.folder(name, hangs=True) for name in ("late", "next"))
    began: list[float] = []
    """Of the looks, as the threads say it"""

    def clock() -> float:
        now = monotonic()
        if threading.current_thread() is not threading.main_thread():
            began.append(now)
        elif len(began) == 1 and now > began[0] + folder_looks.ANSWER_SECONDS:
            volume.answers[late].set()
            deadline = now + 0.2
            while next_one not in volume.looks and monotonic() < deadline:
                time.sleep(0.005)
        return now

    def changed() -> None:
        if any(problem.place.file == str(next_one) for problem in looks.problems):
            taken.append(monotonic() - began[-1])

    monkeypatch.setattr(folder_looks, "monotonic", clock)
    taken: list[float] = []
    with closing(ManyFolders("test", changed)) as looks:
        looking = asyncio.create_task(look(looks, [late, next_one]))
        await until(lambda: taken)
        assert taken[0] > folder_looks.ANSWER_SECONDS * 0.9
        await looking


async def test_a_folder_that_is_missing_is_seen_as_that(volume: Volume) -> None:
    folder = volume.folder("a")
    folder.rmdir()
    with closing(ManyFolders("test", lambda: None)) as looks:
        await look(looks, [folder])
        assert looks.stamps == {folder: MISSING}


async def test_logs_name_the_folder_that_did_not_answer(volume: Volume) -> None:
    """A look at the manifests looks at models, too."""
    model, named, answers = volume.root / "model", threading.Event(), threading.Event()
    with closing(FolderLooks("test", volume.root, lambda: None)) as looks:

        def look() -> None:
            looks.at = model
            named.set()
            answers.wait()
            looks.at = volume.root / "another"

        with structlog.testing.capture_logs() as logs:
            looking = asyncio.create_task(looks(look))
            for _ in range(3):  # the look is ordered
                await asyncio.sleep(0)
            assert named.wait(20)  # nobody sees meanwhile that it takes long: a thread may begin late
            await until(lambda: looks.problems)
            answers.set()
            await looking
        assert [(line["event"], line["path"]) for line in logs] == [
            ("folder_silent", str(model)),
            ("folder_answers", str(model)),
        ]
        await looks(lambda: None)
        assert looks.at == volume.root


@pytest.fixture
def patience(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks are slow long before their folders do not answer."""
    monkeypatch.setattr(folder_looks, "ANSWER_SECONDS", 60.0)


@pytest.mark.usefixtures("patience")
async def test_a_slow_folder_delays_no_other_and_is_seen_when_its_look_has_ended(volume: Volume) -> None:
    folders = [volume.folder("a"), volume.folder("slow", hangs=True), volume.folder("z")]
    with closing(ManyFolders("test", lambda: None)) as looks:
        for _ in range(2):
            async with asyncio.timeout(20):
                await look(looks, folders)
            await until(lambda: looks.stamps.keys() == {folders[0], folders[2]})  # a busy machine makes others slow
        assert volume.looks.count(folders[1]) == 1
        seen = asyncio.create_task(looks.each_seen())
        await asyncio.sleep(0)
        assert not seen.done()
        assert not looks.problems
        volume.answers[folders[1]].set()
        async with asyncio.timeout(20):
            await seen
        assert looks.stamps.keys() == {*folders}


async def test_a_folder_that_does_not_answer_is_told_although_nobody_waits_for_it(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_looks, "ANSWER_SECONDS", 1.0)
    folder, told = volume.folder("hangs", hangs=True), asyncio.Event()
    with closing(ManyFolders("test", told.set)) as looks:
        await look(looks, [folder])
        async with asyncio.timeout(20):
            await looks.each_seen()
        assert told.is_set()
        assert [problem.place.file for problem in looks.problems] == [str(folder)]
        told.clear()
        volume.answers[folder].set()
        await until(told.is_set)
        assert not looks.problems
        assert looks.stamps.keys() == {folder}


@pytest.mark.usefixtures("patience")
async def test_stamps_are_published_while_others_are_looked_at(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [volume.folder(f"{number}") for number in range(12)]

    def takes_a_while(folder: Path) -> str:
        time.sleep(0.2)
        return volume.stamp_of(folder)

    monkeypatch.setattr(folder_looks, "stamp_of", takes_a_while)
    begun: list[int] = []
    with closing(ManyFolders("test", lambda: begun.append(len(volume.looks)))) as looks:
        await look(looks, folders)
        await looks.each_seen()
    assert begun[0] < len(folders)


@pytest.mark.usefixtures("patience")
async def test_all_folders_of_a_slow_volume_have_their_turns(volume: Volume) -> None:
    folders = [volume.folder(f"{number}") for number in range(4)]
    with closing(ManyFolders("test", lambda: None)) as looks:
        await look(looks, folders)
        looked = []
        for _ in range(2):
            for folder in folders:
                volume.answers[folder].clear()
                (folder / f"new {len(looked)}").write_text("x")
            volume.looks.clear()
            before = dict(looks.stamps)
            await look(looks, folders)
            looked += volume.looks
            for folder in folders:
                volume.answers[folder].set()
            changed = {*volume.looks}
            await until(lambda changed=changed, before=before: all(looks.stamps[one] != before[one] for one in changed))
        assert sorted(looked) == folders


@pytest.mark.usefixtures("patience")
async def test_others_are_not_looked_at_more_often_for_a_change_whose_folder_is_slow(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, other = volume.folder("changes"), volume.folder("other")

    def stamp(folder: Path) -> str:
        volume.looks.append(folder)
        if folder == other:
            return "as before"
        if (count := volume.looks.count(changes)) > 2:
            volume.answers[changes].wait()
        return f"{count}"

    monkeypatch.setattr(folder_looks, "stamp_of", stamp)
    volume.answers[changes].clear()
    with closing(ManyFolders("test", lambda: None, quiet_seconds=0.03, poll_seconds=60.0)) as looks:
        looking = asyncio.create_task(looks.run())
        for count in (1, 2):
            looks.want([changes, other])
            await until(lambda count=count: volume.looks.count(other) >= count)
        await until(lambda: volume.looks.count(changes) == 3)
        await until(lambda: volume.looks.count(other) >= 3)
        count = volume.looks.count(other)
        await asyncio.sleep(0.5)
        assert volume.looks.count(other) == count
        looking.cancel()


async def test_looks_that_take_long_leave_most_of_a_core(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, spent = volume.folder("of thousands"), [0.0]

    def stamp(folder: Path) -> str:
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass
        spent[0] += 0.02
        return volume.stamp_of(folder)

    monkeypatch.setattr(folder_looks, "stamp_of", stamp)
    with closing(ManyFolders("test", lambda: None, poll_seconds=0.001)) as looks:
        looks.want([folder])
        began = monotonic()
        looking = asyncio.create_task(looks.run())
        await until(lambda: len(volume.looks) == 3)
        assert spent[0] < 0.1 * (monotonic() - began)
        monkeypatch.setattr(pauses, "AT_FOLDERS", pauses.Pause(1e9, 60.0))
        for count in (4, 5):  # who asks for a look waits for no pause
            looks.want([folder])
            await until(lambda count=count: len(volume.looks) == count)
        looking.cancel()
