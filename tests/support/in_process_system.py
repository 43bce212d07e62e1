"""A whole system without HTTP, in one process over real gRPC: control plane, operator, one gateway, and runners."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from motet.domain import InstanceName
from motet.runner_info import read_runner_requests
from motet_runner.interface import Engine
from motet_simulator.fake_engine import FakeEngine
from tests.common.waiting import until
from tests.support.fake_gateway import FakeGateway, fake_gateway
from tests.support.in_process_runner import InProcessRunner, in_process_runner
from tests.support.in_process_services import FakeOperator, InProcessServices, control_plane, fake_operator


class InProcessSystem:
    def __init__(
        self,
        stack: AsyncExitStack,
        folder: Path,
        control: InProcessServices,
        operator: FakeOperator,
        gateway: FakeGateway,
    ) -> None:
        self.folder = folder
        self.control = control
        self.operator = operator
        self.gateway = gateway
        self.runners: dict[str, InProcessRunner] = {}
        self._stack = stack

    async def runner(
        self, instance: str, engine: Callable[[], Engine] = FakeEngine, *, supervised: bool = True, **settings: Any
    ) -> InProcessRunner:
        if supervised:
            settings["supervisor"] = self.control.supervisor_address
        runner = await self._stack.enter_async_context(
            in_process_runner(
                self.folder, instance=instance, scheduler=self.control.scheduler_address, engine=engine, **settings
            )
        )
        self.runners[instance] = runner
        await until(lambda: instance in self.control.scheduler.runners, why=f"{instance} attaches")
        return runner

    def disagreements(self) -> dict[str, tuple[dict[Any, int], dict[Any, int]]]:
        """Runners whose own requests differ from the scheduler's ledger: (the runner's, the scheduler's)."""
        found = {}
        for instance, runner in self.runners.items():
            service = runner.service
            last = service.loaded.last_report if service.loaded is not None else None
            book = read_runner_requests(service.accepted.runner_requests(last))
            theirs = {(entry.request, entry.epoch): entry.pages_to_charge for entry in book if not entry.parked}
            known = self.control.scheduler.runners.get(InstanceName(instance))
            ours = dict(known.ledger) if known is not None else {}
            if theirs != ours:
                found[instance] = (theirs, ours)
        return found

    async def ledgers_agree(self, *, seconds: float = 20.0) -> None:
        try:
            await until(lambda: not self.disagreements(), seconds=seconds)
        except AssertionError:
            raise AssertionError(f"books differ after {seconds} quiet seconds: {self.disagreements()}") from None


@asynccontextmanager
async def in_process_system(folder: Path, **control_settings: Any) -> AsyncIterator[InProcessSystem]:
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(control_plane(folder, **control_settings))
        operator = await stack.enter_async_context(fake_operator(control.scheduler_address))
        gateway = await stack.enter_async_context(fake_gateway("g0", scheduler=control.scheduler_address))
        yield InProcessSystem(stack, folder, control, operator, gateway)
