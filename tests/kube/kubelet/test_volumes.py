"""The files in a container's volumes, and who may read and write them."""

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.cluster.nodes import ClusterNode
from tests.kube.pods import IDLE, Pods, python, shell

pytestmark = pytest.mark.kube

USER = {"runAsUser": 65532, "runAsGroup": 65532}


def mounts(**at: str) -> list[dict[str, Any]]:
    return [{"name": name, "mountPath": path} for name, path in at.items()]


def secret(pods: Pods, name: str, **data: str) -> None:
    pods.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": pods.namespace},
            "stringData": data,
        }
    )


def config_map(pods: Pods, name: str, **data: str) -> None:
    metadata = {"name": name, "namespace": pods.namespace}
    pods.cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


def test_containers_share_an_empty_folder_that_outlives_them(pods: Pods, node: ClusterNode) -> None:
    both = mounts(shared="/shared")
    name = pods.run(
        shell(f"echo start >> /shared/starts; {IDLE}", volumeMounts=both),
        shell(IDLE, name="reader", volumeMounts=both),
        volumes=[{"name": "shared", "emptyDir": {}}],
    )
    pods.wait_ready(name)
    node.kill(pods.path(name), "main")

    def starts() -> bool:
        return node.execute(pods.path(name), "cat", "/shared/starts", container="reader") == (0, "start\nstart\n")

    pods.cluster.wait_for(starts, "what both runs wrote")


def test_files_outside_of_volumes_are_removed_with_the_container(pods: Pods, node: ClusterNode) -> None:
    name = pods.run(shell(f"test ! -e /var/mark && touch /var/mark; {IDLE}"))
    pods.wait_ready(name)
    node.kill(pods.path(name))
    pods.cluster.wait_for(lambda: pods.container(name)["restartCount"] == 1, "a restart")
    pods.wait_ready(name)
    assert not Path("/var/mark").exists()


def test_a_folder_in_memory_holds_what_it_may_and_no_more(pods: Pods) -> None:
    script = "df -T /memory | grep -q tmpfs && head -c 2000000 /dev/zero > /memory/much || echo full"
    said = pods.finish(
        shell(script, volumeMounts=mounts(memory="/memory")),
        volumes=[{"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}],
    )
    assert "No space left on device" in said
    assert said.endswith("full\n")


def test_files_of_a_config_map_are_replaced_together(pods: Pods, node: ClusterNode) -> None:
    config_map(pods, "words", one="1", two="2")
    name = pods.run(
        shell(IDLE, volumeMounts=mounts(words="/words")), volumes=[{"name": "words", "configMap": {"name": "words"}}]
    )
    pods.wait_ready(name)
    assert node.execute(pods.path(name), "sh", "-c", "cat /words/one /words/two; ls /words") == (0, "12one\ntwo\n")
    config_map(pods, "words", one="3", three="4")

    def changed() -> bool:
        return node.execute(pods.path(name), "sh", "-c", "ls /words; cat /words/*") == (0, "one\nthree\n34")

    pods.cluster.wait_for(changed, "the changed files", within_s=15)


def test_a_secret_gives_the_asked_for_keys_with_the_asked_for_rights(pods: Pods) -> None:
    secret(pods, "keys", user="me", password="sesame")
    source = {"secretName": "keys", "defaultMode": 0o400, "items": [{"key": "password", "path": "deep/file"}]}
    said = pods.finish(
        shell("cat /keys/deep/file; ls /keys; stat -Lc %a /keys/deep/file", volumeMounts=mounts(keys="/keys")),
        volumes=[{"name": "keys", "secret": source}],
    )
    assert said == "sesamedeep\n400\n"


def test_a_container_waits_for_a_missing_secret_but_not_for_an_optional_one(pods: Pods) -> None:
    def reader(**source: object) -> str:
        return pods.run(
            shell("ls /late", volumeMounts=mounts(late="/late")),
            volumes=[{"name": "late", "secret": {"secretName": "late", **source}}],
            restartPolicy="Never",
        )

    patient, careless = reader(), reader(optional=True)
    pods.wait_phase(careless, "Succeeded")
    assert pods.logs(careless) == ""
    assert pods.container(patient)["state"] == {"waiting": {"reason": "ContainerCreating"}}
    assert 'secret "late" not found' in str(pods.events(patient))
    secret(pods, "late", key="value")
    pods.wait_phase(patient, "Succeeded")
    assert pods.logs(patient) == "key\n"


def test_a_pod_can_read_about_itself(pods: Pods) -> None:
    items = [
        {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}},
        {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
        {
            "path": "memory",
            "resourceFieldRef": {"containerName": "main", "resource": "limits.memory", "divisor": "1Mi"},
        },
    ]
    name = pods.run(
        shell(
            "cd /about; cat name; echo; cat labels; echo; cat memory",
            volumeMounts=mounts(about="/about"),
            resources={"limits": {"memory": "64Mi"}},
        ),
        volumes=[{"name": "about", "downwardAPI": {"items": items}}],
        labels={"app": "self", "tier": "test"},
        restartPolicy="Never",
    )
    pods.wait_phase(name, "Succeeded")
    assert pods.logs(name) == f'{name}\napp="self"\ntier="test"\n64'


def test_a_claim_is_the_folder_of_its_volume(pods: Pods, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "file").write_text("kept")
    name = f"kept-{pods.namespace}"
    size = {"storage": "1Gi"}
    pods.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadWriteMany"],
                "hostPath": {"path": str(tmp_path)},
                "storageClassName": "",
                "claimRef": {"namespace": pods.namespace, "name": "kept"},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "kept", "namespace": pods.namespace},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": size},
                "storageClassName": "",
                "volumeName": name,
            },
        },
    )
    said = pods.finish(
        shell("cat /kept/file; touch /kept/own; touch /fixed/other || echo refused", volumeMounts=[
            *mounts(kept="/kept"),
            {"name": "kept", "mountPath": "/fixed", "readOnly": True},
        ]),
        volumes=[{"name": "kept", "persistentVolumeClaim": {"claimName": "kept"}}],
    )  # fmt: skip
    assert said.startswith("kept")
    assert said.endswith("refused\n")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "own"]


def test_a_single_file_of_a_volume_can_be_mounted(pods: Pods) -> None:
    config_map(pods, "single", file="content")
    mount = {"name": "single", "mountPath": "/etc/motet/single.conf", "subPath": "file"}
    said = pods.finish(
        shell("cat /etc/motet/single.conf; ls /etc/motet", volumeMounts=[mount]),
        volumes=[{"name": "single", "configMap": {"name": "single"}}],
    )
    assert said == "contentsingle.conf\n"


def test_a_read_only_container_writes_to_its_volumes_only(pods: Pods) -> None:
    script = "touch /x /tmp/x ~/x 2>/dev/null; touch /data/x && ls -d /x /tmp/x /data/x 2>/dev/null"
    said = pods.finish(
        shell(script, securityContext={"readOnlyRootFilesystem": True}, volumeMounts=mounts(data="/data")),
        volumes=[{"name": "data", "emptyDir": {}}],
    )
    assert said == "/data/x\n"


def test_a_user_reads_the_token_and_writes_where_its_group_may(pods: Pods) -> None:
    secret(pods, "private", key="value")
    code = """
import json, os
token = "/var/run/secrets/kubernetes.io/serviceaccount/token"
open("/data/file", "w").write("mine")
print(json.dumps({
    "who": [os.getuid(), os.getgid(), os.getgroups()],
    "token": len(open(token).read()) > 100,
    "secret": open("/private/key").read(),
    "group": os.stat("/data/file").st_gid,
    "kubelet": os.access("/tmp/anything", os.F_OK),
}))
"""
    said = pods.finish(
        python(code, volumeMounts=mounts(data="/data", private="/private")),
        securityContext={**USER, "runAsNonRoot": True, "fsGroup": 4242},
        volumes=[
            {"name": "data", "emptyDir": {}},
            {"name": "private", "secret": {"secretName": "private", "defaultMode": 0o400}},
        ],
    )
    assert json.loads(said) == {
        "who": [65532, 65532, [4242]],
        "token": True,
        "secret": "value",
        "group": 4242,
        "kubelet": False,
    }


def test_dropped_rights_are_gone_also_for_root(pods: Pods) -> None:
    script = "grep -E 'CapBnd|NoNewPrivs' /proc/self/status | tr -d '\\t'"
    context = {"capabilities": {"drop": ["ALL"]}, "allowPrivilegeEscalation": False}
    assert pods.finish(shell(script, securityContext=context)).split() == ["CapBnd:0000000000000000", "NoNewPrivs:1"]
