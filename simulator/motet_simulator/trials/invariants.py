"""What must hold at any time, and what must hold once all faults have ended."""

from motet.domain import ObjectName
from motet_operator.reconcile.conditions import condition_of
from motet_scheduler.service import SchedulerService
from motet_simulator.trials.adapters import digest_of
from motet_simulator.trials.operator import TENANT
from motet_simulator.trials.plan import AdapterChange
from motet_simulator.trials.system import System


def check_now(system: System) -> None:
    """Raises AssertionError."""
    for client in system.clients:
        assert not client.problem, client.problem
    for host, service in system.schedulers.items():
        service.scheduler.check()
        system.note_term(host)
        _check_serving(system, service)
    for runner in system.runners.values():
        runner.engine.check()
    _check_hung(system)
    if system.plan.grants:
        system.grant_checks.check(system.clients, system.schedulers, system.world.now)
    if (leader := system.leader) is not None:
        honest = {host: parts for host, parts in system.runners.items() if host not in system.lying}
        _check_delivered(system, leader)
        system.waiting_checks.check(leader.scheduler, system.processes[system.leading_host], honest)


def _check_serving(system: System, service: SchedulerService) -> None:
    """A serving digest has the bytes of its revision. If a revision's files are replaced where they are, those of a
    later one may have been found there."""
    for adapter in service.scheduler.adapters:
        if adapter.serving is None:
            continue
        name, key = adapter.spec.ref.name, adapter.serving.key
        changes = [one for one in system.objects.history[name] if one.source == key.source and not one.deleted]
        first = int(key.content_stamp) if key.content_stamp else 0
        digests = {digest_of(one.content) for one in changes if one.number >= first}
        assert adapter.serving.digest in digests, f"{name}: {adapter.serving.digest} was never at {key}"


def _check_delivered(system: System, leader: SchedulerService) -> None:
    """What a liar says about the answers of another runner counts for nothing: their tenants pay for them."""
    liars = {fault.host for fault in system.plan.faults if fault.kind == "lies"}
    for request in leader.scheduler.requests.values() if liars else ():
        placed = request.placement
        if placed is None or placed.epoch != 1 or placed.instance in liars:
            continue  # a liar may have had it
        runner = system.runners.get(placed.instance)
        sequences = runner.engine.engine.planner.sequences if runner is not None else ()
        for sequence in sequences:
            if (sequence.request, sequence.new.epoch) == (request.id, 1):
                most = sequence.output_tokens
                assert request.delivered <= most, f"{request.id} has {most} tokens, and {request.delivered} are counted"


def _check_hung(system: System) -> None:
    """No runner is said to hang whose engine never did."""
    if system.supervisor is None:
        return
    for supervised in system.supervisor.supervisor.runners.values():
        runner = system.runners.get(supervised.instance)
        if runner is None or runner.runner.facts.identity.incarnation != supervised.identity.incarnation:
            continue
        assert not supervised.hung_reason or runner.engine.has_hung, (
            f"{supervised.instance} is said to hang: {supervised.hung_reason}"
        )


def _check_adapters(system: System) -> None:
    """Gateways serve what is declared, and the operator says so."""
    objects = system.objects
    entries = {
        host: {one.ref.name: one for one in gateway.dispatcher.catalog.current.adapters}
        for host, gateway in system.gateways.items()
    }
    for name, history in objects.history.items():
        last = history[-1]
        status = objects.statuses.get(ObjectName(TENANT, name))
        for host, adapters in entries.items():
            if last.deleted:
                assert name not in adapters, f"{host} still serves {name}"
            else:
                assert name in adapters, f"{host} does not know {name}"
                if last.content < AdapterChange.BROKEN:
                    assert adapters[name].digest == digest_of(last.content), f"{host} serves an old revision of {name}"
                else:
                    assert adapters[name].HasField("failure"), f"{host} does not know that {name} is broken"
        if last.deleted:
            continue
        assert status is not None, f"the operator has no status of {name}"
        ready = condition_of(status.conditions, "Ready")
        if last.content < AdapterChange.BROKEN:
            assert status.serves, f"{name} is not Ready: {ready}"
            found = status.artifact.digest if status.artifact is not None else None
            assert found == digest_of(last.content), f"the status of {name} says {found}"


def check_quiet(system: System) -> None:
    """After a while without faults and new requests: everything has ended, and all books agree."""
    check_now(system)
    for client in system.clients:
        assert client.over, f"{client.ask.name} has not ended: {len(client.tokens)} of {client.ask.max_tokens} tokens"
    for host, process in system.processes.items():
        there = process.alive and (host in system.runners or not host.startswith("runner"))
        assert there, f"{host} has not come back"
    for host, gateway in system.gateways.items():
        assert not gateway.unasked, f"{host}: {[client.ask.name for client in gateway.unasked]} wait for a catalog"
        assert not gateway.dispatcher.choices, f"{host} still has {list(gateway.dispatcher.choices)}"
        assert gateway.dispatcher.scheduler.connected, f"{host} has no scheduler"
    assert system.leader is not None, "nobody leads"
    scheduler = system.leader.scheduler
    assert not scheduler.state.quotas.waiting, "requests still wait for a quota"
    assert not scheduler.requests, f"the scheduler still has {list(scheduler.requests)}"
    assert not scheduler.state.adapter_uses, f"the scheduler still counts uses of {list(scheduler.state.adapter_uses)}"
    for group, queue in scheduler.queues.items():
        assert not len(queue), f"{len(queue)} requests still wait for {group}"
        assert not queue.reserved, f"runners of {group} are still reserved: {[one.instance for one in queue.reserved]}"
    for host, runner in system.runners.items():
        assert not len(runner.runner.accepted), f"{host} still has {[one.request for one in runner.runner.accepted]}"
        assert not list(runner.engine.engine.planner.sequences), f"the engine of {host} has sequences"
        known = scheduler.runners.get(host)  # type: ignore[call-overload]
        assert known is not None, f"the scheduler does not know {host}"
        assert not known.ledger, f"the scheduler's ledger of {host} has {dict(known.ledger)}"
        assert not known.parked, f"the scheduler still has {list(known.parked)} parked on {host}"
        assert known.takes_work, f"{host} takes no work: {known.unhealthy or known.drain}"
    _check_adapters(system)
    assert system.supervisor is not None
    for supervised in system.supervisor.supervisor.runners.values():
        assert not supervised.sequences, (
            f"the supervisor still has {list(supervised.sequences)} on {supervised.instance}"
        )
