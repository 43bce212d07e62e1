"""The volumes of a pod, as folders on this machine. The sandbox mounts them.

Files that come from the API (ConfigMap, Secret, downward API, tokens) are replaced in one step, as a kubelet does it:
`..data` is a link to a folder, and each file a link through it.
"""

import asyncio
import ctypes
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from testbed.cluster.addons.pod_scheduler import quantity
from testbed.cluster.api import Api, ApiError, Object
from testbed.cluster.kubelet.environment import ConfigError, bytes_of, field, resource

_FRESH_S = 1.0
"""How long an object that was read is used again."""

_PATHS = {
    "ConfigMap": "configmaps",
    "Secret": "secrets",
    "PersistentVolumeClaim": "persistentvolumeclaims",
}

Payload = dict[str, tuple[bytes, int]]
"""Content and mode by path."""


class VolumeNotReady(Exception):
    """A volume cannot be mounted now. The text is the message of the event FailedMount."""


class NodeObjects:
    """ConfigMaps, Secrets and claims, as the node may read them. It reads each at most once a second."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._held: dict[tuple[str, str, str], tuple[float, Object | None]] = {}
        self._locks: dict[tuple[str, str, str], asyncio.Lock] = {}

    async def get(self, kind: str, namespace: str, name: str, *, fresh: bool = False) -> Object | None:
        """The object; None if it does not exist, or if the node may not read it (yet)."""
        key = kind, namespace, name
        async with self._locks.setdefault(key, asyncio.Lock()):
            when, found = self._held.get(key, (0.0, None))
            if fresh or time.monotonic() - when > _FRESH_S:
                try:
                    found = await self._api.get(f"/api/v1/namespaces/{namespace}/{_PATHS[kind]}/{name}")
                    found["kind"] = kind
                except ApiError as error:
                    if error.status not in (403, 404):
                        raise
                    found = None
                except (OSError, TimeoutError):
                    if found is None:
                        raise
                    return found  # like a kubelet, use the last known object while the API server cannot be reached
                self._held[key] = time.monotonic(), found
            return found


@dataclass(frozen=True)
class Volume:
    source: Path
    readonly: bool = False


class Volumes:
    """The volumes of one pod."""

    def __init__(self, api: Api, objects: NodeObjects, folder: Path) -> None:
        self._api, self._objects, self._folder = api, objects, folder
        self._ready: dict[str, Volume] = {}
        self._written: dict[str, Payload] = {}
        self._tokens: dict[tuple[str, str], tuple[float, bytes]] = {}
        self._mounted: list[Path] = []

    async def prepare(self, pod: Object) -> dict[str, Volume]:
        """Raises VolumeNotReady if something is missing: call it again later. Later calls also renew the content."""
        for volume in pod["spec"].get("volumes") or ():
            name = volume["name"]
            if name not in self._ready or name in self._written:
                self._ready[name] = await self._make(pod, volume)
        return self._ready

    def remove(self) -> None:
        libc = ctypes.CDLL(None)
        for path in self._mounted:
            libc.umount2(os.fsencode(path), 2)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _make(self, pod: Object, volume: Object) -> Volume:
        name, folder = volume["name"], self._folder / volume["name"]
        if "emptyDir" in volume:
            return self._empty_dir(pod, folder, volume["emptyDir"] or {})
        if "hostPath" in volume:
            return Volume(_host_path(volume["hostPath"]))
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]
            return Volume(await self._claimed(pod, claim["claimName"]), bool(claim.get("readOnly")))
        for kind in ("configMap", "secret", "downwardAPI", "projected"):
            if kind in volume:
                source: Object = volume[kind]
                mode = source.get("defaultMode", 0o644)
                one_source: list[Object] = [{kind: _as_projected(kind, source)}]
                sources: list[Object] = (source.get("sources") or []) if kind == "projected" else one_source
                payload: Payload = {}
                for one in sources:
                    payload |= await self._payload(pod, name, one, mode)
                self._write(pod, folder, payload)
                self._written[name] = payload
                return Volume(folder, readonly=True)
        raise VolumeNotReady(
            f'volume "{name}" is of a kind that this kubelet does not have: {", ".join(volume.keys() - {"name"})}'
        )

    def _empty_dir(self, pod: Object, folder: Path, source: Object) -> Volume:
        folder.mkdir(parents=True, exist_ok=True)  # it stays when the kubelet restarts
        if source.get("medium") == "Memory":
            size = f",size={int(quantity(source['sizeLimit']))}" if "sizeLimit" in source else ""
            done = ctypes.CDLL(None).mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"mode=777{size}".encode())
            if done != 0:
                raise VolumeNotReady(f"no tmpfs at {folder}")
            self._mounted.append(folder)
        folder.chmod(0o777)
        _own(folder, _fs_group(pod), 0o2070)
        return Volume(folder)

    async def _claimed(self, pod: Object, name: str) -> Path:
        claim = await self._objects.get("PersistentVolumeClaim", pod["metadata"]["namespace"], name)
        if claim is None:
            raise VolumeNotReady(f'persistentvolumeclaim "{name}" not found')
        if claim.get("status", {}).get("phase") != "Bound":
            raise VolumeNotReady(f'persistentvolumeclaim "{name}" is not bound')
        held = await self._api.get(f"/api/v1/persistentvolumes/{claim['spec']['volumeName']}")
        if "local" in held["spec"]:
            return Path(held["spec"]["local"]["path"])
        if "hostPath" not in held["spec"]:
            raise VolumeNotReady(f"persistentvolume {held['metadata']['name']} is neither hostPath nor local")
        return _host_path(held["spec"]["hostPath"])

    async def _payload(self, pod: Object, volume: str, source: Object, mode: int) -> Payload:
        namespace = pod["metadata"]["namespace"]
        ((kind, wanted),) = source.items()
        if kind == "serviceAccountToken":
            token = await self._token(pod, wanted)
            return {wanted["path"]: (token, 0o640 if _fs_group(pod) is not None else 0o600)}
        if kind == "downwardAPI":
            return {one["path"]: (_downward(pod, one), one.get("mode", mode)) for one in wanted.get("items") or ()}
        if kind not in ("configMap", "secret"):
            raise VolumeNotReady(f'volume "{volume}" projects a {kind}, which this kubelet does not have')
        what = "ConfigMap" if kind == "configMap" else "Secret"
        found = await self._objects.get(what, namespace, wanted["name"])
        if found is None:
            if wanted.get("optional"):
                return {}
            raise VolumeNotReady(
                f'MountVolume.SetUp failed for volume "{volume}" : {what.lower()} "{wanted["name"]}" not found'
            )
        data = bytes_of(found)
        if not wanted.get("items"):
            return {key: (content, mode) for key, content in data.items()}
        missing = [one["key"] for one in wanted["items"] if one["key"] not in data]
        if missing and not wanted.get("optional"):
            lacks = f"references non-existent {what.lower()} key: {missing[0]}"
            raise VolumeNotReady(f'MountVolume.SetUp failed for volume "{volume}" : {lacks}')
        chosen = [one for one in wanted["items"] if one["key"] in data]
        return {one["path"]: (data[one["key"]], one.get("mode", mode)) for one in chosen}

    async def _token(self, pod: Object, wanted: Object) -> bytes:
        """A token. Like a kubelet, renew it after four fifths of its validity."""
        audience = wanted.get("audience", "")
        key = audience, wanted["path"]
        due, token = self._tokens.get(key, (0.0, b""))
        if time.time() < due:
            return token
        metadata, account = pod["metadata"], pod["spec"].get("serviceAccountName", "default")
        answer = await self._api.create(
            f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {
                    "audiences": [audience] if audience else None,
                    "expirationSeconds": wanted.get("expirationSeconds", 3600),
                    "boundObjectRef": {
                        "apiVersion": "v1",
                        "kind": "Pod",
                        "name": metadata["name"],
                        "uid": metadata["uid"],
                    },
                },
            },
        )
        ends = datetime.fromisoformat(answer["status"]["expirationTimestamp"]).timestamp()
        token = str(answer["status"]["token"]).encode()
        self._tokens[key] = time.time() + 0.8 * (ends - time.time()), token
        return token

    def _write(self, pod: Object, folder: Path, payload: Payload) -> None:
        if self._written.get(folder.name) == payload:
            return
        folder.mkdir(parents=True, exist_ok=True)
        group, user = _fs_group(pod), _only_user(pod)
        content = folder / f"..{time.time_ns()}"
        content.mkdir()
        for path, (data, mode) in payload.items():
            file = content / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            file.chmod(mode)
            if mode == 0o600 and user is not None:  # a token, which only its user may read
                os.chown(file, user, -1)
            _own(file, group, 0o040)
        for inner in (folder, content):
            inner.chmod(0o755)
            _own(inner, group, 0o2050)
        data_link = folder / "..data"
        before = data_link.resolve() if data_link.is_symlink() else None
        fresh = folder / "..data_tmp"
        fresh.symlink_to(content.name)
        fresh.rename(data_link)
        top = {Path(path).parts[0] for path in payload}
        for name in top:
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(f"..data/{name}")
        for stale in folder.iterdir():
            if not stale.name.startswith("..") and stale.name not in top:
                stale.unlink()
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)


def _as_projected(kind: str, source: Object) -> Object:
    return {**source, "name": source["secretName"]} if kind == "secret" else source


def _downward(pod: Object, one: Object) -> bytes:
    if "fieldRef" in one:
        return field(pod, one["fieldRef"]["fieldPath"]).encode()
    return resource(pod, {}, one["resourceFieldRef"]).encode()


def _fs_group(pod: Object) -> int | None:
    group: int | None = (pod["spec"].get("securityContext") or {}).get("fsGroup")
    return group


def _only_user(pod: Object) -> int | None:
    """The user of all containers, if the pod names one user for all."""
    whole = (pod["spec"].get("securityContext") or {}).get("runAsUser")
    each = {(one.get("securityContext") or {}).get("runAsUser", whole) for one in pod["spec"]["containers"]}
    return each.pop() if len(each) == 1 else None


def _own(path: Path, group: int | None, mode: int) -> None:
    """Give it to the pod's group, and add these permissions."""
    if group is not None:
        os.chown(path, -1, group)
        path.chmod(path.stat().st_mode | mode)


def _host_path(source: Mapping[str, str]) -> Path:
    path, kind = Path(source["path"]), source.get("type", "")
    if kind == "DirectoryOrCreate" or not kind:
        with suppress(FileExistsError):
            path.mkdir(parents=True, exist_ok=True, mode=0o755)
    elif kind == "FileOrCreate":
        path.touch()
    if not path.exists():
        raise VolumeNotReady(f"hostPath type check failed: {path} is not a {kind or 'directory'}")
    return path


__all__ = ["ConfigError", "NodeObjects", "Volume", "VolumeNotReady", "Volumes"]
