"""Runs the kernels in C++ with sanitizers (`make sanitize`).

`builds.py` makes a library for Python with AddressSanitizer and UndefinedBehaviorSanitizer, and programs without
Python, also with ThreadSanitizer, which takes torch's own threads for races. In each of them, `source/` checks every
call: shapes, strides, types of numbers, and that all memory that the call may touch is there. While tests run, calls
are recorded; the programs make them again, in memory without a byte to spare, on several threads. `planted.py` has
defects that all this must find.
"""
