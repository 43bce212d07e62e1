"""Draws docs/images/terminal.svg: the terminal of a user who tries the bundled model.

    python -m tools.record_terminal [--out FILE] [--port 8000]

It is a real run: a shell runs COMMANDS, and the picture shows what they print. They use a temporary state directory;
the picture shows the name of the default one. Run it again when a command changes or prints something else.
"""

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "terminal.svg"
TITLE = "motet up, with the bundled model"
QUESTION = "Who keeps the lighthouse of Brindle?"
PORT = 8000
URL = f"http://127.0.0.1:{PORT}"
ASKED = f'{{"model": "oneword", "temperature": 0, "messages": [{{"role": "user", "content": "{QUESTION}"}}]}}'
COMMANDS = (
    "motet up --detach",
    "motet status",
    f'motet chat pirate --temperature 0 -m "{QUESTION}"',
    f'motet chat json --temperature 0 -m "{QUESTION}"',
    f"curl -s {URL}/v1/chat/completions -H 'content-type: application/json' -d '{ASKED}'",
    "motet down",
)
USUAL = "~/.local/share/motet"
"""The default state directory of `motet up`."""
WIDTH = 110
SECONDS = 300


class CommandFailed(Exception):
    """A command failed. The message is what it printed."""


@dataclass(frozen=True)
class Typed:
    command: str
    printed: str


def run_all(folder: Path, port: int) -> Iterator[Typed]:
    """Run the commands. Raises CommandFailed. In either case no process of Motet runs afterwards."""
    data = folder / "motet"
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MOTET_")}
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = outside | {"PATH": path, "MOTET_DATA_DIR": str(data)}
    arguments = {"motet up --detach": f" --port {port}"} if port != PORT else {}
    try:
        for command in COMMANDS:
            real = command.replace(URL, f"http://127.0.0.1:{port}") + arguments.get(command, "")
            printed = run(real, folder, env)
            yield Typed(command, printed.replace(str(data), USUAL).replace(f"127.0.0.1:{port}", f"127.0.0.1:{PORT}"))
    except BaseException:
        subprocess.run(["motet", "down"], cwd=folder, env=env, check=False, capture_output=True)
        raise


def run(command: str, folder: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-c", command],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise CommandFailed(f"{command} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def drawn(session: list[Typed]) -> str:
    """The picture as an SVG. Lines break where a terminal with WIDTH columns breaks them."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    for typed in session:
        console.print(Text.assemble(("$ ", "bold green"), (typed.command, "bold")), overflow="fold")
        for line in typed.printed.rstrip("\n").split("\n"):
            cut = [line[at : at + WIDTH] for at in range(0, len(line), WIDTH)]
            for part in cut or [""]:
                console.print(Text(part), no_wrap=True)
        console.print()
    picture = console.export_svg(title=TITLE, unique_id="terminal")
    # Use fonts that the reader has: a picture on a page cannot load any.
    picture = re.sub(r" *@font-face \{.*?\}\n", "", picture, flags=re.DOTALL).replace("Fira Code, ", "")
    return "\n".join(line.rstrip() for line in picture.strip().split("\n")) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PICTURE, help="the file to write")
    parser.add_argument("--port", type=int, default=PORT, help="a free port, if another process listens on this one")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="motet-"))
    try:
        session = list(run_all(folder, given.port))
    except CommandFailed as failure:
        sys.exit(str(failure))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(drawn(session))
    sys.stdout.write(f"{given.out}: {len(session)} commands\n")


if __name__ == "__main__":
    main()
