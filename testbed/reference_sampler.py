"""What sampling means, literally: whole rows are sorted, in float64, and every step counts all tokens of each row.

The oracle of `tests/runner/test_sampler.py` and the baseline of `benchmarks/sampling.py`.
"""

import hashlib
import struct

import torch

from motet_runner.execute.batch.row_table import TableRow
from motet_runner.execute.sample.host_sampler import Samples
from motet_runner.execute.sample.sampling_kind import COLDEST
from motet_runner.interface import Logprobs


def sample(logits: torch.Tensor, sequences: list[TableRow], eos: frozenset[int]) -> Samples:
    """The next token of each sequence from its row of `logits`; None where the row is not finite."""
    given = logits.float()
    adjusted = _adjusted(given, sequences, eos)
    best, greedy = adjusted.max(dim=-1)
    tokens = greedy.tolist()
    # max() hands on NaN; one infinite or NaN logit is enough to distrust a row.
    finite = torch.isfinite(given.max(dim=-1).values if adjusted is not given else best).tolist()
    drawing = [i for i, s in enumerate(sequences) if s.sampling.temperature > 0 and finite[i]]
    if drawing:
        drawn = _draw(adjusted[drawing], [sequences[i] for i in drawing]).tolist()
        for i, token in zip(drawing, drawn, strict=True):
            tokens[i] = token
    logprobs = _logprobs(given, sequences, tokens)
    return Samples([tokens[i] if finite[i] else None for i in range(len(sequences))], logprobs)


def _adjusted(logits: torch.Tensor, sequences: list[TableRow], eos: frozenset[int]) -> torch.Tensor:
    """Penalties, bias and forbidden ends; the very same tensor when nobody asked for any."""
    adjusted = logits
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        changes: list[tuple[list[int], list[float]]] = []
        penalised = sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
        banned = sequence.output_tokens < sampling.min_tokens and (eos or sampling.stop_token_ids)
        if not (penalised or banned or sampling.logit_bias):
            continue
        if adjusted is logits:
            adjusted = logits.clone()
        of_row = adjusted[row]
        if penalised:
            _penalise(of_row, sequence)
        if sampling.logit_bias:
            changes.append((list(sampling.logit_bias), list(sampling.logit_bias.values())))
        for ids, biases in changes:
            known = [(i, b) for i, b in zip(ids, biases, strict=True) if 0 <= i < len(of_row)]
            if known:
                index = torch.tensor([i for i, _ in known], device=of_row.device)
                of_row[index] += torch.tensor([b for _, b in known], device=of_row.device, dtype=of_row.dtype)
        if banned:
            ends = [token for token in eos | sampling.stop_token_ids if token < len(of_row)]
            of_row[torch.tensor(ends, dtype=torch.int64, device=of_row.device)] = float("-inf")
    return adjusted


def _penalise(row: torch.Tensor, sequence: TableRow) -> None:
    """Repetition: over prompt and output, as transformers does; presence and frequency: over output, as OpenAI says."""
    sampling = sequence.sampling
    if sampling.repetition_penalty != 1:
        seen: torch.Tensor = torch.tensor(sequence.tokens, device=row.device).unique()
        values = row[seen]
        row[seen] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    output = sequence.tokens[sequence.prompt_tokens :]
    if output and (sampling.presence_penalty or sampling.frequency_penalty):
        seen, times = torch.tensor(output, device=row.device).unique(return_counts=True)
        row[seen] -= sampling.frequency_penalty * times + sampling.presence_penalty


def uniform(seed: int, choice: int, position: int) -> float:
    """The first 53 of 64 bits of a hash, as a fraction. Nobody's seed has more than 64 bits and a sign."""
    low, high = seed & (1 << 64) - 1, -1 if seed < 0 else seed >> 64
    (drawn,) = struct.unpack(
        "<Q", hashlib.blake2b(struct.pack("<QqIQ", low, high, choice, position), digest_size=8).digest()
    )
    return float(drawn - drawn % 2**11) / 2.0**64


def _draw(logits: torch.Tensor, sequences: list[TableRow]) -> torch.Tensor:
    """Temperature, then top-k, top-p and min-p, then the place of a uniform number in what is left."""
    device = logits.device
    asked = [sequence.sampling for sequence in sequences]
    temperature = torch.tensor([max(s.temperature, COLDEST) for s in asked], device=device)[:, None]
    # From fp64 on: with a large vocabulary a float's cumulative sum runs out of digits before it reaches one.
    logits = logits.double() / temperature
    top_k = torch.tensor([s.top_k if s.top_k > 0 else logits.shape[1] for s in asked], device=device)[:, None]
    top_p = torch.tensor([s.top_p for s in asked], device=device, dtype=torch.float64)[:, None]
    if any(s.top_k > 0 or s.top_p < 1 for s in asked):
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        ordered = ordered.masked_fill(torch.arange(logits.shape[1], device=device) >= top_k, float("-inf"))
        probabilities = ordered.softmax(dim=-1)
        # A token stays while those before it have not reached top_p; so the first always stays.
        before = probabilities.cumsum(dim=-1) - probabilities
        ordered = ordered.masked_fill((before >= top_p) & (top_p < 1), float("-inf"))
        ordered[:, 0] = ordered[:, 0].where(ordered[:, 0] > float("-inf"), 0.0)
        logits = torch.empty_like(logits).scatter_(1, order, ordered)
    probabilities = logits.softmax(dim=-1)
    if any(s.min_p > 0 for s in asked):
        min_p = torch.tensor([s.min_p for s in asked], device=device, dtype=torch.float64)[:, None]
        too_small = probabilities < min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(too_small, 0.0)
    upto = probabilities.cumsum(dim=-1)
    numbers = [uniform(s.seed, s.choice, len(s.tokens)) for s in sequences]
    place = torch.tensor(numbers, device=device, dtype=torch.float64)[:, None] * upto[:, -1:]
    return torch.searchsorted(upto, place, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)


def _logprobs(logits: torch.Tensor, sequences: list[TableRow], tokens: list[int]) -> dict[int, Logprobs]:
    """Of the model's own distribution, before temperature, penalties and cuts."""
    asking = [i for i, sequence in enumerate(sequences) if sequence.sampling.logprobs]
    if not asking:
        return {}
    logs = logits[asking].log_softmax(dim=-1)
    most = min(max(sequences[i].sampling.top_logprobs for i in asking), logits.shape[1])
    values, ids = logs.topk(most, dim=-1) if most else (None, None)
    found = {}
    for row, i in enumerate(asking):
        count = min(sequences[i].sampling.top_logprobs, most)
        top: tuple[tuple[int, float], ...] = ()
        if ids is not None and values is not None:
            top = tuple(zip(ids[row, :count].tolist(), values[row, :count].tolist(), strict=True))
        found[i] = Logprobs(float(logs[row, tokens[i]]), top)
    return found
