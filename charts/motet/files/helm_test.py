"""`helm test`: checks an installation. Needs only Python's standard library."""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEFINITIONS = ("loraadapters.motet.dev", "servingpools.motet.dev")
MAX_WAIT_SECONDS = 60.0
INVALID = {
    "apiVersion": "motet.dev/v1alpha1",
    "kind": "LoRAAdapter",
    "metadata": {"name": "helm-test"},
    "spec": {"poolRef": {"name": "any"}, "source": {}},
}
"""The schema must refuse it: it has no source."""


def api(path: str, body: object = None) -> dict:
    """The API server's answer. Raises HTTPError if it refuses."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    host = f"[{host}]" if ":" in host else host
    request = urllib.request.Request(
        f"https://{host}:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}",
            "Content-Type": "application/json",
        },
    )
    trust = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=10, context=trust) as answer:
        return json.load(answer)


def definitions_are_established() -> str:
    for name in DEFINITIONS:
        status = api(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}").get("status", {})
        conditions = {one["type"]: one["status"] for one in status.get("conditions", [])}
        if conditions.get("Established") != "True":
            raise AssertionError(f"{name} is not established: {conditions}")
    return f"{' and '.join(DEFINITIONS)} are established"


def an_invalid_adapter_is_refused() -> str:
    namespace = (ACCOUNT / "namespace").read_text()
    try:
        api(f"/apis/motet.dev/v1alpha1/namespaces/{namespace}/loraadapters?dryRun=All", INVALID)
    except urllib.error.HTTPError as refusal:
        message = json.load(refusal)["message"]
        if refusal.code == 422:
            return f"an adapter without a source is refused: {message}"
        raise AssertionError(f"an invalid adapter got {refusal.code}, not 422: {message}") from None
    raise AssertionError(
        "an adapter without a source was accepted: the CustomResourceDefinitions are not those of Motet"
    )


def the_gateway_answers() -> str:
    url = f"http://{os.environ['GATEWAY']}/version"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            version = json.load(answer)["version"]
    except urllib.error.HTTPError as refusal:
        with refusal:
            if refusal.code == 401 and "www-authenticate" in refusal.headers:
                return "the gateway answers, and asks for a key"
            raise
    if os.environ.get("GATEWAY_AUTH") == "keys":
        raise AssertionError("gateway.auth is keys, but the gateway answers without a key")
    return f"the gateway answers; its version is {version}"


def main() -> None:
    deadline = time.monotonic() + MAX_WAIT_SECONDS
    for check in (definitions_are_established, an_invalid_adapter_is_refused, the_gateway_answers):
        while True:
            try:
                print(f"ok    {check()}", flush=True)
                break
            except (AssertionError, OSError) as error:
                # When a pod has just started, its routes and permissions may not work yet.
                if time.monotonic() > deadline:
                    print(f"FAILED {check.__name__}: {error}", flush=True)
                    sys.exit(1)
                time.sleep(1)


if __name__ == "__main__":
    main()
