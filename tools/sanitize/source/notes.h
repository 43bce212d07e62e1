// What Python's tensors are, as far as their addresses were asked for: who calls a library by address may name an
// address of another type, or one with too few numbers behind it.
#pragma once

#include <cstdint>

// Why memory is not what a call takes it for; null: nothing is known against it. `numbers`: as walk.h calls them.
const char *wrong_by_its_note(const void *at, int64_t bytes, int64_t numbers);
