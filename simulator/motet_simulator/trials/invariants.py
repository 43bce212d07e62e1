"""What must hold at any time, and what must hold once all faults have ended."""

from motet_simulator.trials.system import System


def check_now(system: System) -> None:
    """Raises AssertionError."""
    for client in system.clients:
        assert not client.problem, client.problem
    for service in system.schedulers.values():
        service.scheduler.check()
    for runner in system.runners.values():
        runner.engine.engine.check()


def check_quiet(system: System) -> None:
    """After a while without faults and new requests: everything has ended, and all books agree."""
    check_now(system)
    for client in system.clients:
        assert client.over, f"{client.ask.name} has not ended: {len(client.tokens)} of {client.ask.max_tokens} tokens"
    for host, gateway in system.gateways.items():
        assert not gateway.unasked, f"{host} has no catalog"
        assert not gateway.dispatcher.choices, f"{host} still has {list(gateway.dispatcher.choices)}"
        assert gateway.dispatcher.scheduler.connected, f"{host} has no scheduler"
    assert system.leader is not None, "nobody leads"
    scheduler = system.leader.scheduler
    assert not scheduler.requests, f"the scheduler still has {list(scheduler.requests)}"
    for host, runner in system.runners.items():
        assert not len(runner.runner.accepted), f"{host} still has {[one.request for one in runner.runner.accepted]}"
        assert not list(runner.engine.engine.planner.sequences), f"the engine of {host} has sequences"
        known = scheduler.runners.get(host)  # type: ignore[call-overload]
        assert known is not None, f"the scheduler does not know {host}"
        assert not known.ledger, f"the scheduler's ledger of {host} has {dict(known.ledger)}"
    assert system.supervisor is not None
    for supervised in system.supervisor.supervisor.runners.values():
        assert not supervised.sequences, (
            f"the supervisor still has {list(supervised.sequences)} on {supervised.instance}"
        )
