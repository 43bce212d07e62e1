"""The structures of `source/instructions.h`, with the same names and the same members in the same order."""

import ctypes

from motet_kernels.cpp.steps import DIMENSIONS, MAX_INPUTS

NUMBER, ADDRESS, REAL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class Operand(ctypes.Structure):
    _fields_ = (*((name, NUMBER) for name in ("where", "base", "offset", "type")), ("strides", NUMBER * DIMENSIONS))


class Instruction(ctypes.Structure):
    _fields_ = (
        ("operation", NUMBER),
        ("sizes", NUMBER * DIMENSIONS),
        ("out", Operand),
        ("inputs", Operand * MAX_INPUTS),
        ("also", Operand),
        ("number", NUMBER),
        ("real", REAL),
    )


class LinearStep(ctypes.Structure):
    _fields_ = (
        *((name, NUMBER) for name in ("x", "x_offset", "y", "inputs", "outputs")),
        ("packed", ADDRESS),
        ("bias", ADDRESS),
        ("lora", NUMBER),
    )


class Stage(ctypes.Structure):
    _fields_ = (
        *((name, NUMBER) for name in ("kind", "kept", "first", "count")),
        *((name, NUMBER) for name in ("query", "query_offset", "head_stride", "heads", "out", "window")),
        *((name, REAL) for name in ("scale", "softcap")),
    )


class Buffer(ctypes.Structure):
    _fields_ = (("data", ADDRESS), ("row", NUMBER))


class Program(ctypes.Structure):
    _fields_ = (
        *((name, NUMBER) for name in ("type", "type_of_logits", "prefetches", "stages", "scratch_bytes")),
        *((name, ADDRESS) for name in ("of_stage", "instructions", "linears", "buffers")),
    )


class Call(ctypes.Structure):
    _fields_ = (
        *((name, NUMBER) for name in ("rows", "kept", "threads")),
        *((name, ADDRESS) for name in ("keep", "attention", "lora")),
        ("lora_count", NUMBER),
        *((name, ADDRESS) for name in ("lora_products", "chosen", "seconds")),
    )
