"""Where the chart's gateways find API keys, and what the notes say about the first key."""

import importlib.util
import json
import threading
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType

import pytest

from motet_cli.key_commands import KEY_ONE_LINER
from motet_gateway.features_key import KEY_BYTES
from tests.charts.helm import MOTET, NAMESPACE, HelmFailed, Object, helm, named, of_kind, pod_templates, render, title
from tests.charts.test_network import DATABASE, passes, pods
from tests.charts.test_notes import notes
from tests.charts.test_templates import environment, trusted

URL = "postgresql+asyncpg://motet:secret@db.example/motet"
IN_DATABASE: Object = {"database": {"url": URL, "authorities": {"configMapName": "who-signs"}}}
IN_SECRET: Object = {"gateway": {"keysSecret": "api-keys"}, "database": {"url": URL}}
OWN_ACCOUNT: Object = {
    "gateway": {"database": {"existingSecret": {"name": "postgres-gateways", "key": "address"}}},
    "database": {"url": URL},
}
FOR_EVERYBODY: Object = {"gateway": {"auth": "none"}, "database": {"url": URL}}


def gateway(values: Object) -> Object:
    spec: Object = named(render(values), "Deployment", "motet-gateway")["spec"]["template"]["spec"]
    return spec


def settings(values: Object) -> Object:
    return environment(gateway(values)["containers"][0])


@pytest.mark.parametrize("name", ["", "voices"])
def test_by_default_gateways_read_keys_from_a_secret_named_after_the_release(name: str) -> None:
    objects = render({"fullnameOverride": name})
    spec = named(objects, "Deployment", f"{name or 'motet'}-gateway")["spec"]["template"]["spec"]
    found = environment(spec["containers"][0])
    assert found["MOTET_GATEWAY_AUTH"] == "keys"
    assert "MOTET_DATABASE_URL" not in found
    (volume,) = [one for one in spec["volumes"] if one["name"] == "keys"]
    assert volume["secret"]["secretName"] == f"{name or 'motet'}-keys"


def test_the_chart_makes_no_api_keys() -> None:
    made = [title(one) for one in of_kind(render(), "Secret")]
    assert [name for name in made if not name.endswith(("-tls", "-ca", "-features-key"))] == []


def test_all_gateways_share_one_key_of_features_which_nobody_else_reads() -> None:
    objects = render()
    made = named(objects, "Secret", "motet-features-key")
    assert len(b64decode(made["data"]["key"])) == KEY_BYTES
    assert made["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    readers = {
        who: mount["mountPath"]
        for who, template in pod_templates(objects).items()
        for volume in template["spec"].get("volumes", [])
        if volume.get("secret", {}).get("secretName") == "motet-features-key"
        for mount in template["spec"]["containers"][0]["volumeMounts"]
        if mount["name"] == volume["name"]
    }
    (reader,) = readers
    assert reader.endswith("motet-gateway")
    assert settings({})["MOTET_GATEWAY_FEATURES_KEY_FILE"] == f"{readers[reader]}/key"
    own = {"gateway": {"featuresKeySecret": "kept-elsewhere"}}
    assert {"secretName": "kept-elsewhere", "defaultMode": 0o440} in [
        one.get("secret") for one in gateway(own)["volumes"]
    ]
    assert not [one for one in of_kind(render(own), "Secret") if title(one).endswith("-features-key")]


def test_gateways_that_ask_for_no_key_read_none() -> None:
    found = settings(FOR_EVERYBODY)
    assert found["MOTET_GATEWAY_AUTH"] == "none"
    assert not {"MOTET_DATABASE_URL", "MOTET_GATEWAY_KEYS_FILE"} & found.keys()
    assert "keys" not in {volume["name"] for volume in gateway(FOR_EVERYBODY)["volumes"]}


def test_keys_in_the_database_are_read_from_there() -> None:
    found = settings(IN_DATABASE)
    assert found["MOTET_GATEWAY_AUTH"] == "keys"
    assert found["MOTET_DATABASE_URL"] == {"secretKeyRef": {"name": "motet-database", "key": "url"}}
    assert "MOTET_GATEWAY_KEYS_FILE" not in found
    template = pod_templates(render(IN_DATABASE))[f"Deployment {NAMESPACE}/motet-gateway"]
    assert trusted(template) == ({"name": "who-signs", "key": "ca.crt"}, {"PGSSLROOTCERT"})


def test_keys_in_a_secret_are_mounted_as_a_folder_that_the_kubelet_updates() -> None:
    spec = gateway(IN_SECRET)
    (mount,) = [one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "keys"]
    assert mount == {"name": "keys", "mountPath": settings(IN_SECRET)["MOTET_GATEWAY_KEYS_FILE"], "readOnly": True}
    assert "MOTET_DATABASE_URL" not in settings(IN_SECRET)


def test_a_secret_of_keys_is_optional_and_not_readable_for_all() -> None:
    (volume,) = [one for one in gateway(IN_SECRET)["volumes"] if one["name"] == "keys"]
    assert volume["secret"] == {"secretName": "api-keys", "optional": True, "defaultMode": 0o440}


def test_gateways_reach_the_database_only_if_keys_are_there() -> None:
    for values, reaches in ((FOR_EVERYBODY, False), (IN_SECRET, False), (IN_DATABASE, True)):
        objects = render(values)
        assert passes(objects, pods(objects)["gateway"], DATABASE, 5432) is reaches


def test_another_database_restarts_gateways_that_read_keys_there() -> None:
    def annotations(url: str) -> Object:
        objects = render(IN_DATABASE | {"database": {"url": url}})
        found: Object = named(objects, "Deployment", "motet-gateway")["spec"]["template"]["metadata"]["annotations"]
        return found

    assert annotations(URL) != annotations(URL.replace("secret", "another"))


def test_gateways_may_have_an_account_of_their_own_in_the_database() -> None:
    templates = pod_templates(render(OWN_ACCOUNT))
    urls = {
        who.rpartition("/motet-")[2]: source["secretKeyRef"]
        for who, template in templates.items()
        for container in template["spec"]["containers"]
        if (source := environment(container).get("MOTET_DATABASE_URL"))
    }
    assert urls == {
        "gateway": {"name": "postgres-gateways", "key": "address"},
        "predictor": {"name": "motet-database", "key": "url"},
        "migrate": {"name": "motet-migrate", "key": "url"},
    }
    assert passes(render(OWN_ACCOUNT), pods(render(OWN_ACCOUNT))["gateway"], DATABASE, 5432)


def test_gateways_with_an_account_of_their_own_do_not_restart_when_the_url_changes() -> None:
    def template(url: str) -> Object:
        return pod_templates(render(OWN_ACCOUNT | {"database": {"url": url}}))[f"Deployment {NAMESPACE}/motet-gateway"]

    assert template(URL) == template(URL.replace("secret", "another"))


def test_an_account_without_a_database_is_refused() -> None:
    with pytest.raises(HelmFailed, match=r"gateway\.database\.existingSecret .*: set database, too"):
        helm("template", "motet", str(MOTET), "--set=gateway.database.existingSecret.name=postgres-gateways")


@pytest.mark.parametrize("instead", [IN_SECRET["gateway"], FOR_EVERYBODY["gateway"]])
def test_an_account_is_not_used_if_gateways_read_no_keys_with_it(instead: Object) -> None:
    found = settings({"gateway": OWN_ACCOUNT["gateway"] | instead, "database": {"url": URL}})
    assert "MOTET_DATABASE_URL" not in found


def test_the_notes_create_the_first_key_in_a_pod_that_may_write_it() -> None:
    said = notes(f"--set=database.url={URL}", "--set=gateway.database.existingSecret.name=postgres-gateways")
    assert "exec deployment/motet-predictor -- motet key create --tenant=default > key)" in said
    assert "exec deployment/motet-gateway" not in said


def test_the_notes_say_how_to_make_the_first_key_in_the_database() -> None:
    said = notes(f"--set=database.url={URL}")
    create = "exec deployment/motet-gateway -- motet key create --tenant=default > key)"
    assert f"(umask 077; kubectl --namespace={NAMESPACE} {create}" in said
    assert 'curl --header "authorization: Bearer $(cat key)" http://localhost:8000/v1/models' in said


@pytest.mark.parametrize(
    ("options", "secret"), [((), "motet-keys"), (("--set=gateway.keysSecret=api-keys",), "api-keys")]
)
def test_the_notes_say_how_to_make_the_first_key_in_a_secret(options: tuple[str, ...], secret: str) -> None:
    """The commands use `motet` in the gateway's pod, because a user of Helm may not have it."""
    said = notes(*options)
    kubectl = f"kubectl --namespace={NAMESPACE}"
    hashed = "exec --stdin deployment/motet-gateway -- motet key hash --tenant=default < key > key.json"
    assert f"(umask 077; {KEY_ONE_LINER} > key)\n{kubectl} {hashed}\n" in said
    assert f"{kubectl} create secret generic {secret} --from-file=first=key.json\n" in said
    assert 'curl --header "authorization: Bearer $(cat key)" http://localhost:8000/v1/models' in said


def test_the_notes_warn_of_gateways_that_ask_for_no_key_until_clients_are_named() -> None:
    warning, open_ = "WARNING: everybody who reaches the gateway", "--set=gateway.auth=none"
    clients = "--set=networkPolicy.clients[0].namespaceSelector.matchLabels.proxy=yes"
    assert warning not in notes()
    assert warning in notes(open_)
    assert "motet key" not in notes(open_)
    assert warning not in notes(open_, clients)
    assert "(networkPolicy.enabled is false)" in notes(open_, clients, "--set=networkPolicy.enabled=false")


@pytest.fixture
def check() -> ModuleType:
    """The script of `helm test`."""
    spec = importlib.util.spec_from_file_location("helm_test", MOTET / "files" / "helm_test.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Version(BaseHTTPRequestHandler):
    """Answers as a gateway that asks for no key."""

    def do_GET(self) -> None:
        self._answer(200, {"version": "1.2.3"})

    def _answer(self, status: int, content: Object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        if status == 401:
            self.send_header("www-authenticate", "Bearer")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


class AsksForAKey(Version):
    def do_GET(self) -> None:
        self._answer(401, {"error": {"message": "This gateway needs an API key."}})


@pytest.mark.parametrize(
    ("auth", "gateway", "printed"),
    [
        ("none", Version, "the gateway answers; its version is 1.2.3"),
        ("keys", AsksForAKey, "the gateway answers, and asks for a key"),
        ("none", AsksForAKey, "the gateway answers, and asks for a key"),
    ],
)
def test_helm_test_accepts_a_gateway(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, auth: str, gateway: type[Version], printed: str
) -> None:
    assert ask(check, monkeypatch, auth, gateway) == printed


def test_helm_test_fails_if_the_gateway_should_ask_for_a_key(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match=r"gateway\.auth is keys, but the gateway answers without a key"):
        ask(check, monkeypatch, "keys", Version)


def ask(check: ModuleType, monkeypatch: pytest.MonkeyPatch, auth: str, gateway: type[Version]) -> str:
    with ThreadingHTTPServer(("127.0.0.1", 0), gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GATEWAY", f"127.0.0.1:{server.server_port}")
        monkeypatch.setenv("GATEWAY_AUTH", auth)
        try:
            answer: str = check.the_gateway_answers()
            return answer
        finally:
            server.shutdown()


@pytest.mark.parametrize("values", [{}, FOR_EVERYBODY])
def test_helm_test_knows_whether_gateways_ask_for_keys(values: Object) -> None:
    (container,) = named(render(values), "Pod", "motet-test")["spec"]["containers"]
    assert environment(container)["GATEWAY_AUTH"] == settings(values)["MOTET_GATEWAY_AUTH"]
