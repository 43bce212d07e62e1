"""Finds the base model that an adapter is for: in a folder, or in a pool of the running local stack."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from motet.errors import SetupError
from motet.resources import Manifest, ServingPool
from motet.sources import folder_of
from motet_cli.folders import folder_named
from motet_cli.local_stack import MAX_ADAPTER_BYTES, LocalStack, running_stack
from motet_operator.local.manifest_folder import DeclaredObjects, absolute_uri
from motet_runner.engine_imports import for_an_engine
from motet_runner.interface import EngineConfig
from motet_runner.settings import KERNEL_CACHE

if TYPE_CHECKING:
    from motet_runner.adapters.certification import EngineLimits

KUBECTL_OF_POOLS = "kubectl get spool -A"


@dataclass(frozen=True, slots=True)
class Base:
    uri: str
    """Or its folder"""
    config: EngineConfig | None
    """None: its files are not in a folder of this machine."""
    max_bytes: int = MAX_ADAPTER_BYTES
    with_vllm: bool = False


def base_named(model: str | None, data_dir: Path, *, dtype: str | None, max_lora_rank: int | None) -> Base:
    """The base model in a folder, or that of a pool. `dtype` and `max_lora_rank` replace what the pool says."""
    if model is not None and (folder := folder_named(model)) is not None:
        base = Base(model, EngineConfig(model=folder))
    else:
        stack = _stack_for(model, data_dir)
        base = base_of(pool_named(model, stack.declared()), stack.max_adapter_bytes)
    if base.config is None:
        raise SetupError(f"{base.uri} is not a folder of this machine. Name the folder of its files with --model.")
    config = base.config
    return replace(
        base,
        config=replace(config, dtype=dtype or config.dtype, max_lora_rank=max_lora_rank or config.max_lora_rank),
    )


def pool_named(model: str | None, declared: DeclaredObjects) -> Manifest:
    """The pool that serves this base model, or the only pool. A base model may also be named by its folder."""
    pools = declared.pools
    found = [pool for pool in pools if model is None or model in _names_of(pool)]
    if model is not None and not found and (folder := folder_named(model)) is not None:
        found = [pool for pool in pools if (own := _model_of(pool)[1]) and own.samefile(folder)]
    if not found:
        what = f"no pool serves the base model {model!r}. Served are: {_list(pools)}." if pools else "there is no pool."
        raise SetupError(with_problems(what, declared))
    groups = {_resource(pool).group for pool in found}
    if len(groups) > 1:
        raise SetupError(f"several pools could be meant: {_list(found)}. Name one of these with --model.")
    return found[0]


def with_problems(what: str, declared: DeclaredObjects) -> str:
    """An error of what is declared, with the problems of manifests, which may be its cause."""
    return "\n".join((what, *(f"A manifest has a problem: {problem}" for problem in declared.problems)))


def base_of(pool: Manifest, max_bytes: int) -> Base:
    resource = _resource(pool)
    spec = resource.spec
    uri, folder = _model_of(pool)
    max_bytes = min(max_bytes, spec.admission.max_adapter_size_bytes or max_bytes)
    if folder is None:
        return Base(uri, None, max_bytes)
    engine = spec.engine
    config = EngineConfig(model=folder, dtype=engine.dtype or "auto", device=engine.device or "auto")
    config = replace(config, max_lora_rank=engine.max_lora_rank or config.max_lora_rank)
    return Base(str(folder), config, max_bytes, with_vllm=engine.backend == "vllm")


def limits_of(config: EngineConfig, *, with_vllm: bool = False) -> "EngineLimits":
    try:
        with for_an_engine(KERNEL_CACHE.expanduser(), beside_peft=True):
            from motet_runner.execute.load import base_outline  # imports torch, which takes seconds
    except ModuleNotFoundError as error:
        raise SetupError(
            f"without {error.name} nothing says which linears a base model has. Install motet[runner]."
        ) from error
    return base_outline.limits_of(config, with_vllm=with_vllm)


def _model_of(pool: Manifest) -> tuple[str, Path | None]:
    """Its URI, and its folder if that is one of this machine."""
    uri = absolute_uri(_resource(pool).spec.model.uri, manifest=pool.place.file)
    folder = folder_of(uri)
    return uri, folder if folder is not None and folder.is_dir() else None


def _stack_for(model: str | None, data_dir: Path) -> LocalStack:
    try:
        return running_stack(data_dir, in_a_cluster=KUBECTL_OF_POOLS)
    except SetupError as error:
        said = "no --model was given" if model is None else f"--model {model!r} is no folder"
        raise SetupError(f"{said}, and no local stack runs that could name a base model. Name a folder.") from error


def _names_of(pool: Manifest) -> set[str]:
    resource = _resource(pool)
    return {resource.served_name, str(resource.object_name), str(resource.group)}


def _list(pools: Sequence[Manifest]) -> str:
    return ", ".join(f"{_resource(pool).served_name} (pool {_resource(pool).object_name})" for pool in pools)


def _resource(pool: Manifest) -> ServingPool:
    assert isinstance(pool.resource, ServingPool)
    return pool.resource
