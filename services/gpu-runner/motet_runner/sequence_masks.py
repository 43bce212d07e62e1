"""Makes the masks of sequences, from their grammars and their lists of tokens. No torch."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from motet.errors import StructuredOutputUnavailable
from motet_runner.interface import NewSequence
from motet_runner.listed_tokens import ListedTokens
from motet_runner.row_mask import RowMask, TokenRules

if TYPE_CHECKING:
    from motet.grammars.kept import KeptGrammars

log = structlog.get_logger(__name__)


class SequenceMasks:
    def __init__(self, tokenizer: Path, vocabulary: int, eos: Collection[int]) -> None:
        self._vocabulary = vocabulary
        self._grammars = _grammars_of(tokenizer, vocabulary, eos)

    def mask_of(self, sequence: NewSequence) -> RowMask:
        """See `motet_runner.interface.Engine.mask_of`."""
        sampling = sequence.sampling.checked(self._vocabulary)
        rules: TokenRules | None = None
        if sequence.grammar is not None:
            if self._grammars is None:
                raise StructuredOutputUnavailable("This runner lacks the package llguidance: install motet[grammars].")
            rules = self._grammars.mask(sequence.grammar, sequence.delivered, tenant=sequence.tenant)
        if rules is None or sampling.allowed_token_ids or sampling.bad_words:
            rules = ListedTokens(sampling, self._vocabulary, sequence.delivered, rules)
        return RowMask(rules)


def _grammars_of(tokenizer: Path, vocabulary: int, eos: Collection[int]) -> "KeptGrammars | None":
    """None: what compiles them is an extra, and is not installed."""
    try:
        from motet.grammars.compiler import Grammars
        from motet.grammars.kept import KeptGrammars
    except ImportError:
        log.warning("grammars_unavailable", reason="llguidance is not installed", result="no structured output")
        return None
    return KeptGrammars(Grammars(tokenizer, vocabulary, eos))
