"""Our attention, as transformers calls it: one function for every decoder that uses `ALL_ATTENTION_FUNCTIONS` (OR-03).

Linear layers compute all rows at once; in attention, each sequence attends to its own keys (selective batching). First,
new keys and values are written to their pages. Then the compiled kernels attend to the pages in place, in one call.
Without these kernels, decodes take one call per length class, and prompts one call each.

Only owned memory may be multiplied, since masks do not protect: a masked value is multiplied by zero, and 0 × NaN is
NaN. Pages are read whole. So the iteration that writes a page's first rows, but does not fill the page, clears the page
first (`FlatBatch.begun`): nothing of the last owner is left. Beyond its end a sequence reads only its own page. Every
implementation of attention obeys these rules, and reads only pages in the sequence's table.
"""

from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from motet_runner.execute.batch.flat_batch import CURRENT, FlatBatch
from motet_runner.execute.batch.page_groups import DecodeGroup
from motet_runner.memory.paged import PagedStore

NAME = "motet"

UNDERSTOOD = frozenset({"sliding_window", "softcap"})
"""Options that change attention's result, and are honoured"""
HARMLESS = frozenset(
    {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "cache_position", "past_key_values",
     "position_embeddings", "logits_to_keep", "return_dict", "output_hidden_states", "token_type_ids",
     "output_router_logits"}
)  # fmt: skip
"""Options that do not change the result. A model that sets any other option is unsupported (see
`load/model_check.py`)."""


class How(NamedTuple):
    """A layer's options of attention."""

    scale: float
    window: int | None
    softcap: float | None


def register() -> None:
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def assign_layer(module: torch.nn.Module, layer: int, window: int | None) -> None:
    """Sets the layer of a module's attention: the index of its keys and values in each page.

    `window`: how many tokens a token attends to in this layer; None: all.
    """
    module.motet_layer = layer  # type: ignore[assignment] # nn.Module's attributes are typed as tensors and modules
    module.motet_window = window  # type: ignore[assignment]


def _no_mask(*_: Any, **__: Any) -> None:
    """No mask is needed: pages and lengths determine what each token sees."""


def attend(  # noqa: PLR0917 transformers' signature
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, rows, dim], key and value [1, kv_heads, rows, dim] → [1, rows, heads, dim]"""
    batch = CURRENT.get()
    batch.calls += 1
    if batch.watcher is not None:
        # Transformers makes no mask for us: any mask is the model's own.
        given = {"attention_mask": attention_mask, "sliding_window": sliding_window, "softcap": softcap, **others}
        batch.watcher(module, query, key, value, given)
    layer: int = module.motet_layer  # type: ignore[assignment] # a number: assign_layer
    how = How(scaling if scaling is not None else query.shape[-1] ** -0.5, sliding_window, softcap)
    return attend_rows(batch, layer, how, query=query, key=key, value=value).unsqueeze(0), None


def attend_rows(
    batch: FlatBatch, layer: int, how: How, *, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """query [1, heads, rows, dim], key and value [1, kv_heads, rows, dim] → [rows, heads, dim]"""
    if batch.paged is not None:
        attention, of_rows = batch.paged
        return attention.attend(
            query[0], key[0], value[0], layer, of_rows, scale=how.scale, window=how.window, softcap=how.softcap
        )
    batch.store.write(batch.writes[layer], torch.cat((key, value), 1)[0].transpose(0, 1))
    return _attend_written(
        batch, layer, how, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    )


def attend_heads(batch: FlatBatch, layer: int, how: How, heads: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values side by side [rows, heads + 2 · kv_heads, dim] → [rows, heads, dim]"""
    kv_heads = batch.store.shape.kv_heads
    queries = heads.shape[1] - 2 * kv_heads
    batch.store.write(batch.writes[layer], heads[:, queries:])
    return _attend_written(batch, layer, how, *heads.split((queries, kv_heads, kv_heads), 1))


def _attend_written(  # noqa: PLR0917 query, key and value belong together
    batch: FlatBatch, layer: int, how: How, by_row: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """by_row [rows, heads, dim], key and value [rows, kv_heads, dim], which are also in their pages"""
    if batch.all_decode_together:
        return _decode(batch.decodes[0], batch.store, layer, by_row, how)
    out = torch.empty_like(by_row, memory_format=torch.contiguous_format)
    for group in batch.decodes:
        out[group.rows] = _decode(group, batch.store, layer, by_row[group.rows], how)
    for chunk in batch.chunks:
        there = slice(chunk.first, chunk.last)
        if chunk.before:
            keys, values = batch.store.read(chunk.blocks[layer], 1)  # type: ignore[index] # there when `before` is
        else:
            keys, values = _by_head(key[there]), _by_head(value[there])
        mask = chunk.mask(how.window, by_row.dtype, by_row.device)
        gqa = by_row.shape[1] != keys.shape[1]
        out[there] = _attention(_by_head(by_row[there]), keys, values, mask, how, gqa=gqa)[0].transpose(0, 1)
    return out


def _by_head(rows: torch.Tensor) -> torch.Tensor:
    """[rows, heads, dim] → [1, heads, rows, dim]"""
    return rows.transpose(0, 1).unsqueeze(0)


def _decode(group: DecodeGroup, store: PagedStore, layer: int, query: torch.Tensor, how: How) -> torch.Tensor:
    """query [sequences, heads, dim], one row each → the same shape"""
    count, heads, dim = query.shape
    keys, values = store.read(group.blocks[layer], count)
    # The query heads of one KV head are rows of one product: grouped heads cost no copy of keys.
    grouped = query.reshape(count, keys.shape[1], -1, dim)
    if how.softcap is None and query.device.type == "cpu":
        return _few_queries(grouped, keys, values, group.mask(how.window, torch.float32), how.scale).view(query.shape)
    attended = _attention(grouped, keys, values, group.mask(how.window, query.dtype), how)
    return attended.reshape(count, heads, dim)


def _few_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale · q kᵀ + mask) v by batched products: with few queries, torch's own attention on a CPU takes two to
    three times as long."""
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(*q.shape[:3], -1)
    shares = torch.softmax(torch.add(mask, scores, alpha=scale), -1).to(v.dtype)
    return torch.bmm(shares.flatten(0, 1), v.flatten(0, 1))


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, how: How, *, gqa: bool = False
) -> torch.Tensor:
    """softmax(scale · q kᵀ + mask) v; without a mask, row i sees keys up to i."""
    if how.softcap is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=how.scale, enable_gqa=gqa
        )
    if gqa:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = torch.tanh((q @ k.transpose(-1, -2)) * (how.scale / how.softcap)) * how.softcap
    if mask is None:
        mask = torch.full(scores.shape[-2:], float("-inf"), dtype=q.dtype, device=q.device).triu_(1)
    return torch.softmax((scores + mask).float(), dim=-1).to(q.dtype) @ v
