"""What a layer computes between its products equals torch, also for sizes that are no power of two."""

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from motet_kernels.gpu.launches import traced_launches
from motet_kernels.gpu.layer_kernels import HeadNorms, add_norm, rotate_and_write, silu_multiply
from tests.gpu.devices import DEVICE, DTYPES, in_types

CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EPSILON = 1e-5
PAGE_TOKENS = 16


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(DEVICE, dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), expected.float(), atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize(("size", "dtype"), in_types((5, 80), (1, 32), (3, 1030), (21, 24)))
def test_add_norm(size: tuple[int, int], dtype: torch.dtype) -> None:
    rows, width = size
    hidden, added = random(rows, width, dtype=dtype), random(rows, 2 * width, dtype=dtype, seed=1)[:, :width]
    weight = random(width, dtype=dtype, seed=2)
    sums = (hidden.float() + added.float()).to(dtype)
    expected = rms_norm(sums.float(), (width,), weight.float(), EPSILON)
    with traced_launches() as trace:
        normed = add_norm(hidden, added, weight, EPSILON)
    assert len(trace) == 1
    assert torch.equal(hidden, sums)
    assert_close(normed, expected, dtype)
    assert_close(add_norm(hidden, None, weight, EPSILON), expected, dtype)
    assert torch.equal(hidden, sums), "nothing is added"


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm_of_some_rows_leaves_the_others_alone(dtype: torch.dtype) -> None:
    hidden, added, weight = (
        random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate([(7, 48)] * 2 + [(48,)])
    )
    before, rows = hidden.clone(), torch.tensor([5, 0, 5], device=DEVICE)
    sums = (hidden + added)[rows]
    expected = rms_norm(sums.float(), (48,), weight.float(), EPSILON)
    assert_close(add_norm(hidden, added, weight, EPSILON, rows=rows), expected, dtype)
    assert torch.equal(hidden, before)
    assert add_norm(hidden, added, weight, EPSILON, rows=rows[:0]).shape == (0, 48)


def turned(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """[rows, heads, head_dim], as the modules of transformers do it, in fp32"""
    half = heads.shape[-1] // 2
    cosines, sines = (rotation[:, None, which].repeat(1, 1, 2) for which in (0, 1))
    swapped = torch.cat((-heads[..., half:], heads[..., :half]), -1)
    return heads.float() * cosines + swapped.float() * sines


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"), in_types((3, 3, 80), (4, 2, 64), (5, 1, 96), (12, 2, 128), (2, 1, 2), (40, 2, 4))
)
def test_rotate_and_write(shape: tuple[int, int, int], dtype: torch.dtype, norms: bool) -> None:
    heads, kv_heads, head_dim = shape
    layers, layer, pages_count = 3, 1, 4
    page_of, offset_of = [2, 0, -1, 3], [15, 3, 4, 0]
    rows = len(page_of)
    positions = torch.tensor([63, 3, 0, 17], device=DEVICE)
    rotation = random(64, 2, head_dim // 2, dtype=torch.float32)
    qkv = random(rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=1)
    of_queries, of_keys = random(head_dim, dtype=dtype, seed=2), random(head_dim, dtype=dtype, seed=3)
    all_pages = torch.full(
        (pages_count, layers, 2, kv_heads, PAGE_TOKENS, head_dim), torch.nan, dtype=dtype, device=DEVICE
    )

    q, k, v = qkv.clone().view(rows, -1, head_dim).split((heads, kv_heads, kv_heads), 1)
    if norms:
        q, k = (rms_norm(x.float(), (head_dim,), w.float(), EPSILON) for x, w in ((q, of_queries), (k, of_keys)))
    q, k = turned(q, rotation[positions]), turned(k, rotation[positions])
    with traced_launches() as trace:
        rotate_and_write(
            qkv,
            positions,
            rotation,
            all_pages[:, layer],
            torch.tensor(page_of, device=DEVICE, dtype=torch.int32),
            torch.tensor(offset_of, device=DEVICE, dtype=torch.int32),
            heads=heads,
            norms=HeadNorms(of_queries, of_keys) if norms else None,
            epsilon=EPSILON,
        )
    assert len(trace) == 1
    assert_close(qkv.view(rows, -1, head_dim)[:, :heads], q, dtype)
    for row, (page, offset) in enumerate(zip(page_of, offset_of, strict=True)):
        if page >= 0:
            assert_close(all_pages[page, layer, 0, :, offset], k[row], dtype)
            assert torch.equal(all_pages[page, layer, 1, :, offset], v[row])
    written = ~all_pages.isnan()
    assert int(written.sum()) == 3 * 2 * kv_heads * head_dim, "nothing else is written"


@pytest.mark.parametrize(("size", "dtype"), in_types((3, 100), (1, 16), (2, 1500), (21, 12)))
def test_silu_multiply(size: tuple[int, int], dtype: torch.dtype) -> None:
    rows, width = size
    gate_up = random(rows, 2 * width, dtype=dtype)
    gate_up[0, 0] = -90.0  # exp(90) is no fp32 number
    gate, up = gate_up.float().tensor_split(2, 1)
    assert_close(silu_multiply(gate_up), silu(gate) * up, dtype)
    assert silu_multiply(gate_up[:0]).shape == (0, width)


def test_what_does_not_fit_is_refused() -> None:
    qkv, rotation = random(1, 24, dtype=torch.float32), random(4, 2, 2, dtype=torch.float32)
    pages = torch.zeros((1, 2, 1, PAGE_TOKENS, 4), device=DEVICE, dtype=torch.float32)
    nowhere = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for heads, of_pages in ((3, pages), (4, pages.transpose(3, 4).contiguous().transpose(3, 4))):
        with pytest.raises(ValueError, match=r"do not fit|must be contiguous"):
            rotate_and_write(
                qkv, nowhere, rotation, of_pages, nowhere, nowhere, heads=heads, norms=None, epsilon=EPSILON
            )
