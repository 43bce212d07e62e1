"""A door to the API server, for services that need an object or two of it. Plain dictionaries in and out.

The `kubernetes` package is loaded when the door is first used: a laptop never pays for it.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import structlog

from motet.errors import SetupError

if TYPE_CHECKING:
    from kubernetes.aio.client import ApiClient, Configuration

log = structlog.get_logger(__name__)

Object = dict[str, Any]

UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT = 401, 403, 404, 409


class Refused(Exception):
    """The server's no, with its status and its words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Unreachable(Exception):
    """No answer, or none that says anything: nobody knows whether the request was carried out."""


class KubeApi:
    """Speaks as the pod's ServiceAccount, or as a kubeconfig says.

    The token is read again each minute and when it is refused; after a failure everything else is, too: the authority,
    the address, the connection.
    """

    def __init__(self, kubeconfig: Path | None = None) -> None:
        self._kubeconfig = kubeconfig
        self._client: ApiClient | None = None

    async def __aenter__(self) -> Self:
        """Raises SetupError when there is no cluster to speak to."""
        self._client = await self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._hang_up()

    async def get(self, path: str, *, seconds: float) -> Object:
        return await self._ask("GET", path, None, seconds)

    async def post(self, path: str, body: Object, *, seconds: float) -> Object:
        return await self._ask("POST", path, body, seconds)

    async def put(self, path: str, body: Object, *, seconds: float) -> Object:
        return await self._ask("PUT", path, body, seconds)

    async def _ask(self, method: str, path: str, body: Object | None, seconds: float) -> Object:
        """Raises Refused or Unreachable."""
        import aiohttp

        try:
            self._client = client = self._client or await self._connect()
            request = await client.param_serialize(
                method, path, header_params={"accept": "application/json"}, body=body, auth_settings=["BearerToken"]
            )
            response = await client.call_api(*request, _request_timeout=aiohttp.ClientTimeout(total=seconds))
            answer = json.loads(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, SetupError) as error:
            await self._hang_up()
            raise Unreachable(f"the API server does not answer: {error or type(error).__name__}") from None
        if response.status < 300 and isinstance(answer, dict):
            return answer
        if response.status == UNAUTHORIZED:
            await self._hang_up()
        message = answer.get("message", "") if isinstance(answer, dict) else ""
        if response.status >= 500 or response.status in (UNAUTHORIZED, 429):
            raise Unreachable(f"the API server answers {response.status}: {message}")
        raise Refused(response.status, message or f"HTTP {response.status}")

    async def _connect(self) -> "ApiClient":
        from kubernetes.aio.client import ApiClient

        return ApiClient(await self._configuration())

    async def _configuration(self) -> "Configuration":
        from kubernetes.aio import config
        from kubernetes.aio.client import Configuration

        configuration = Configuration()
        try:
            if self._kubeconfig is not None:
                await config.load_kube_config(str(self._kubeconfig), client_configuration=configuration)
            else:
                config.load_incluster_config(configuration)
        except (config.ConfigException, OSError) as error:
            raise SetupError(
                f"no cluster to speak to: {error} This process must run in a pod with a ServiceAccount's token, or be "
                "given a kubeconfig."
            ) from None
        return configuration

    async def _hang_up(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()
