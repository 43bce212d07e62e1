"""A new leader tells its predecessor to step down, in case only the predecessor's way to the API server is broken."""

import asyncio

import structlog

from motet.api.v1 import scheduler_pb2
from motet.transport import CallFailed, Network
from motet.transport.methods import SUCCEED

log = structlog.get_logger(__name__)

ATTEMPTS = 10
PAUSE_SECONDS = 2.0


async def tell_predecessor(predecessor: str, term: int, *, network: Network, time_scale: float = 1.0) -> None:
    """Try until it answers, up to `ATTEMPTS` times. A predecessor that is dead does not answer and needs no message."""
    if not predecessor:
        return
    pause = PAUSE_SECONDS * time_scale
    async with network.channel(predecessor, "scheduler") as channel:
        for _ in range(ATTEMPTS):
            try:
                await channel.call(SUCCEED, scheduler_pb2.SucceedRequest(term=term), seconds=pause)
            except CallFailed as error:
                log.debug("predecessor_unreachable", address=predecessor, reason=error.details)
                await asyncio.sleep(pause)
            else:
                log.info("predecessor_notified", address=predecessor, term=term)
                return
