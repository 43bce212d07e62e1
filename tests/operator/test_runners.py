"""Runner sets as a table of processes."""

import json
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from motet.processes import Phase, ProcessStatus
from motet.settings import ProcessSettings
from motet_operator.local.runner_table import RunnerTable
from motet_operator.local.service_specs import ServiceSpecs
from motet_operator.local.state_directory import MAX_INSTANCE_NAME, StateDirectory
from motet_operator.reconcile import Plan, PoolObject, RunnerInstance, RunnerTemplate, reconcile
from motet_operator.settings import Settings
from motet_operator.sync import UnhealthyRunner
from motet_runner.settings import Settings as RunnerSettings
from tests.operator.builders import DIGEST, NOW, later, name, pool, view


def runners(folder: Path) -> RunnerTable:
    services = ServiceSpecs(StateDirectory(folder), ProcessSettings(data_dir=folder), Settings(manifests=folder))
    return RunnerTable(folder / "runners.json", services)


def status(runner: str, *, ready: bool) -> ProcessStatus:
    return ProcessStatus(
        name=runner,
        kind="runner",
        pid=1,
        phase=Phase.READY if ready else Phase.STARTING,
        restarts=0,
        failures=0,
        exit_status=None,
        reason="",
        log=Path(),
    )


def seen(
    table: RunnerTable,
    statuses: Mapping[str, ProcessStatus],
    unhealthy: Mapping[str, UnhealthyRunner] | None = None,
    *,
    attached: Collection[str] = (),
    now: datetime = NOW,
) -> tuple[RunnerInstance, ...]:
    grace, startup = timedelta(seconds=5), timedelta(seconds=60)
    return table.instances(statuses, (), unhealthy, grace, attached=attached, now=now, startup=startup)


def carry_out(
    table: RunnerTable, *pools: PoolObject, ready: bool = True, attached: Collection[str] = (), seconds: float = 0
) -> Plan:
    statuses = {runner.name: status(runner.name, ready=ready) for runner in table}
    instances = seen(table, statuses, attached=attached, now=later(seconds))
    plan = reconcile(
        view(now=later(seconds), pools=list(pools), runner_sets=list(table.sets()), instances=list(instances))
    )
    table.carry_out(plan)
    return plan


def test_a_pool_becomes_processes_that_know_who_they_are(tmp_path: Path) -> None:
    table = runners(tmp_path)
    carry_out(table, pool("acme/demo", replicas=2, group="g", engine={"kvCacheMiB": 64, "preset": "orca"}))
    first, second = table.specs()
    assert first.name != second.name
    assert first.kind == "runner"
    env = dict(first.env)
    assert env["MOTET_RUNNER_POOL"] == "acme/demo"
    assert env["MOTET_RUNNER_GROUP"] == "acme/g"
    assert env["MOTET_RUNNER_INSTANCE"] == first.name
    assert env["MOTET_RUNNER_LISTEN"].startswith("unix:/")
    assert env["MOTET_RUNNER_LISTEN"].endswith(f"/{first.name}.sock")
    assert (env["MOTET_RUNNER_KV_CACHE_MIB"], env["MOTET_RUNNER_PRESET"]) == ("64", "orca")
    assert "MOTET_RUNNER_MAX_LORA_RANK" not in env, "what the pool leaves open is the runner's to decide"
    assert "MOTET_RUNNER_PREFIX_CACHE" not in env
    assert env["OMP_WAIT_POLICY"] == "passive"
    assert env["MOTET_RUNNER_MANIFESTS"] == str(tmp_path), "its Secrets open sources"


def test_a_dead_runner_leaves_the_cores_to_ready_runners_of_its_pool(tmp_path: Path) -> None:
    table = runners(tmp_path)
    carry_out(table, pool("acme/demo", replicas=2), pool("acme/other"))
    first, second = (runner for runner in table if runner.pool == name("acme/demo"))
    (other,) = (runner for runner in table if runner.pool == name("acme/other"))
    up = status(other.name, ready=True)
    assert table.others_serve(first, [status(second.name, ready=True), up])
    assert not table.others_serve(first, [status(second.name, ready=False), up]), "nobody takes over its requests"
    assert not table.others_serve(other, [status(first.name, ready=True), status(second.name, ready=True)])
    served = [status(second.name, ready=True)]
    assert not table.others_serve(first, served, leaving={second.name}), "it drains, or hangs"
    assert table.others_serve(first, served, leaving={other.name})
    waits = {first.name: 2.0, second.name: 0.0, other.name: 0.0}
    specs = table.specs(lambda runner: waits[runner.name])
    assert {spec.name: spec.restart_wait() for spec in specs} == waits


@pytest.mark.parametrize("wanted", [True, False])
def test_a_runner_reads_from_its_environment_whether_it_has_a_prefix_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, wanted: bool
) -> None:
    table = runners(tmp_path)
    carry_out(table, pool("acme/demo", engine={"prefixCache": wanted}))
    (spec,) = table.specs()
    monkeypatch.setenv("MOTET_RUNNER_PREFIX_CACHE", spec.env["MOTET_RUNNER_PREFIX_CACHE"])
    assert RunnerSettings(model_uri="file:///model").prefix_cache is wanted


def test_a_runner_reads_from_its_environment_whether_sequences_have_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = runners(tmp_path)
    carry_out(table, pool("acme/demo", engine={"preset": "s3", "contiguous": True}))
    (spec,) = table.specs()
    monkeypatch.setenv("MOTET_RUNNER_CONTIGUOUS", spec.env["MOTET_RUNNER_CONTIGUOUS"])
    assert RunnerSettings(model_uri="file:///model").contiguous


def test_a_runner_reads_from_its_environment_what_vllm_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = runners(tmp_path)
    vllm = {"kvCacheDtype": "fp8", "enforceEager": True, "attentionBackend": "FLASHINFER"}
    carry_out(
        table, pool("acme/demo", engine={"backend": "vllm", "parallel": {"tensor": 4, "stages": 2}, "vllm": vllm})
    )
    (spec,) = table.specs()
    for variable, value in spec.env.items():
        monkeypatch.setenv(variable, value)
    config = RunnerSettings().engine_config(tmp_path)
    assert (config.tensor_parallel, config.stages) == (4, 2)
    assert (config.kv_cache_dtype, config.enforce_eager, config.attention_backend) == ("fp8", True, "FLASHINFER")


def test_a_runner_reads_from_its_environment_which_engine_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = runners(tmp_path)
    carry_out(table, pool("acme/demo", engine={"backend": "vllm"}))
    (spec,) = table.specs()
    assert RunnerSettings(model_uri="file:///model").backend == "motet"
    monkeypatch.setenv("MOTET_RUNNER_BACKEND", spec.env["MOTET_RUNNER_BACKEND"])
    monkeypatch.setenv("MOTET_RUNNER_ENGINE_PYTHON", "/vllm/bin/python")
    found = RunnerSettings(model_uri="file:///model")
    assert (found.backend, found.engine_python) == ("vllm", Path("/vllm/bin/python"))


def test_a_runner_reads_from_its_environment_which_quantile_its_pool_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = runners(tmp_path)
    carry_out(table, pool("acme/demo", engine={"promiseQuantile": 95}))
    (spec,) = table.specs()
    monkeypatch.setenv("MOTET_RUNNER_PROMISE_QUANTILE", spec.env["MOTET_RUNNER_PROMISE_QUANTILE"])
    assert RunnerSettings(model_uri="file:///model").promise_quantile == 95
    monkeypatch.setenv("MOTET_RUNNER_PROMISE_QUANTILE", "85")
    with pytest.raises(ValueError, match=r"promise_quantile\s+Input should be 50, 80, 90 or 95"):
        RunnerSettings(model_uri="file:///model")


def test_a_new_operator_knows_the_model_source_of_an_adopted_runner(tmp_path: Path) -> None:
    table = runners(tmp_path)
    model = {"uri": "hf://org/base", "revision": "v2", "credentialsSecretRef": {"name": "key"}}
    carry_out(table, pool("acme/demo", model=model))
    (spec,) = runners(tmp_path).specs()
    assert spec.env["MOTET_RUNNER_MODEL_REVISION"] == "v2"
    assert spec.env["MOTET_RUNNER_MODEL_CREDENTIALS"] == "acme/key"
    assert list(runners(tmp_path).sets()) == list(table.sets())


def test_the_longest_names_still_fit_a_socket(tmp_path: Path) -> None:
    table = runners(tmp_path)
    carry_out(table, pool(f"{'n' * 63}/{'p' * 63}", replicas=1000))
    assert max(len(runner.name) for runner in table) <= MAX_INSTANCE_NAME


def test_the_table_survives_its_operator(tmp_path: Path) -> None:
    before, after = pool(replicas=1), pool(replicas=1, engine={"maxLoraRank": 8})
    table = runners(tmp_path)
    carry_out(table, before)
    carry_out(table, after)
    carry_out(table, after)  # both are ready now, so the old one drains
    again = runners(tmp_path)
    assert list(again) == list(table)
    assert [runner.draining_until for runner in again] == [later(30), None]
    assert {each.template.engine.max_lora_rank for each in again.sets()} == {None, 8}
    carry_out(again, after, seconds=31)
    assert [runner.template.engine.max_lora_rank for runner in again] == [8]


FULL = {
    "model": {"uri": "hf://org/base", "revision": "v2", "digest": DIGEST, "credentialsSecretRef": {"name": "key"}},
    "engine": {"preset": "orca", "kvCacheMiB": 64, "prefixCache": False},
    "slo": {"tpotMilliseconds": 100},
    "adapterVolumes": [
        {"claimName": "a", "subPath": "b", "pathPrefix": "", "allowedNamespaces": {"from": "All"}},
        {
            "claimName": "c",
            "allowedNamespaces": {"from": "Selector", "selector": {"matchLabels": {"team": "law"}}},
        },
    ],
    "template": {
        "labels": {"team": "law"},
        "resources": {"limits": {"cpu": 2, "memory": "8Gi"}},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "env": [{"name": "OMP_NUM_THREADS", "value": "2"}],
    },
}


def test_a_new_operator_adopts_a_runner_as_it_is_whatever_its_pool_sets(tmp_path: Path) -> None:
    table, declared = runners(tmp_path), pool("acme/demo", group="g", **FULL)
    carry_out(table, declared)
    (runner,) = table
    unset = RunnerTemplate(group=runner.template.group, model_uri="")
    same = {field.name for field in fields(unset) if getattr(unset, field.name) == getattr(runner.template, field.name)}
    assert same == {"group", "pod_digest"}, "the pool above is to set each field; only pods have a digest"
    again = runners(tmp_path)
    assert list(again) == [runner]
    assert [spec.fingerprint for spec in again.specs()] == [spec.fingerprint for spec in table.specs()]
    assert carry_out(again, declared).drains == ()
    assert list(again) == [runner]


def test_two_pools_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    table = runners(tmp_path)
    carry_out(table, pool("a/demo"), pool("b/demo"))
    assert {runner.pool for runner in table} == {name("a/demo"), name("b/demo")}
    assert len({runner.name for runner in table}) == 2


def test_a_table_that_cannot_be_read_is_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "runners.json").write_text('[{"name": "x"}]')
    assert list(runners(tmp_path)) == []


def test_a_late_report_about_a_killed_runner_does_not_kill_its_successor(tmp_path: Path) -> None:
    table = runners(tmp_path)
    carry_out(table, pool())
    (runner,) = table
    news = {runner.name: UnhealthyRunner("first", "its engine hangs", later(0))}
    (hung,) = seen(table, {}, news)
    assert (hung.unhealthy, hung.replace_at) == ("its engine hangs", later(5))
    table.replaced(runner.name, "first")
    (fresh,) = seen(runners(tmp_path), {}, news)
    assert (fresh.unhealthy, fresh.replace_at) == ("", None)
    again = {runner.name: UnhealthyRunner("second", "it hangs again", later(9))}
    (hung,) = seen(table, {}, again)
    assert hung.unhealthy == "it hangs again"


def test_nobody_waits_for_ever_for_a_runner_that_starts(tmp_path: Path) -> None:
    table = runners(tmp_path)
    carry_out(table, pool(replicas=2))
    first, second = table
    starts, ready = status(second.name, ready=False), status(second.name, ready=True)
    news = {first.name: UnhealthyRunner("it", "its engine hangs", later(0))}

    def replaced(at: float, other: ProcessStatus) -> list[str]:
        found = seen(table, {first.name: status(first.name, ready=True), second.name: other}, news, now=later(at))
        parts = {"pools": [pool(replicas=2)], "runner_sets": list(table.sets()), "instances": list(found)}
        return [one.instance for one in reconcile(view(now=later(at), **parts)).replacements]

    assert replaced(10, starts) == replaced(69, starts) == []
    assert replaced(70, starts) == [first.name]
    assert replaced(71, replace(starts, pid=2)) == [], "it was started again"
    assert replaced(132, ready) == [first.name]
    assert replaced(133, starts) == [], "it begins anew"


def test_a_late_report_about_a_runner_that_ended_does_not_kill_its_successor(tmp_path: Path) -> None:
    table = runners(tmp_path)
    carry_out(table, pool())
    (runner,) = table
    news = {runner.name: UnhealthyRunner("first", "its engine hangs", later(0))}

    def judged(pid: int) -> str:
        now = ProcessStatus(
            name=runner.name,
            kind="runner",
            pid=pid,
            phase=Phase.STARTING,
            restarts=0,
            failures=0,
            exit_status=None,
            reason="",
            log=tmp_path / "log",
        )
        (one,) = seen(table, {runner.name: now}, news)
        return one.unhealthy

    assert judged(7) == "its engine hangs"
    assert judged(8) == "", "the process manager was faster"


def test_a_removed_runner_takes_no_work_while_its_process_ends(tmp_path: Path) -> None:
    table = runners(tmp_path)
    carry_out(table, pool())
    (runner,) = table
    plan = carry_out(table, pool(replicas=0))
    assert [drain.instance for drain in table.drains(plan, [runner.name])] == [runner.name]
    plan = carry_out(table, pool(replicas=0), seconds=31)
    assert list(table) == []
    assert [drain.instance for drain in table.drains(plan, [runner.name])] == [runner.name]
    plan = carry_out(table, pool(replicas=0), seconds=32)
    assert [drain.instance for drain in table.drains(plan, [runner.name, "gateway"])] == [runner.name]
    assert list(table.drains(plan, ["gateway"])) == []
    assert list(table.drains(plan, [runner.name])) == []


def test_a_runner_that_misses_a_probe_with_work_is_drained_first(tmp_path: Path) -> None:
    table = runners(tmp_path)
    carry_out(table, pool())
    (runner,) = table
    plan = carry_out(table, pool(replicas=0), ready=False, attached={runner.name})
    assert [drain.instance for drain in plan.drains] == [runner.name]
    assert list(table), "it was ended at once, with what it had"
    carry_out(table, pool(replicas=0), ready=False, attached={runner.name}, seconds=31)
    assert list(table) == []


def test_a_drain_that_is_taken_back_is_forgotten_by_the_table(tmp_path: Path) -> None:
    table = runners(tmp_path)
    carry_out(table, pool(replicas=2))
    carry_out(table, pool(replicas=1))
    assert sorted(runner.draining_until is None for runner in table) == [False, True]
    names = [runner.name for runner in table]
    carry_out(table, pool(replicas=2), seconds=1)
    for seen in (table, runners(tmp_path)):
        assert [(runner.name, runner.draining_until) for runner in seen] == [(name, None) for name in names]


def test_the_version_before_reads_the_names_in_the_table(tmp_path: Path) -> None:
    table = runners(tmp_path)
    carry_out(table, pool("a/demo"))
    (stored,) = json.loads((tmp_path / "runners.json").read_text())
    assert stored["pool"] == stored["template"]["group"] == {"namespace": "a", "name": "demo"}
    assert list(runners(tmp_path)) == list(table)
