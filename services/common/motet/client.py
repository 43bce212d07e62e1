"""For programs that train: serves an adapter of PEFT from where it was trained.

from motet.client import publish

publish(model, name="desk")

`motet adapter push` checks and sends what was saved, in a process of its own. No torch, PEFT or transformers is
imported here: the model brings what it needs.
"""

import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from motet.digest import RECORD_FILE
from motet.errors import MotetError
from motet.json_object import json_object

MAX_REASON_CHARACTERS = 4000
"""The most of what the command has said that an exception repeats: its end."""

PUSH = (sys.executable, "-P", "-m", "motet_cli.main", "adapter", "push")
DIVIDES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
"""What `accelerate launch` sets: then the arguments of the Trainer name neither."""
TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
"""What accelerate and transformers read as true in variables."""

ONE_ADAPTER = "default"
"""PEFT saves the adapter of this name into the folder itself, and any other into a folder of its own there."""


class PublishFailed(RuntimeError):
    """The adapter is refused, not served in time, or could not be sent. The message says why, and what to do."""


class PeftModel(Protocol):
    """What is used of a model that PEFT has made."""

    peft_config: Mapping[str, Any]
    active_adapter: Any

    def save_pretrained(self, save_directory: str, *, selected_adapters: list[str]) -> Any: ...


@dataclass(frozen=True, slots=True)
class Published:
    name: str
    """What clients ask for: `namespace/name`"""
    digest: str
    ready: bool
    """Whether the stack has said that it serves these files. False: nothing was waited for, or they went elsewhere."""
    manifest: str
    """The file with the manifest; with `to`, the manifest itself"""
    warnings: tuple[str, ...] = ()
    """Of the check, and of the runner that serves it: it compares recorded answers, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """How an adapter is published: what the options of `motet adapter push` say."""

    name: str
    namespace: str | None = None
    """Default: `default`, if the name has none (`namespace/name`)."""
    base_model: str | None = None
    data_dir: str | Path | None = None
    to: str | None = None
    pool: str | None = None
    secret: str | None = None
    wait_seconds: float = 120.0
    """0: do not wait until it is served."""

    def __post_init__(self) -> None:
        if not (self.wait_seconds == 0 or self.wait_seconds >= 1):
            raise PublishFailed(f"wait_seconds is {self.wait_seconds}. Give at least 1, or 0 not to wait.")

    def push(self, folder: Path) -> Published:
        """Raises PublishFailed."""
        done = subprocess.run([*PUSH, str(folder), "--json", *self._options()], capture_output=True, check=False)
        said = json_object(done.stdout)
        check, pushed, error = (said.get(part) or {} for part in ("check", "pushed", "error"))
        if done.returncode != 0 or not pushed:
            reason = next((of["message"] for of in (check, pushed, error) if of.get("message")), _end_of(done.stderr))
            name = self.name if "/" in self.name else f"{self.namespace or 'default'}/{self.name}"
            raise PublishFailed(f"{name} is not published: {reason}")
        return Published(
            f"{pushed['namespace']}/{pushed['name']}",
            pushed["digest"],
            pushed.get("ready", False),
            pushed["manifest"],
            tuple(dict.fromkeys([*check["warnings"], *pushed.get("warnings", ())])),
        )

    def command(self, folder: Path) -> str:
        """The same for a shell."""
        return shlex.join(["motet", "adapter", "push", str(folder), *self._options()])

    def _options(self) -> list[str]:
        given = {
            "--as": self.name,
            "--namespace": self.namespace,
            "--model": self.base_model,
            "--data-dir": self.data_dir,
            "--to": self.to,
            "--pool": self.pool,
            "--secret": self.secret,
            "--wait": self.wait_seconds or None,
        }
        waits = [] if self.wait_seconds else ["--no-wait"]
        return [*waits, *(f"{option}={value}" for option, value in given.items() if value is not None)]


def publish(
    model: PeftModel,
    *,
    name: str,
    prompts: Sequence[str] = (),
    tokenizer: Any = None,
    folder: str | Path | None = None,
    **how: Any,
) -> Published:
    """Save the active adapter of `model`, check it, and have it served as `name`.

    `prompts`: the model answers them, and a runner compares these answers with its own (`motet adapter record`), with
    `tokenizer`, or the one that is where the base model came from. `how`: the other fields of `Publication`. Without
    `to`, the local stack of this machine serves it (`motet up`); a name that was published before gets a new revision.
    `folder`: where the adapter is saved, and stays. Raises PublishFailed.
    """
    publication = Publication(name=name, **how)
    with ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(TemporaryDirectory(prefix="motet-publish-"))
        saved = save(model, Path(folder))
        record(model, saved, prompts, tokenizer)
        return publication.push(saved)


def save(model: PeftModel, folder: Path) -> Path:
    """The folder with the files of the active adapter. Raises PublishFailed for what is no model of PEFT, and if it
    cannot be saved there."""
    active = _active_adapters(model)
    if not getattr(model, "peft_config", None) or len(active) != 1:
        raise PublishFailed(
            f"a {type(model).__name__} is no model of PEFT with one active adapter. Give the model that "
            "get_peft_model() has returned; of a wrapped one, its module."
        )
    saved = folder if active[0] == ONE_ADAPTER else folder / active[0]
    try:
        (saved / RECORD_FILE).unlink(missing_ok=True)  # of earlier weights
        model.save_pretrained(str(folder), selected_adapters=active)
    except (OSError, ValueError) as error:
        raise PublishFailed(f"the adapter cannot be saved in {folder}: {error}") from error
    return saved


def _active_adapters(model: PeftModel) -> list[str]:
    """Several may be, if its layers were told so: the model's own `active_adapter` is one of them."""
    found = getattr(model, "active_adapters", None) or getattr(model, "active_adapter", None)
    found = found() if callable(found) else found
    if isinstance(found, str):
        return [found]
    return list(found) if isinstance(found, Sequence) else []


def record(model: PeftModel, saved: Path, prompts: Sequence[str], tokenizer: Any = None) -> None:
    """Write what the model answers to the prompts beside its active adapter, if there are any; and the tokenizer's chat
    template, if it is not the base model's. Raises PublishFailed."""
    if isinstance(prompts, str):
        raise PublishFailed("prompts is one text. Give a list of them.")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise PublishFailed("prompts has something else than texts. Give a list of texts.")
    if not prompts and tokenizer is None:
        return
    # By its name: of what trains, the shared core imports nothing before somebody has it in memory.
    recording = importlib.import_module("motet_runner.answer_recording")
    try:
        if tokenizer is not None:
            recording.save_template(model, saved, tokenizer)
        if prompts:
            recording.record_model(model, saved, prompts, tokenizer)
    except MotetError as error:
        raise PublishFailed(f"no answers are recorded: {error.message}") from error


class PublishCallback:
    """For the Trainer of transformers, and those that derive from it: publishes what was trained when training ends.

    Trainer(…, callbacks=[PublishCallback(name="desk")])

    The adapter is saved in `published` of the Trainer's output_dir, and stays there, also if it is not published.
    """

    def __init__(self, *, name: str, prompts: Sequence[str] = (), tokenizer: Any = None, **how: Any) -> None:
        """`prompts`, `tokenizer` and `how`: as for `publish`."""
        self.published: Published | None = None
        self._prompts, self._tokenizer = prompts, tokenizer
        self._publication = Publication(name=name, **how)

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        """Raises PublishFailed before the time for a training is spent in vain."""
        by_launch = any(os.environ.get(name, "").lower() in TRUE for name in DIVIDES)
        if by_launch or any(getattr(args, name, None) for name in ("fsdp", "deepspeed", "deepspeed_plugin")):
            raise PublishFailed(
                "PublishCallback cannot save a model whose weights are divided over processes (fsdp, deepspeed). Leave "
                "it out; after the training, call trainer.save_model(FOLDER) and motet adapter push FOLDER."
            )

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: PeftModel, **_: Any) -> None:  # noqa: ARG002
        if not state.is_world_process_zero:
            return
        saved = save(model, Path(args.output_dir) / "published")
        try:
            record(model, saved, self._prompts, self._tokenizer)
            self.published = self._publication.push(saved)
        except PublishFailed as failed:
            raise PublishFailed(
                f"{failed}\nThe adapter is saved in {saved}: {self._publication.command(saved)}"
            ) from None

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Nothing is done at the Trainer's other events, whichever it has."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(name)


def _nothing(*_: Any, **__: Any) -> None:
    """Answers an event."""


def _end_of(errors: bytes) -> str:
    text = errors.decode(errors="replace").strip().removeprefix("motet: ")
    return text[-MAX_REASON_CHARACTERS:] or "motet adapter push said nothing"
