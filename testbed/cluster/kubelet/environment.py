"""The environment of a container: its variables, references, and what a cluster adds."""

import base64
import re
from collections.abc import Mapping
from math import ceil
from typing import Any

from testbed.cluster.addons.pod_scheduler import quantity
from testbed.cluster.api import Object

_REFERENCE = re.compile(r"\$\$|\$\(([-._a-zA-Z0-9]+)\)")


class ConfigError(Exception):
    """The container cannot be configured. The text is the message of CreateContainerConfigError."""


def expand(text: str, known: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by its value. It stays if it has none; `$$` becomes `$`."""

    def one(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return known.get(found[1], found[0])

    return _REFERENCE.sub(one, text)


def of_services(services: Mapping[tuple[str, str], Object], namespace: str) -> dict[str, str]:
    """Variables such as `<SERVICE>_PORT` for every Service of the namespace with an address: "service links"."""
    env: dict[str, str] = {}
    for (where, name), service in sorted(services.items()):
        address = service["spec"].get("clusterIP", "None")
        if where != namespace or address in ("None", ""):
            continue
        prefix = name.upper().replace("-", "_")
        ports: list[Object] = service["spec"].get("ports") or []
        first = ports[0]["port"]
        env |= {f"{prefix}_SERVICE_HOST": address, f"{prefix}_SERVICE_PORT": str(first)}
        env[f"{prefix}_PORT"] = f"{ports[0].get('protocol', 'TCP').lower()}://{address}:{first}"
        for port in ports:
            number, protocol = str(port["port"]), port.get("protocol", "TCP").lower()
            if "name" in port:
                env[f"{prefix}_SERVICE_PORT_{port['name'].upper().replace('-', '_')}"] = number
            each = f"{prefix}_PORT_{number}_{protocol.upper()}"
            env[each] = f"{protocol}://{address}:{number}"
            env |= {f"{each}_PROTO": protocol, f"{each}_PORT": number, f"{each}_ADDR": address}
    return env


def resolve(
    container: Object, pod: Object, objects: Mapping[tuple[str, str], Object | None], given: Mapping[str, str]
) -> dict[str, str]:
    """The variables: `given`, then those of `envFrom`, then those of `env`. `objects` has all that `wanted` returns."""
    env = dict(given)
    for source in container.get("envFrom") or ():
        kind, reference = _kind_of(source, "Ref")
        if (found := _object(objects, kind, reference["name"], reference)) is not None:
            env |= {source.get("prefix", "") + key: value for key, value in data_of(found).items()}
    for variable in container.get("env") or ():
        name, source = variable["name"], variable.get("valueFrom")
        if source is None:
            env[name] = expand(variable.get("value", ""), env)
        elif "fieldRef" in source:
            env[name] = field(pod, source["fieldRef"]["fieldPath"])
        elif "resourceFieldRef" in source:
            env[name] = resource(pod, container, source["resourceFieldRef"])
        else:
            kind, reference = _kind_of(source, "KeyRef")
            found = _object(objects, kind, reference["name"], reference)
            if found is not None and reference["key"] in (data := data_of(found)):
                env[name] = data[reference["key"]]
            elif not reference.get("optional"):
                where = f"{pod['metadata']['namespace']}/{reference['name']}"
                raise ConfigError(f"couldn't find key {reference['key']} in {kind} {where}")
    return env


def wanted(container: Object) -> set[tuple[str, str]]:
    """Kind (`ConfigMap` or `Secret`) and name of each object that `resolve` needs."""
    sources = [_kind_of(one, "Ref") for one in container.get("envFrom") or ()]
    for variable in container.get("env") or ():
        source = variable.get("valueFrom") or {}
        if "configMapKeyRef" in source or "secretKeyRef" in source:
            sources.append(_kind_of(source, "KeyRef"))
    return {(kind, reference["name"]) for kind, reference in sources}


def _kind_of(source: Object, suffix: str) -> tuple[str, Object]:
    if f"configMap{suffix}" in source:
        return "ConfigMap", source[f"configMap{suffix}"]
    return "Secret", source[f"secret{suffix}"]


def _object(objects: Mapping[tuple[str, str], Object | None], kind: str, name: str, reference: Object) -> Object | None:
    found = objects.get((kind, name))
    if found is None and not reference.get("optional"):
        raise ConfigError(f'{kind.lower()} "{name}" not found')
    return found


def data_of(one: Object) -> dict[str, str]:
    return {name: value.decode(errors="replace") for name, value in bytes_of(one).items()}


def bytes_of(one: Object) -> dict[str, bytes]:
    if one["kind"] == "Secret":
        return {name: base64.b64decode(value) for name, value in (one.get("data") or {}).items()}
    plain = {name: value.encode() for name, value in (one.get("data") or {}).items()}
    return plain | {name: base64.b64decode(value) for name, value in (one.get("binaryData") or {}).items()}


def field(pod: Object, path: str) -> str:
    """The value of a `fieldRef`. Raises ConfigError for an unsupported one."""
    if found := re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path):
        return str((pod["metadata"].get(found[1]) or {}).get(found[2], ""))
    if path in ("metadata.labels", "metadata.annotations"):
        values = pod["metadata"].get(path.removeprefix("metadata.")) or {}
        return "\n".join(f'{name}="{value}"' for name, value in sorted(values.items()))
    at: Any = pod
    if path == "status.podIPs":
        return ",".join(one["ip"] for one in pod["status"].get("podIPs") or ())
    for part in path.split("."):
        if not isinstance(at, dict) or part not in at:
            raise ConfigError(f"fieldPath {path} is not there")
        at = at[part]
    return str(at)


def resource(pod: Object, container: Object, reference: Object) -> str:
    """The value of a `resourceFieldRef` in units of `divisor`, rounded up. Without a limit, it is that of the node."""
    spec = pod["spec"]
    if other := reference.get("containerName"):
        container = next(one for one in [*spec["containers"], *spec.get("initContainers", ())] if one["name"] == other)
    which, _, name = reference["resource"].partition(".")
    value = ((container.get("resources") or {}).get(which) or {}).get(name)
    if value is None:
        value = pod.get("nodeAllocatable", {}).get(name, "0") if which == "limits" else "0"
    divisor = quantity(reference.get("divisor") or "1") or 1.0
    return str(ceil(quantity(value) / divisor))
