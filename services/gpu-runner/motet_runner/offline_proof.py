"""Proves an adapter without a runner: an engine as a runner here would have one loads it, and proves it where it lies
in its memory. PEFT computes beside it, if it is installed.

What this machine cannot do is named, and refuses no adapter: a runner elsewhere may have more memory, or a GPU.
"""

import gc
import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from motet.errors import AdapterError, ModelFileDamaged, MotetError, SetupError
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.adapters.recorded_answers import Comparison, RecordedAnswers
from motet_runner.answer_comparison import compare_with_engine
from motet_runner.answer_recording import USUAL_PROMPTS, Recording, answers_of_peft
from motet_runner.execute.load.checkpoint_headers import Checkpoint
from motet_runner.execute.load.device import device_named
from motet_runner.execute.load.dtype import dtype_named
from motet_runner.execute.load.load_model import read_config
from motet_runner.execute.load.text_model import checkpoint_of
from motet_runner.interface import AdapterFailed, EngineConfig, ProofEnded
from motet_runner.memory.host_limit import available_host_bytes
from motet_runner.memory.out_of_memory import is_out_of_memory
from motet_runner.offline import OfflineEngine
from motet_runner.settings import KERNEL_CACHE

ADAPTER = "adapter"
PEFT_PROMPTS, PEFT_TOKENS = 3, 16
"""The answers that PEFT computes: enough to show what is lost of a configuration, in a second with a small model"""
SPARE_SHARE, SPARE_BYTES = 0.25, 256 << 20
"""What a model takes beside its weights: copies of some, and what is computed"""
GIB = 1 << 30


@dataclass(slots=True)
class OfflineProof:
    proof: Proof | None = None
    not_proved: str = ""
    """Why linears and effect are not proved"""
    peft: Comparison | None = None
    not_with_peft: str = ""
    """Why nothing is compared with PEFT"""


def prove(config: EngineConfig, layout: AdapterLayout, *, recorded: bool) -> OfflineProof:
    """`config`: with the type of the check. `recorded`: the adapter has answers to compare. Raises AdapterError if a
    runner would refuse the adapter."""
    found = OfflineProof()
    answers = None
    try:
        answers = _of_peft(config, Path(layout.file).parent)
    except _NotHere as error:
        found.not_with_peft = str(error)
    try:
        _check_room(lambda: checkpoint_of(config.model, read_config(config.model)), config.dtype, config.device)
        engine = _engine(config)
        found.proof = _proved(engine, layout, recorded=recorded)
        if not found.proof.linears:
            found.not_proved = (
                "a runner with this device proves adapters only if MOTET_RUNNER_PROVE_ADAPTERS tells it to"
            )
        if answers is not None:
            found.peft = compare_with_engine(engine, ADAPTER, answers)
    except _NotHere as error:
        found.not_proved = str(error)
    except ModelFileDamaged:  # nothing was checked with the weights that are to serve
        raise
    except (MotetError, MemoryError, RuntimeError) as error:
        if isinstance(error, AdapterError) and error.reason:  # else the engine has given up
            raise
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        found.not_proved = _first_line(error)
    if answers is not None and found.peft is None:
        found.not_with_peft = "the engine computes nothing here"
    return found


class _NotHere(Exception):
    """Why this machine does not do it"""


def _of_peft(config: EngineConfig, folder: Path) -> RecordedAnswers:
    """In 32 bits, so that its own rounding counts for nothing"""
    if importlib.util.find_spec("peft") is None:
        raise _NotHere("PEFT is not installed (pip install peft)")
    _check_room(lambda: Checkpoint(config.model), "float32", config.device)
    try:
        found = answers_of_peft(Recording(folder, config.model, USUAL_PROMPTS[:PEFT_PROMPTS], tokens=PEFT_TOKENS))
    except SetupError as error:
        raise _NotHere(_first_line(error)) from error
    gc.collect()  # before the engine loads the same model: PEFT's modules name each other
    return found


def _check_room(checkpoint: Callable[[], Checkpoint], dtype: str, device: str) -> None:
    """On a GPU, its own memory is looked at when the weights are loaded."""
    if device_named(device).type != "cpu":
        return
    try:
        weights = checkpoint().bytes_as(dtype_named(dtype, device_named(device), {}))
    except ModelFileDamaged:
        raise
    except SetupError as error:
        raise _NotHere(_first_line(error)) from error
    needed, left = int(weights * (1 + SPARE_SHARE)) + SPARE_BYTES, available_host_bytes()
    if needed > left:
        raise _NotHere(
            f"the base model takes about {needed / GIB:.1f} GiB in {dtype}, and {left / GIB:.1f} GiB are left here"
        )


def _engine(config: EngineConfig) -> OfflineEngine:
    as_of_a_runner = {"prove_adapters": None, "kernel_cache": KERNEL_CACHE.expanduser()}
    for_one = replace(config, max_resident_adapters=1, max_concurrent_sequences=1, **as_of_a_runner)  # type: ignore[arg-type]
    options = asdict(for_one)
    return OfflineEngine(options.pop("model"), **options)


def _proved(engine: OfflineEngine, layout: AdapterLayout, *, recorded: bool) -> Proof:
    """Raises what the engine has found, or why it has given up."""
    order = ProofOrder(1, linears=engine.info.proves, recorded=recorded)
    if not order.linears and not order.recorded:
        engine.add_certified(ADAPTER, layout)
        return Proof("", 0.0, 0.0, linears=False)
    engine.add_certified(ADAPTER, layout, proof=order)
    while engine.engine.has_work():
        for event in engine.engine.step().events:
            if isinstance(event, AdapterFailed):
                raise event.error
            if isinstance(event, ProofEnded):
                if isinstance(event.found, Proof):
                    return event.found
                raise event.found
    raise AdapterError("The engine has not proved the adapter.")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
