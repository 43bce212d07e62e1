"""Web pages of the origins in the settings may ask the gateway, and no others."""

import pytest

from motet_gateway.settings import Settings
from testbed.fake_services import FakeServices
from tests.gateway.conftest import Served, serve

PAGE, OTHER = "https://app.example", "https://evil.example"
BODY = {"model": "tiny", "prompt": "x", "max_tokens": 2}


async def preflight(served: Served, origin: str) -> tuple[int, str | None]:
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    answer = await served.http.options("/v1/completions", headers=asked)
    return answer.status_code, answer.headers.get("access-control-allow-origin")


@pytest.mark.parametrize("auth", ["none", "keys"])
async def test_a_page_of_the_settings_may_ask(cluster: FakeServices, auth: str) -> None:
    """Also where keys are needed: browsers send none with a preflight."""
    async with serve(cluster, cors_origins=(PAGE,), auth=auth) as served:
        assert await preflight(served, PAGE) == (200, PAGE)
        status, allowed = await preflight(served, OTHER)
        assert (status, allowed) == (400, None)
        answer = await served.http.post("/v1/completions", json=BODY, headers={"origin": PAGE})
        assert answer.status_code == (200 if auth == "none" else 401)
        assert answer.headers["access-control-allow-origin"] == PAGE, "a page may read errors, too"
        assert "x-should-retry" in answer.headers["access-control-expose-headers"]
        foreign = await served.http.post("/v1/completions", json=BODY, headers={"origin": OTHER})
        assert "access-control-allow-origin" not in foreign.headers


async def test_a_stream_of_a_page_has_all_its_events(cluster: FakeServices) -> None:
    async with serve(cluster, cors_origins=(PAGE,)) as served:
        answer = await served.http.post("/v1/completions", json=BODY | {"stream": True}, headers={"origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_without_the_setting_no_page_may(served: Served) -> None:
    status, allowed = await preflight(served, PAGE)
    assert (status >= 400, allowed) == (True, None)


@pytest.mark.parametrize(
    "origin", ["app.example", "https://app.example/", "https://app.example/path", "https://*.example"]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="is no origin"):
        Settings(cors_origins=(origin,))
