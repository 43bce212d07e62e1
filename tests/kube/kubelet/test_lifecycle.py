"""The lifecycle of a pod, as "Pod Lifecycle" and "Init Containers" of the Kubernetes documentation describe it: phases,
conditions, states, restarts, back-off.
"""

from typing import Any

import pytest

from testbed.cluster.nodes import ClusterNode
from testbed.tree import ROOT
from tests.kube.pods import IDLE, Pods, python, shell

pytestmark = pytest.mark.kube


def state(pods: Pods, name: str, container: str = "main") -> tuple[str, str]:
    """The state of a container and its reason."""
    return states(pods.status(name))[container]


def states(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The state of each container and its reason, from one status."""
    every = [*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())]
    found = {one["name"]: next(iter(one["state"].items())) for one in every}
    return {name: (kind, said.get("reason", "")) for name, (kind, said) in found.items()}


def test_a_running_pod_says_where_it_is_and_since_when(pods: Pods, node: ClusterNode) -> None:
    name = pods.run(shell(IDLE))
    pods.wait_ready(name)
    status = pods.status(name)
    assert status["phase"] == "Running"
    assert status["hostIP"] == node.address
    assert status["podIPs"] == [{"ip": status["podIP"]}]
    assert status["startTime"]
    assert status["observedGeneration"] == pods.get(name)["metadata"]["generation"]
    kinds = ("PodScheduled", "PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready")
    assert {kind: pods.condition(name, kind)["status"] for kind in kinds} == dict.fromkeys(kinds, "True")
    (container,) = status["containerStatuses"]
    assert (container["ready"], container["started"], container["restartCount"]) == (True, True, 0)
    assert "startedAt" in container["state"]["running"]
    assert "Started" in {event["reason"] for event in pods.events(name)}


def test_a_pod_whose_containers_all_ended_well_has_succeeded(pods: Pods) -> None:
    name = pods.run(shell("exit 0"), shell("sleep 0.2", name="other"), restartPolicy="Never")
    pods.wait_phase(name, "Succeeded")
    assert state(pods, name) == ("terminated", "Completed")
    ready = pods.condition(name, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "PodCompleted")
    assert pods.condition(name, "Initialized")["status"] == "True"


def test_a_pod_of_which_one_container_failed_has_failed(pods: Pods) -> None:
    name = pods.run(shell("exit 3"), shell("exit 0", name="other"), restartPolicy="Never")
    pods.wait_phase(name, "Failed")
    assert state(pods, name) == ("terminated", "Error")
    assert pods.container(name)["state"]["terminated"]["exitCode"] == 3
    assert pods.container(name)["restartCount"] == 0


def test_on_failure_a_container_is_started_again_until_it_ends_well(pods: Pods) -> None:
    volume = {"name": "memory", "emptyDir": {}}
    script = "echo x >> /memory/tries; test $(wc -l < /memory/tries) -ge 3"
    mount = [{"name": "memory", "mountPath": "/memory"}]
    name = pods.run(shell(script, volumeMounts=mount), restartPolicy="OnFailure", volumes=[volume])
    pods.wait_phase(name, "Succeeded")
    assert pods.container(name)["restartCount"] == 2
    assert pods.container(name)["lastState"]["terminated"]["exitCode"] == 1


def test_a_container_of_a_lasting_pod_is_started_again_also_after_it_ended_well(pods: Pods) -> None:
    name = pods.run(shell("exit 0"))
    pods.cluster.wait_for(lambda: pods.container(name)["restartCount"] >= 1, "a restart")
    assert pods.container(name)["lastState"]["terminated"]["reason"] == "Completed"
    assert pods.status(name)["phase"] == "Running"


def test_crashes_are_followed_by_longer_and_longer_waits(pods: Pods) -> None:
    name = pods.run(shell("exit 1"))

    def backing_off(seconds: int) -> dict[str, Any]:
        """The pod's status during a back-off of `seconds` seconds."""
        status = pods.status(name)
        said = status["containerStatuses"][0]["state"]["waiting"]
        assert said["reason"] == "CrashLoopBackOff"
        assert said["message"].startswith(f"back-off {seconds}s restarting failed container=main pod=")
        return status

    (container,) = pods.cluster.wait_for(lambda: backing_off(10), "back-off")["containerStatuses"]
    assert container["lastState"]["terminated"]["exitCode"] == 1
    assert container["restartCount"] == 1  # the first restart is immediate
    longer = pods.cluster.wait_for(lambda: backing_off(20), "a longer back-off")
    (ready,) = (one for one in longer["conditions"] if one["type"] == "Ready")
    assert ready["reason"] == "ContainersNotReady"
    assert ready["message"] == "containers with unready status: [main]"


def test_a_killed_container_ended_with_137(pods: Pods, node: ClusterNode) -> None:
    name = pods.run(shell(IDLE))
    pods.wait_ready(name)
    node.kill(pods.path(name))
    pods.cluster.wait_for(lambda: pods.container(name)["restartCount"] == 1, "a restart")
    ended = pods.container(name)["lastState"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (137, "Error")


def test_out_of_memory_is_the_reason_of_the_container(pods: Pods, node: ClusterNode) -> None:
    name = pods.run(shell(IDLE), restartPolicy="Never")
    pods.wait_ready(name)
    node.out_of_memory(pods.path(name))
    pods.wait_phase(name, "Failed")
    ended = pods.container(name)["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (137, "OOMKilled")


def test_an_image_that_is_nowhere_is_tried_again_and_again(pods: Pods) -> None:
    name = pods.run({"image": "example.invalid/nothing:1"})
    pods.cluster.wait_for(lambda: state(pods, name) == ("waiting", "ErrImagePull"), "the first attempt")
    pods.cluster.wait_for(lambda: state(pods, name) == ("waiting", "ImagePullBackOff"), "the back-off of the pull")
    assert pods.status(name)["phase"] == "Pending"
    assert "example.invalid/nothing:1" in pods.container(name)["state"]["waiting"]["message"]
    pods.delete(name)


def test_a_command_that_is_not_in_the_image_does_not_start(pods: Pods) -> None:
    name = pods.run({"image": "busybox", "command": ["/no/such/program"]}, restartPolicy="Never")
    pods.wait_phase(name, "Failed")
    ended = pods.container(name)["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (128, "StartError")
    assert "No such file" in ended["message"]


def test_a_container_waits_for_the_config_map_that_its_environment_names(pods: Pods) -> None:
    reference = {"configMapKeyRef": {"name": "late", "key": "word"}}
    name = pods.run(shell("echo $WORD", env=[{"name": "WORD", "valueFrom": reference}]), restartPolicy="Never")
    pods.cluster.wait_for(
        lambda: state(pods, name) == ("waiting", "CreateContainerConfigError"), "CreateContainerConfigError"
    )
    assert pods.container(name)["state"]["waiting"]["message"] == 'configmap "late" not found'
    pods.cluster.kubectl("create", "configmap", "late", "--from-literal=word=hello", f"--namespace={pods.namespace}")
    pods.wait_phase(name, "Succeeded")
    assert pods.logs(name) == "hello\n"


def test_root_is_refused_to_a_container_that_must_not_be_root(pods: Pods) -> None:
    name = pods.run(shell(IDLE, securityContext={"runAsNonRoot": True}))
    pods.cluster.wait_for(lambda: state(pods, name) == ("waiting", "CreateContainerConfigError"), "the refusal")
    assert "image will run as root" in pods.container(name)["state"]["waiting"]["message"]


def test_a_pod_that_is_active_too_long_has_failed(pods: Pods) -> None:
    name = pods.run(shell(IDLE), activeDeadlineSeconds=1)
    pods.wait_phase(name, "Failed")
    assert pods.status(name)["reason"] == "DeadlineExceeded"
    assert pods.get(name)["metadata"].get("deletionTimestamp") is None


def test_init_containers_run_one_after_the_other_before_the_rest(pods: Pods) -> None:
    mount = [{"name": "diary", "mountPath": "/diary"}]
    init = [
        shell(f"sleep {seconds}; echo {name} >> /diary/all", name=name, volumeMounts=mount)
        for name, seconds in (("first", 5), ("second", 0))
    ]
    name = pods.run(
        shell("cat /diary/all", volumeMounts=mount),
        initContainers=init,
        volumes=[{"name": "diary", "emptyDir": {}}],
        restartPolicy="Never",
    )

    def beginning() -> dict[str, Any]:
        status = pods.status(name)
        assert states(status)["first"][0] == "running"
        return status

    status = pods.cluster.wait_for(beginning, "the first")
    assert states(status)["second"] == states(status)["main"] == ("waiting", "PodInitializing")
    (initialized,) = (one for one in status["conditions"] if one["type"] == "Initialized")
    assert initialized["message"] == "containers with incomplete status: [first second]"
    pods.wait_phase(name, "Succeeded")
    assert pods.logs(name) == "first\nsecond\n"


def test_an_init_container_that_fails_is_repeated_before_anything_else_starts(pods: Pods) -> None:
    name = pods.run(shell(IDLE), initContainers=[shell("exit 1", name="prepare")])
    pods.cluster.wait_for(lambda: pods.container(name, "prepare")["restartCount"] >= 1, "a second attempt")
    assert pods.status(name)["phase"] == "Pending"
    assert state(pods, name) == ("waiting", "PodInitializing")


def test_an_init_container_that_may_not_be_repeated_fails_the_pod(pods: Pods) -> None:
    name = pods.run(shell(IDLE), initContainers=[shell("exit 1", name="prepare")], restartPolicy="Never")
    pods.wait_phase(name, "Failed")
    assert "containerID" not in pods.container(name)


def test_a_sidecar_is_there_before_the_others_and_does_not_keep_the_pod_from_ending(pods: Pods) -> None:
    mount = [{"name": "diary", "mountPath": "/diary"}]
    sidecar = shell(
        "echo began > /diary/sidecar; trap 'exit 0' TERM; sleep 600 & wait",
        name="helper", restartPolicy="Always", volumeMounts=mount,
        startupProbe={"exec": {"command": ["test", "-e", "/diary/sidecar"]}, "periodSeconds": 1},
    )  # fmt: skip
    name = pods.run(
        shell("cat /diary/sidecar", volumeMounts=mount),
        initContainers=[sidecar],
        volumes=[{"name": "diary", "emptyDir": {}}],
        restartPolicy="Never",
    )
    pods.wait_phase(name, "Succeeded")
    assert pods.logs(name) == "began\n"
    assert state(pods, name, "helper") == ("terminated", "Completed")


def test_a_container_leaves_a_message_or_the_last_line_of_its_log(pods: Pods) -> None:
    told = pods.run(shell("echo told > /dev/termination-log; exit 1"), restartPolicy="Never")
    logged = pods.run(
        shell("echo first; echo logged; exit 1", terminationMessagePolicy="FallbackToLogsOnError"),
        restartPolicy="Never",
    )
    for name, message in ((told, "told"), (logged, "logged")):
        pods.wait_phase(name, "Failed")
        assert pods.container(name)["state"]["terminated"]["message"].strip() == message


def job(pods: Pods, name: str, script: str, **spec: object) -> None:
    template = {"spec": {"containers": [{"name": "main", **shell(script)}], "restartPolicy": "Never"}}
    pods.cluster.apply(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "namespace": pods.namespace},
            "spec": {"template": template, **spec},
        }
    )


def test_a_job_is_complete_when_its_pods_succeeded(pods: Pods) -> None:
    job(pods, "well", "exit 0", completions=2, parallelism=2)
    pods.cluster.kubectl(
        "wait", "--for=condition=Complete", "job/well", f"--namespace={pods.namespace}", "--timeout=50s"
    )


def test_a_job_has_failed_when_its_pods_failed_too_often(pods: Pods) -> None:
    job(pods, "badly", "exit 1", backoffLimit=0)
    pods.cluster.kubectl(
        "wait", "--for=condition=Failed", "job/badly", f"--namespace={pods.namespace}", "--timeout=50s"
    )


def test_a_container_sees_only_its_own_files_and_processes(pods: Pods) -> None:
    """It has its own processes, host name and root, and no home, temporary files or devices of this machine."""
    code = """
import os, socket
print(os.getpid(), socket.gethostname(), os.listdir("/tmp"), len([one for one in os.listdir("/proc") if one.isdigit()]))
open("/anywhere", "w").write("x")
print(os.path.exists("/dev/sda"), os.path.exists("/dev/vda"), os.environ["HOSTNAME"])
"""
    name = pods.run(python(code), restartPolicy="Never", hostname="inside")
    pods.wait_phase(name, "Succeeded")
    # The checkout is mounted where it is on this machine.
    kept = [ROOT.parts[2]] if ROOT.is_relative_to("/tmp") else []
    assert pods.logs(name) == f"1 inside {kept} 1\nFalse False inside\n"
