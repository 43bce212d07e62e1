"""What an image runs. `motet/<deployable>` is that deployable of this checkout, as its Dockerfile says. Besides these,
there are only a few images for tests of the test cluster itself.
"""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from testbed.tree import ROOT

_REFERENCE = re.compile(r"(?:.+?/)??(?P<name>[^/:@]+/[^/:@]+|[^/:@]+)(?::[\w.-]+)?(?:@sha256:[0-9a-f]{64})?")
_MODULE = re.compile(r"motet_(\w+)(\.\w+)*")


class NotPullable(Exception):
    """The image does not exist. The text is for the pod's status."""


@dataclass(frozen=True)
class Image:
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    user: str = ""
    """Numeric, with or without a group; empty is root."""
    folder: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    users: tuple[tuple[str, int], ...] = ()
    """The names and numbers of the users that its build adds."""
    compiled_kernels: bool = False
    """Whether its build installs them."""


FOR_TESTS = {
    "busybox": Image(command=("sh",)),
    "python": Image(command=("python",)),
    "pause": Image(entrypoint=("python", "-c", "import signal; signal.sigwait({signal.SIGTERM, signal.SIGINT})")),
}


def image(reference: str) -> Image:
    """What the image runs. Raises NotPullable if it does not exist."""
    found = _REFERENCE.fullmatch(reference)
    name = found["name"] if found else ""
    owner, _, deployable = name.rpartition("/")
    if owner != "motet" and deployable in FOR_TESTS:
        return FOR_TESTS[deployable]
    if owner == "motet":
        for folder in (*sorted((ROOT / "services").iterdir()), ROOT / "operator"):
            if (folder / "Dockerfile").exists():
                one = parse((folder / "Dockerfile").read_text())
                if deployable in deployables(one):
                    return one
    raise NotPullable(f'failed to pull and unpack image "{reference}": not found')


def deployables(one: Image) -> set[str]:
    """The deployable of each module that the image starts: `-m motet_gateway` is `gateway`."""
    return {found[1] for part in one.entrypoint if (found := _MODULE.fullmatch(part))}


def parse(dockerfile: str) -> Image:
    """The parts of a Dockerfile's last stage that the test cluster needs."""
    words: dict[str, str] = {}
    env: dict[str, str] = {}
    for instruction, rest in _instructions(dockerfile):
        if instruction == "FROM":
            words.clear()
            env.clear()
        elif instruction == "ENV":
            pairs = (pair.partition("=") for pair in shlex.split(rest))
            env |= {name: value for name, equals, value in pairs if equals and name != "PATH" and "$" not in value}
        else:
            words[instruction] = rest
    return Image(
        entrypoint=_exec_form(words.get("ENTRYPOINT", "[]")),
        command=_exec_form(words.get("CMD", "[]")),
        user=words.get("USER", ""),
        folder=words.get("WORKDIR", "/"),
        env=env,
        users=tuple(
            (name, int(number)) for number, name in re.findall(r"useradd\b.*--uid (\d+).* (\w+)$", words.get("RUN", ""))
        ),
        compiled_kernels="-m motet_kernels.cpp --install" in dockerfile,
    )


def _instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    joined = re.sub(r"\\\s*\n", " ", re.sub(r"(?m)^\s*#.*$", "", dockerfile))
    for line in filter(None, map(str.strip, joined.splitlines())):
        instruction, _, rest = line.partition(" ")
        yield instruction.upper(), rest.strip()


def _exec_form(text: str) -> tuple[str, ...]:
    if not text.startswith("["):
        raise NotPullable(f"an entry point in shell form does not get signals: {text}")
    return tuple(json.loads(text))


def interpreter_folders(prefix: Path, base: Path) -> list[str]:
    """The folders of this machine that a container sees beside the system: this checkout and its interpreter."""
    wanted = {str(ROOT), str(prefix), str(prefix.resolve()), str(base), str(base.resolve())} - {"/usr"}
    return sorted(one for one in wanted if not any(one.startswith(f"{other}/") for other in wanted))
