"""Sends the same long sequence of events to a scheduler and a supervisor in every process, and prints all effects.

It is a process of its own because the effects must not depend on the seed of Python's hashes: `test_replay` starts
several."""

from random import Random

from motet.domain import BASE, Digest, InstanceName, RequestId
from motet.runner_info import RequestClass, SequenceState, Tier
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.values import Promise
from tests.scheduler.builders import SchedulerDriver, adapter, entry, pool
from tests.supervisor import builders as supervised

ROUNDS = 300
NAMES = tuple(f"a{n}" for n in range(12))
RUNNERS = ("r0", "r1", "r2")


def digest_of(name: str) -> Digest:
    return Digest(f"sha256:{int(name[1:]):064}")


def scheduler_story(chance: Random) -> None:
    driver = SchedulerDriver(max_passed_over=4, timelines=20)
    say = lambda decided: print(*decided, sep="\n")  # noqa: E731
    driver.gateway()
    driver.send(events.SupervisorConnected())
    for n, name in enumerate(RUNNERS):
        driver.attach(name, pages=40 + 8 * n, max_sequences=6, adapter_slots=4)
    running: dict[str, effects.SendPlaced] = {}
    for n in range(ROUNDS):
        match chance.randrange(8):
            case 0:
                wanted = chance.sample(NAMES, chance.randrange(len(NAMES)))
                say(driver.state(*(adapter(name, min_replicas=int(name[1:]) % 3) for name in wanted), pools=(pool(),)))
                for order in [one for one in driver.effects if isinstance(one, effects.EnsureAdapter)]:
                    if order.stage == 2:
                        say(driver.certify(order.ref.name, digest_of(order.ref.name), instance=order.instance))
            case 1 | 2 | 3:
                digest = chance.choice([BASE, *map(digest_of, NAMES)])
                how = {"tenant": chance.choice("abcd"), "request_class": chance.choice(list(RequestClass))}
                say(driver.enqueue(f"q{n}", max_tokens=chance.randrange(16, 300), digest=digest, deadline=4.0, **how))
            case 4 if running:
                place = running.pop(chance.choice(sorted(running)))
                say(driver.finish(place.request, place.epoch))
            case 5 if running:
                place = running.pop(chance.choice(sorted(running)))
                say(
                    driver.send(events.RequestParked(place.instance, RequestId(place.request), place.epoch, Promise(4)))
                )
            case 6:
                name = chance.choice(RUNNERS)
                here = [one for one in running.values() if one.instance == name]
                live = tuple(entry(one.request, one.promise.pages, epoch=one.epoch) for one in here)
                found = {digest_of(one): Tier.DEVICE for one in chance.sample(NAMES, 4)}
                say(driver.report(name, *live, resident=found))
            case 7:
                name = InstanceName(chance.choice(RUNNERS))
                say(
                    driver.send(
                        events.RunnerUnhealthy(driver.scheduler.runners[name].identity, "still", chance.random() < 0.5)
                    )
                )
        running |= {effect.request: effect for effect in driver.effects if isinstance(effect, effects.SendPlaced)}
        say(driver.wait(chance.choice((0.0, 0.1, 1.5))))


def supervisor_story(chance: Random) -> None:
    driver = supervised.SupervisorDriver()
    pages = dict.fromkeys((f"s{n}" for n in range(10)), 4)
    driver.connect(pages=40)
    for _ in range(ROUNDS):
        live = [
            supervised.entry(
                name,
                held,
                used=chance.choice((held, max(1, held // 2))),
                state=SequenceState.DECODE,
                request_class=RequestClass(1 + int(name[1:]) % 3),
            )
            for name, held in pages.items()
            if chance.random() < 0.9
        ]
        decided = driver.report(*live)
        print(*decided, sep="\n")
        driver.wait(chance.choice((0.1, 3.0)))
        print(*driver.effects, sep="\n")


if __name__ == "__main__":
    scheduler_story(Random(7))
    supervisor_story(Random(8))
