"""Secrets on a real API server: the runners read exactly those that tenants grant by name, and say how to grant one."""

import base64
import re
from pathlib import Path

import pytest
import yaml

from motet.errors import AdapterFetchFailed
from motet.sources import TOKEN
from motet_runner.sources.fetch_order import NetworkAccess
from motet_runner.sources.secret import SourceCredentials, read_credentials
from testbed.cluster.control_plane import Cluster

pytestmark = pytest.mark.kube

LITERAL = "--from-literal=token=open-sesame"


@pytest.fixture
def access(cluster: Cluster, namespace: str, tmp_path: Path) -> NetworkAccess:
    """Access as a runner has it in its pod, with the token of its ServiceAccount."""
    cluster.kubectl("create", "serviceaccount", "motet-runner", f"--namespace={namespace}")
    token = cluster.kubectl("create", "token", "motet-runner", f"--namespace={namespace}", "--duration=10m")
    (tmp_path / "token").write_text(token)
    config = yaml.safe_load(cluster.kubeconfig.read_text())["clusters"][0]["cluster"]
    (tmp_path / "ca.crt").write_bytes(base64.b64decode(config["certificate-authority-data"]))
    return NetworkAccess(api_server=config["server"], service_account=str(tmp_path))


@pytest.fixture
def tenant(cluster: Cluster, namespace: str):
    name = f"{namespace}-tenant"
    cluster.kubectl("create", "namespace", name)
    for secret in ("mine", "other"):
        cluster.kubectl(
            "create", "secret", "generic", secret, f"--namespace={name}", "--from-literal=token=open-sesame"
        )
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def test_the_command_in_the_message_about_a_secret_grants_it(
    cluster: Cluster, access: NetworkAccess, tenant: str
) -> None:
    with pytest.raises(AdapterFetchFailed) as failed:
        read_credentials(f"{tenant}/mine", access, [TOKEN], timeout=10)
    assert failed.value.reason == "CredentialsInvalid"
    commands = re.findall(r"kubectl (-n [^;]+)", failed.value.message)
    assert len(commands) == 2
    for command in commands:
        cluster.kubectl(*command.split())
    assert read_credentials(f"{tenant}/mine", access, [TOKEN], timeout=10) == SourceCredentials(
        {"token": "open-sesame"}
    )
    with pytest.raises(AdapterFetchFailed, match="may not read Secret"):
        read_credentials(f"{tenant}/other", access, [TOKEN], timeout=10)
    cluster.kubectl("delete", "secret", "mine", f"--namespace={tenant}")
    with pytest.raises(AdapterFetchFailed, match=f"There is no Secret {tenant}/mine"):
        read_credentials(f"{tenant}/mine", access, [TOKEN], timeout=10)


def test_a_grant_that_is_taken_back_is_taken_back(
    cluster: Cluster, access: NetworkAccess, tenant: str, namespace: str
) -> None:
    grant = ("create", "role", "r", "--verb=get", "--resource=secrets", "--resource-name=mine")
    cluster.kubectl(*grant, f"--namespace={tenant}")
    who = f"--serviceaccount={namespace}:motet-runner"
    cluster.kubectl("create", "rolebinding", "r", "--role=r", who, f"--namespace={tenant}")
    assert read_credentials(f"{tenant}/mine", access, [TOKEN], timeout=10).token
    cluster.kubectl("delete", "rolebinding", "r", f"--namespace={tenant}")
    with pytest.raises(AdapterFetchFailed, match="may not read Secret"):
        read_credentials(f"{tenant}/mine", access, [TOKEN], timeout=10)
