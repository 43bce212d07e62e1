"""The bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM's clients send them. Pure."""

import json
import re
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import ConfigDict, Field

from motet.described_model import DescribedModel
from motet.domain import ObjectName
from motet.errors import UnsupportedParameter
from motet_gateway.errors import wrong
from motet_gateway.identity.caller import Caller
from motet_gateway.parameters import MAX_MODEL_NAME_LENGTH

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MAX_BODY_BYTES = 64 * 1024
MAX_PATH_CHARACTERS = 4096

_NAME = re.compile(r"(?:([a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)/)?([a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)")
_REPOSITORY = re.compile(r"[A-Za-z0-9][-\w.]*/[A-Za-z0-9][-\w.]*")

LoraName = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_NAME_LENGTH)]


class LoadLoraBody(DescribedModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    lora_name: LoraName
    """The name that clients ask for: at most 63 lower-case letters, digits and `-`, as in a LoRAAdapter's name."""
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARACTERS)]
    """The folder with its files, as PEFT saves it, below one of MOTET_GATEWAY_ADAPTER_FOLDERS. A relative one is below
    the first of these."""
    load_inplace: bool = False
    """Replace an adapter of this name. The old files serve until the new ones are checked."""
    base_model_name: LoraName | None = None
    """The base model that it is for. May be left out where only one is served, and for a name that exists."""
    is_3d_lora_weight: bool | None = None
    """LoRA of experts in one tensor, which vLLM's clients may send as true: not supported."""

    def refuse_unsupported(self) -> None:
        if self.is_3d_lora_weight:
            raise UnsupportedParameter(
                "is_3d_lora_weight: LoRA of experts is not supported; leave this out, or send false",
                param="is_3d_lora_weight",
            )


class UnloadLoraBody(DescribedModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    lora_name: LoraName
    """The name that clients ask for."""


def own_name(said: str, caller: Caller) -> ObjectName:
    """Raises InvalidRequest for what can't be the name of an adapter, or is one of another tenant."""
    found = _NAME.fullmatch(said)
    if found is None:
        raise wrong(
            "lora_name",
            f"{said[:100]!r} can't be the name of an adapter here; use at most 63 lower-case letters, digits and '-', "
            "with a letter or a digit at both ends",
        )
    namespace = found[1] or caller.tenant
    if namespace != caller.tenant and not caller.sees_all:
        raise wrong("lora_name", f"your key is for adapters of {caller.tenant}; leave '{namespace}/' out")
    return ObjectName(namespace, found[2])


def folder_below(said: str, folders: tuple[Path, ...]) -> tuple[Path, Path]:
    """One of `folders`, and the folder below it that is meant. Looks at the text alone: what reads the files refuses
    links that lead out. Raises InvalidRequest."""
    if "://" in said or "\0" in said:
        raise wrong(
            "lora_path",
            "only a folder of this machine can be loaded here; for other sources write a LoRAAdapter "
            "(docs/guides/tenant.md)",
        )
    path = PurePosixPath(folders[0], said)
    below = next((one for one in folders if path.is_relative_to(one)), None)
    if below is None or ".." in path.parts:
        raise wrong(
            "lora_path",
            f"the folder must lie below {' or '.join(map(str, folders))} (MOTET_GATEWAY_ADAPTER_FOLDERS), without '..'",
        )
    return below, Path(path)


def recipe_to_load(name: ObjectName, lora_path: str, group: str) -> str:
    """What to do on a cluster."""
    pool = ObjectName.parse(group)
    return (
        "kubectl apply --server-side -f - <<'END'\n"
        "apiVersion: motet.dev/v1alpha1\n"
        "kind: LoRAAdapter\n"
        f"metadata: {{name: {_text(name.name)}, namespace: {_text(name.namespace)}}}\n"
        "spec:\n"
        f"  poolRef: {{name: {_text(pool.name)}, namespace: {_text(pool.namespace)}}}\n"
        f"  source: {_source(lora_path)}\n"
        "END"
    )


def recipe_to_unload(name: ObjectName) -> str:
    return f"kubectl delete lora {name.name} -n {name.namespace}"


def _source(lora_path: str) -> str:
    if _REPOSITORY.fullmatch(lora_path):
        return f"{{uri: {_text(f'hf://{lora_path}')}}}"
    if "://" in lora_path:
        return f"{{uri: {_text(lora_path)}}}"
    return f"{{persistentVolumeClaim: {{claimName: your-claim, path: {_text(lora_path.strip('/'))}}}}}"


def _text(said: str) -> str:
    """In quotes: YAML takes `on` for a truth value, and `123` for a number. JSON has two escapes for a character beyond
    U+FFFF, which YAML takes for two characters."""
    return '"' + "".join(json.dumps(one)[1:-1] if one <= "\uffff" else f"\\U{ord(one):08x}" for one in said) + '"'
