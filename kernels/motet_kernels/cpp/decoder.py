"""The forward pass of a Llama-shaped decoder in C++, with attention and LoRA, in one call (PU-21, OR-05, OR-17).

The structures that it is called with have the names of `source/decoder.cpp`.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from motet_kernels.cpp.attention import AttentionBatch
from motet_kernels.cpp.library import TYPES, Library
from motet_kernels.cpp.linear import PackedWeights
from motet_kernels.cpp.lora_backend import CppBackend, CppBatch
from motet_kernels.decoder_weights import DecoderWeights, LayerWeights, bias_of_columns

_NUMBER, _ADDRESS, _REAL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double

LORA_NAMES = ("q_lora", "k_lora", "v_lora", "o_lora", "gate_lora", "up_lora", "down_lora")
"""The linears of a layer that an adapter may change, in the order in which they are called"""

_WEIGHTS = (
    *("attention_norm", "q_norm", "k_norm", "qkv", "qkv_bias", "o", "o_bias"),
    *("mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias"),
)
KINDS = ("linears", "rows", "attention", "head", "choice")
"""Of stages, as the library counts their time"""

_BUFFERS = ("hidden", "normed", "qkv", "attended", "added", "gate_up", "active")


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _ADDRESS) for name in _WEIGHTS),
        ("scale", _REAL),
        ("window", _NUMBER),
        *((name, _NUMBER) for name in LORA_NAMES),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        *((name, _NUMBER) for name in ("type", "layers", "width", "heads", "kv_heads", "head_dim", "feed_forward")),
        ("vocabulary", _NUMBER),
        ("epsilon", _REAL),
        ("embedding_is_packed", _NUMBER),
        *((name, _ADDRESS) for name in ("embedding", "final_norm", "head", "head_bias")),
        ("of_layer", ctypes.POINTER(_Layer)),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _NUMBER) for name in ("rows", "kept", "threads")),
        *((name, _ADDRESS) for name in ("tokens", "positions", "keep", "rotation", "attention", "lora")),
        ("lora_count", _NUMBER),
        ("lora_products", _ADDRESS),
        *((name, _ADDRESS) for name in (*_BUFFERS, "logits", "chosen", "seconds")),
    )


class CompiledDecoder:
    def __init__(self, library: Library, weights: DecoderWeights[PackedWeights]) -> None:
        self._library = library
        self._weights = weights
        self.dtype = weights.head.dtype
        self.layers = len(weights.layers)
        self._width, self._vocabulary = weights.head.inputs, weights.head.outputs[0]
        first = weights.layers[0]
        self._buffer_widths = {
            "hidden": self._width,
            "normed": self._width,
            "qkv": first.qkv.columns[-1],
            "attended": first.o.inputs,
            "added": self._width,
            "gate_up": first.gate_up.columns[-1],
            "active": first.down.inputs,
        }
        self._room = 0
        """Rows that the buffers have room for"""
        self._buffers: dict[str, torch.Tensor] = {}
        self._step = _Step()
        """What stays in it from call to call are the buffers."""
        self.seconds: npt.NDArray[np.float64] | None = None
        """What the stages of each of KINDS have taken, if somebody wants to know"""
        self._biases: list[torch.Tensor] = []
        """Those that were made here: the library has only their addresses."""
        self._of_layer = (_Layer * self.layers)(*map(self._layer, weights.layers))
        embedding = weights.embedding
        packed = isinstance(embedding, PackedWeights)
        self._decoder = _Decoder(
            type=TYPES[self.dtype],
            layers=self.layers,
            width=self._width,
            heads=weights.heads,
            kv_heads=weights.kv_heads,
            head_dim=weights.head_dim,
            feed_forward=first.gate_up.outputs[0],
            vocabulary=self._vocabulary,
            epsilon=weights.epsilon,
            embedding_is_packed=packed,
            embedding=embedding.address if isinstance(embedding, PackedWeights) else embedding.data_ptr(),
            final_norm=weights.final_norm.data_ptr(),
            head=weights.head.address,
            head_bias=_address(weights.head_bias),
            of_layer=self._of_layer,
        )

    def use_lora(self, backend: CppBackend) -> None:
        """Which of the linears this back end adds to. Before this call, no batch may have LoRA."""
        for layer, weights in zip(self._of_layer, self._weights.layers, strict=True):
            for name, linear in zip(LORA_NAMES, weights.linears, strict=True):
                setattr(layer, name, backend.index_of(linear))

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor,
        *,
        rotation: torch.Tensor,
        attention: AttentionBatch,
        lora: CppBatch | None,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [kept rows, vocabulary] of the rows `keep`.

        `chosen` [kept rows] int64 gets the token of each one's largest logit, -1 where that is infinite or another one
        is not a number.
        `rotation` [positions, 2, half a head] has cosines and sines in fp32, in the order of Pairs.
        """
        count = tokens.numel()
        self._make_room(count)
        logits = torch.empty((keep.numel(), self._vocabulary), dtype=self.dtype)
        step = self._step
        step.rows, step.kept, step.threads = count, keep.numel(), torch.get_num_threads()
        step.tokens, step.positions, step.keep = tokens.data_ptr(), positions.data_ptr(), keep.data_ptr()
        step.rotation, step.attention, step.logits = rotation.data_ptr(), attention.address, logits.data_ptr()
        step.chosen = _address(chosen)
        step.seconds = None if self.seconds is None else self.seconds.ctypes.data
        if lora is not None and lora.count:
            step.lora, step.lora_count, step.lora_products = lora.address, lora.count, lora.products_address
        else:
            step.lora, step.lora_count, step.lora_products = None, 0, None
        if not self._library.decoder_pass(ctypes.addressof(self._decoder), ctypes.addressof(step)):
            raise IndexError(f"a token is not below {self._vocabulary}")
        return logits

    def in_order_of_pairs(self, table: torch.Tensor) -> torch.Tensor:
        """The last dimension in the order in which the library loads numbers, with zeros up to whole Pairs."""
        width = 2 * self._library.lanes
        places = np.empty(width, dtype=np.int64)
        self._library.pair_places(TYPES[self.dtype], places.ctypes.data)
        padded = torch.nn.functional.pad(table, (0, -table.shape[-1] % width))
        ordered: torch.Tensor = padded.unflatten(-1, (-1, width))[..., torch.from_numpy(places)].flatten(-2)
        return ordered.contiguous()

    def _layer(self, layer: LayerWeights[PackedWeights]) -> _Layer:
        return _Layer(
            attention_norm=layer.attention_norm.data_ptr(),
            q_norm=_address(layer.q_norm),
            k_norm=_address(layer.k_norm),
            qkv=layer.qkv.address,
            qkv_bias=self._bias(layer.qkv, layer.qkv_bias),
            o=layer.o.address,
            o_bias=_address(layer.o_bias),
            mlp_norm=layer.mlp_norm.data_ptr(),
            gate_up=layer.gate_up.address,
            gate_up_bias=self._bias(layer.gate_up, layer.gate_up_bias),
            down=layer.down.address,
            down_bias=_address(layer.down_bias),
            scale=layer.scale,
            window=layer.window or 0,
            **dict.fromkeys(LORA_NAMES, -1),
        )

    def _bias(self, packed: PackedWeights, biases: Sequence[torch.Tensor | None]) -> int | None:
        together = bias_of_columns(packed, biases)
        if together is not None:
            self._biases.append(together)
        return _address(together)

    def _make_room(self, rows: int) -> None:
        """The buffers have the size of the most rows so far."""
        if rows <= self._room:
            return
        room = max(rows, 2 * self._room)
        buffers = {name: torch.empty((room, width), dtype=self.dtype) for name, width in self._buffer_widths.items()}
        # Memory may have run out at any of them. Nothing points to one of them before all are there.
        for name, buffer in buffers.items():
            setattr(self._step, name, buffer.data_ptr())
        self._buffers, self._room = buffers, room


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
