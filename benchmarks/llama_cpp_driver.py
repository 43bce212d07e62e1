"""Runs llama.cpp for `benchmarks.llama_cpp_peer`, with the Python of llama.cpp's own environment.

It understands the questions of `benchmarks.vllm_driver`, without adapters. "load" also has "format" (bf16 or q8_0),
"threads" and "files", the folder where models are kept that have been written in llama.cpp's format. All sequences are
computed together, each time with one call: first their prompts, then a token of each.
"""

import ctypes
import importlib
import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gguf_of_llama import write_gguf
from benchmarks.vllm_driver import serve

BATCH = 2048
"""The most tokens of a call."""


class LlamaCpp:
    def load(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._llama = llama = importlib.import_module("llama_cpp")
        llama.llama_backend_init()
        path = self._file(Path(asked["model"]), Path(asked["files"]), asked["format"])
        self._model = llama.llama_model_load_from_file(os.fsencode(path), llama.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        sizes = llama.llama_context_default_params()
        sizes.n_ctx = asked["length"] * asked["sequences"]
        sizes.n_batch, sizes.n_seq_max = BATCH, asked["sequences"]
        sizes.n_threads = sizes.n_threads_batch = asked["threads"]
        # Sequences that share no prefix are faster in parts of their own.
        sizes.kv_unified = asked.get("unified", False)
        self._context = llama.llama_init_from_model(self._model, sizes)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context of this size")
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(BATCH, 0, 1)
        return {
            "version": version("llama_cpp_python"),
            "system": llama.llama_print_system_info().decode(),
            "threads": llama.llama_n_threads(self._context),
        }

    def generate(self, asked: dict[str, Any]) -> dict[str, Any]:
        llama, prompts = self._llama, asked["prompts"]
        llama.llama_memory_clear(llama.llama_get_memory(self._context), False)
        began = time.perf_counter()
        logits = self._prompts(prompts)
        firsts = logits
        tokens = [logits.argmax(axis=1)]
        for place in range(asked["output"] - 1):
            rows = [(int(token), len(prompt) + place, True) for token, prompt in zip(tokens[-1], prompts, strict=True)]
            logits = self._decode([(*row, sequence) for sequence, row in enumerate(rows)])
            tokens.append(logits.argmax(axis=1))
        seconds = time.perf_counter() - began
        answer: dict[str, Any] = {"seconds": seconds, "tokens": np.stack(tokens, axis=1).tolist()}
        if asked["margins"]:
            best = np.sort(firsts, axis=1)
            answer["margins"] = (best[:, -1] - best[:, -2]).tolist()
        return answer

    def _prompts(self, prompts: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
        """The logits after each. Prompts that are too many for one call are computed in several."""
        rows = [
            (token, place, place == len(prompt) - 1, sequence)
            for sequence, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        return np.concatenate([self._decode(rows[i : i + BATCH]) for i in range(0, len(rows), BATCH)])

    def _decode(self, rows: Sequence[tuple[int, int, bool, int]]) -> np.ndarray[Any, Any]:
        """`rows`: token, place, whether its logits are wanted, sequence. Returns the wanted logits, in this order."""
        batch, wanted = self._batch, []
        batch.n_tokens = len(rows)
        for i, (token, place, wants, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, place, wants
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            if wants:
                wanted.append(i)
        if status := self._llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        found = np.empty((len(wanted), self._vocabulary), np.float32)
        for into, i in zip(found, wanted, strict=True):
            at = self._llama.llama_get_logits_ith(self._context, i)
            ctypes.memmove(into.ctypes.data, at, into.nbytes)
        return found

    def _file(self, model: Path, files: Path, form: str) -> Path:
        """Written once for each model. The 8-bit one is made by llama.cpp itself."""
        path = files / f"{model.name}-{form}.gguf"
        if path.exists():
            return path
        files.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        if form == "bf16":
            write_gguf(model, unfinished)
        else:
            how = self._llama.llama_model_quantize_default_params()
            how.ftype = self._llama.LLAMA_FTYPE_MOSTLY_Q8_0
            source = self._file(model, files, "bf16")
            if self._llama.llama_model_quantize(os.fsencode(source), os.fsencode(unfinished), ctypes.byref(how)):
                raise RuntimeError(f"llama.cpp cannot quantise {source}")
        unfinished.rename(path)
        return path


if __name__ == "__main__":
    serve(LlamaCpp())
