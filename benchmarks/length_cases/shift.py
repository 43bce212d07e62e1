"""An adapter that has answered one kind of prompts for long gets another kind."""

import copy
from dataclasses import replace

import numpy as np

from benchmarks.harness import Result
from benchmarks.length_cases.alone import ALPACA
from benchmarks.length_cases.judged import SPACE, Judged, judge, mixed
from benchmarks.length_cases.rows import SETS, Row
from motet_predictor.fitting import fit
from motet_predictor.length_model import LengthModel
from motet_predictor.prompt_model import PromptModel

BEFORE, AFTER, TESTED, DRAWS = 3000, 50, 300, 20
MAX_U, MAX_R_RATIO = 0.14, 1.3


def results(rows: list[Row]) -> list[Result]:
    first = mixed((row for row in rows if row.set == ALPACA), 0)[:BEFORE]
    taught = PromptModel(LengthModel())
    for one in first:
        taught.observe(one.tenant, one.adapter, one.tokens, features=one.features)
    taught.install(fit(first, SPACE))
    shorts, ratios = {}, {}
    for name in SETS:
        if name == ALPACA:
            continue
        own = [row for row in rows if row.set == name]
        own = [replace(row, sample=replace(row.sample, tenant=first[0].tenant)) for row in own]
        constant = float(np.quantile([row.sample.tokens for row in own], 0.9))
        drawn = []
        for draw in range(DRAWS):
            order = np.random.default_rng(draw).permutation(len(own))
            model = copy.deepcopy(taught)
            for one in (own[at].sample for at in order[:AFTER]):
                model.observe(one.tenant, one.adapter, one.tokens, features=one.features)
            judged = judge(model, (own[at] for at in order[AFTER : AFTER + TESTED]), Judged())
            drawn.append((judged.short(), float(judged.of("q90").mean()) / constant))
        shorts[name], ratios[name] = np.mean(drawn, axis=0).tolist()
        print(f"{AFTER} answers after a change to {name}: U {shorts[name]:.1%}, {ratios[name]:.2f} of its constant q90")
    short, ratio = max(shorts.values()), max(ratios.values())
    return [
        Result("shift_u", short, "", f"<= {MAX_U}", short <= MAX_U),
        Result("shift_r_ratio", ratio, "x", f"<= {MAX_R_RATIO}", ratio <= MAX_R_RATIO, "its constant q90"),
    ]
