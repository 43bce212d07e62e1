"""`motet adapter record`: writes an adapter's answers into its folder, where it was trained."""

from pathlib import Path
from typing import get_args

import typer

from motet.digest import RECORD_FILE, adapter_digest
from motet.errors import SetupError
from motet_cli.adapter_bases import base_named
from motet_cli.adapter_check import adapter_folder_named
from motet_cli.folders import expanded, readable

MAX_PROMPTS_BYTES = 1 << 20


def record(data_dir: Path, folder: Path, *, model: str | None, prompts: Path | None, dtype: str) -> int:
    from motet_runner.answer_recording import USUAL_PROMPTS, Recording, check_folder
    from motet_runner.answer_recording import record as run

    folder = adapter_folder_named(folder)
    config = base_named(model, data_dir, dtype=None, max_lora_rank=None).config
    assert config is not None
    with readable(folder):
        check_folder(folder)
        given = USUAL_PROMPTS if prompts is None else _lines(prompts)
        found = run(Recording(folder, config.model, given, dtype=_known(dtype)))
        digest = adapter_digest(folder)
    tokens = sum(len(answer.answer_ids) for answer in found.answers)
    typer.echo(f"recorded {len(found.answers)} answers ({tokens} tokens, {found.dtype}) in {folder / RECORD_FILE}")
    typer.echo(f"The adapter's digest is now {digest}.")
    return 0


def _known(dtype: str) -> str:
    from motet_runner.adapters.recorded_answers import Dtype

    if dtype not in get_args(Dtype):
        raise SetupError(f"--dtype {dtype!r} is unknown. Choose one of {', '.join(get_args(Dtype))}.")
    return dtype


def _lines(file: Path) -> list[str]:
    """One prompt per line"""
    with readable(file, "--prompts"), expanded(file).open("rb") as opened:
        raw = opened.read(MAX_PROMPTS_BYTES + 1)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise SetupError(f"--prompts: {file} is not UTF-8. Write one prompt per line.") from None
    if len(raw) > MAX_PROMPTS_BYTES:
        raise SetupError(f"--prompts: {file} has more than {MAX_PROMPTS_BYTES} bytes. Give a few, one per line.")
    return [line for line in text.splitlines() if line.strip()]
