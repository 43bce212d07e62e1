"""Finds the linear of the base model that a tensor of an adapter belongs to, and says why a tensor belongs to none.

Tools put parts before and into the names that the base model itself does not have. A tensor whose linear is clear is
served, whichever tool has saved it; all others are refused with what to do.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from motet_runner.adapters.peft_config import MERGE

Shapes = Mapping[str, tuple[int, int]]
"""Module path in the base model → (in, out): `EngineInfo.target_modules`."""

PREFIXES = ("base_model.model.", "base_model.", "")
"""Prefixes that PEFT and similar tools put before the base model's own module path"""

AFTER_PEFT = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts that FSDP and activation checkpointing put into a path, when PEFT has matched its patterns"""

WRAPPERS = AFTER_PEFT | {"_orig_mod"}
"""Also what torch.compile puts there, before PEFT or after it"""

OUTER = ("_orig_mod.", "_fsdp_wrapped_module.", "module.")
"""What torch.compile, FSDP and DistributedDataParallel put before the path of PEFT"""

TEXT_MODELS = ("model.language_model.", "language_model.model.", "model.")
"""Where the decoder of text is: in models of text and images, now and in earlier versions of transformers, and in
models of text alone. An adapter of the one fits the other: the linears have the same shapes."""

TENSOR_NAME = re.compile(
    r"(?P<module>.+?)\."
    r"(?:lora_(?P<half>[AB])(?:\.default)?\.weight|(?P<magnitude>lora_magnitude_vector(?:\.default)?(?:\.weight)?)"
    r"|(?P<of_b>lora_B(?:\.default)?\.bias)|(?P<bias>(?:base_layer\.)?bias))"
)

Kind = Literal["A", "B", "magnitude", "lora_bias", "bias"]

UNSERVED = {
    r"\.lora_embedding_[AB]": f"Motet does not serve LoRA on embeddings. Train without them, or {MERGE}.",
    r"(?:^|\.)(?:lm_head|embed_out)\.lora_": "Motet does not serve LoRA on the output layer. Train with target_modules "
    f"that leave it out, or {MERGE}.",
    r"\.experts\.": f"Motet does not serve LoRA on experts. Train the linears of the attention alone, or {MERGE}.",
    r"(?:^|\.)(?:vision_\w+|visual|audio_\w+|multi_modal_projector)\.": "Motet serves the decoder of text alone. Train "
    f"with target_modules or exclude_modules that leave it out, or {MERGE}.",
    r"\.bias$": "Motet serves the biases of linears, and other tenants share all others. Train with bias='none', or "
    f"{MERGE}.",
    r"\.modules_to_save\.": f"It replaces a module of the base model, which other tenants share: {MERGE}.",
    r"(?:^|\.)(?:lm_head|embed_out|embed_tokens|embed_in|wte)\.": "It is a whole matrix of the base model, which other "
    f"tenants share. If training has not changed it, save the adapter with save_embedding_layers=False. Else {MERGE}.",
    r"\.lora_[ab]$": "It has the form of MLX. Fuse the adapter with mlx_lm.fuse and serve the result as a model of its "
    "own, or train with PEFT.",
}
"""What tools write that is no LoRA of a linear that Motet serves, and what to do. The first one that matches counts."""

MAX_NAME_CHARS = 200
"""The most characters of a tenant's name that are compared, or quoted in a message"""


class LoraPlace(NamedTuple):
    module: str
    """The linear, as the base model calls it."""
    half: Kind
    own_paths: tuple[str, ...]
    """The linear, as the adapter's config may call it: its patterns are about these names. There are several if nothing
    says whether a model was compiled before PEFT came or after it, or whether PEFT had the model without its head."""


def place_of(name: str, shapes: Shapes) -> LoraPlace | None:
    """Where a tensor belongs; None: to no linear of this base model."""
    match = TENSOR_NAME.fullmatch(name)
    if match is None:
        return None
    path = match["module"]
    while outer := next((outer for outer in OUTER if path.startswith(outer)), None):
        path = path.removeprefix(outer)
    path = _without(AFTER_PEFT, path)
    plain = _without(WRAPPERS, path)
    half = _kind(match)
    for prefix in PREFIXES:
        if plain.startswith(prefix):
            found = plain.removeprefix(prefix)
            for module in (found, *_in_other_models(found)):
                if module in shapes:
                    of_peft = next(path.removeprefix(prefix) for prefix in PREFIXES if path.startswith(prefix))
                    return LoraPlace(module, half, tuple(dict.fromkeys((of_peft, _without(WRAPPERS, of_peft), found))))
    return None


def _kind(match: re.Match[str]) -> Kind:
    if match["half"]:
        return "A" if match["half"] == "A" else "B"
    return "magnitude" if match["magnitude"] else "lora_bias" if match["of_b"] else "bias"


def _without(left_out: frozenset[str], path: str) -> str:
    parts = path.split(".")
    return path if left_out.isdisjoint(parts) else ".".join(part for part in parts if part not in left_out)


def _in_other_models(path: str) -> list[str]:
    """Other names of the same linear of a text decoder."""
    root = next((root for root in TEXT_MODELS if path.startswith(root)), None)
    return [other + path.removeprefix(root) for other in TEXT_MODELS if other != root] if root is not None else []


def why_it_has_no_place(name: str, shapes: Shapes) -> str:
    """What to do with a tensor that belongs to no linear."""
    name = name[:MAX_NAME_CHARS]
    for pattern, advice in UNSERVED.items():
        if re.search(pattern, name):
            return advice
    close = difflib.get_close_matches(re.sub(r"\.lora_.*", "", name), shapes, n=1, cutoff=0.3)
    hint = f"The nearest module of this base model is {close[0]}. " if close else ""
    return f"{hint}Was the adapter trained on another model?"
