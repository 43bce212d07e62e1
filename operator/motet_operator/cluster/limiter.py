"""How fast the operator may ask the API server: a bucket of tokens, and a pause when the server asks for one."""

import asyncio

from motet.clock import Clock, monotonic


class Limiter:
    """`burst` requests at once, `rate` a second after that. Who comes first goes first."""

    def __init__(self, rate: float, burst: float, clock: Clock = monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens = burst
        self._counted = clock()
        self._paused_until = 0.0

    def reserve(self) -> float:
        """Take a token. Returns the seconds after which it may be used."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._counted) * self._rate) - 1
        self._counted = now
        return max(0.0, -self._tokens / self._rate, self._paused_until - now)

    def pause(self, seconds: float) -> None:
        """Nothing more for so long: the server said 429."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)

    async def take(self) -> None:
        wait = self.reserve()
        while wait > 0:
            await asyncio.sleep(wait)
            # Meanwhile another request may have been told to wait.
            wait = self._paused_until - self._clock()
