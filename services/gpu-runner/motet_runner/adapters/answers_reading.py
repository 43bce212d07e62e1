"""Reads an adapter's recorded answers, and checks them, in a thread of its own: a tokenizer may take seconds."""

import queue
import threading
from pathlib import Path
from typing import Any

import structlog

from motet.errors import AdapterError, AdapterFetchFailed
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.recorded_answers import RecordedAnswers, read_recorded_answers
from motet_runner.base_tokenizer import tokenizer_of

log = structlog.get_logger(__name__)


class Tokenizer:
    """The base model's, read once by the first thread that needs it. If transformers cannot read it, prompts are not
    checked: an adapter is not to blame."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._read: list[Any] = []

    def check(self, recorded: RecordedAnswers) -> None:
        """Raises AdapterIncompatible if it makes other tokens of a prompt."""
        with self._lock:
            if not self._read:
                try:
                    self._read.append(tokenizer_of(self._model))
                except Exception as error:
                    log.warning("tokenizer_not_read", model=str(self._model), error=f"{type(error).__name__}: {error}")
                    self._read.append(None)
            recorded.check_prompts(self._read[0])


class AnswersReading:
    def __init__(self, layout: AdapterLayout, tokenizer: Tokenizer, *, vocabulary: int, positions: int) -> None:
        """`vocabulary`, `positions`: how many the base model has"""
        self._folder = Path(layout.file).parent
        self._tokenizer = tokenizer
        self._vocabulary, self._positions = vocabulary, positions
        self._found: queue.Queue[RecordedAnswers | BaseException] = queue.Queue(1)
        threading.Thread(target=self._run, name="recorded-answers", daemon=True).start()

    def take(self, wait_seconds: float) -> RecordedAnswers | None:
        """None: they are not read yet. Raises what reading or checking them has raised."""
        try:
            result = self._found.get(timeout=wait_seconds) if wait_seconds else self._found.get_nowait()
        except queue.Empty:
            return None
        if isinstance(result, BaseException):
            raise result
        return result

    def _run(self) -> None:
        try:
            recorded = read_recorded_answers(self._folder)
            if recorded is None:
                raise AdapterFetchFailed("The adapter's recorded answers have gone from the runner's disk.")
            recorded.check_vocabulary(self._vocabulary)
            recorded.check_positions(self._positions)
            self._tokenizer.check(recorded)
            self._found.put(recorded)
        except (AdapterError, OSError, MemoryError, RuntimeError) as error:
            self._found.put(error)
        except BaseException as error:  # a tokenizer may do anything, and one in Rust may panic
            self._found.put(
                AdapterError(f"The base model's tokenizer could not read a prompt: {type(error).__name__}.")
            )
