"""Checks cached adapters against the base model, once: the result is kept beside the files."""

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from motet.domain import Digest
from motet_runner.adapters.cache import CERTIFICATE, TEMPLATE, DiskCache, kept_template
from motet_runner.adapters.certification import Certification
from motet_runner.adapters.compatibility_check import CHECK_VERSION
from motet_runner.adapters.kept_proofs import KeptProofs
from motet_runner.adapters.policy.values import Held
from motet_runner.adapters.proof import Proof
from motet_runner.sources.fetch_errors import temporary

MAX_UNKEPT_BYTES = 256 * 1024
"""Of one adapter's layout and chat template, where its folder takes neither: thousands of adapters wait, and a template
alone may have some MiB. A usual adapter has 50 KB of both."""

SLABS_BY = version("motet")
"""Another version may compute other slabs."""

Check = Callable[[Path], Certification]
"""Checks an adapter's folder against the base model. Raises AdapterIncompatible. Called in a thread."""


class Checks:
    """`engine_limits`: the text of `EngineLimits` of the engine that `check` checks for. `run_layout`: of that engine's
    `EngineInfo`; empty: there are no slabs."""

    def __init__(
        self,
        cache: DiskCache,
        check: Check,
        *,
        base_digest: Digest,
        engine_limits: str = "",
        run_layout: str = "",
        version: int = CHECK_VERSION,
        proofs: KeptProofs | None = None,
    ) -> None:
        """`proofs`: None if the engine proves nothing."""
        self._cache = cache
        self._check = check
        self._base_digest = base_digest
        self._engine_limits = engine_limits
        self._run_layout = run_layout
        self._version = version
        self._proofs = proofs

    def certify(self, held: Held) -> Certification:
        """The result of an earlier check, or of a new one."""
        checked = self._earlier(held)
        if checked is None:
            self._cache.verify(held)
            checked = self._check(held.folder)
            certificate, layout = checked.certificate, checked.layout
            certificate.digest, certificate.base_digest = held.digest, self._base_digest
            certificate.size_bytes, certificate.checker = held.bytes, self._version
            checked = Certification.of(
                certificate, layout, checked.engine, recorded=checked.recorded, template=checked.template
            )
            template = {TEMPLATE: checked.template} if checked.template else {}
            found = {layout.linears_file: layout.packed, **template, CERTIFICATE: checked.encode().encode()}
            if self._cache.keep(held.folder, found):
                checked = self._with_slab(held, replace(checked, layout=layout.stored(), template=b""))
            elif (size := len(layout.packed) + len(checked.template)) > MAX_UNKEPT_BYTES:
                raise temporary(
                    f"{held.folder} takes no files, and this runner's memory takes {MAX_UNKEPT_BYTES} bytes of what it "
                    f"has found about an adapter. This one's chat template and layout have {size}. Free some space on "
                    "the runner's disk, or make it writable. Motet tries again automatically."
                )
        return self._with_proofs(held, checked)

    def earlier(self, held: Held) -> Certification | None:
        """The result of an earlier check of these files, if the checks, base model and engine were the same, with the
        proofs of this engine."""
        checked = self._earlier(held)
        return checked and self._with_proofs(held, checked)

    def keep_proof(self, held: Held, proof: Proof) -> None:
        if self._proofs is not None and held.certification is not None:
            self._proofs.keep(held.folder, held.digest, held.certification, proof)

    def found_wrong(self, digest: Digest) -> None:
        """A newer proof has failed: here no earlier one counts, and none of another process."""
        if self._proofs is not None:
            self._proofs.found_wrong(digest)

    def forget_proofs(self, held: Held) -> None:
        """Those that are kept beside the files"""
        self.found_wrong(held.digest)  # an earlier proof may have been kept since
        if self._proofs is not None:
            self._proofs.forget(held.folder)

    def _with_proofs(self, held: Held, checked: Certification) -> Certification:
        if self._proofs is None or not self._proofs.concern(checked):
            return checked
        found = self._proofs.of(held.folder, held.digest, checked)
        before = bool(found) or self._proofs.any_of(held.folder, held.digest)
        elsewhere = () if before else self._proofs.elsewhere(held.folder, held.digest, checked)
        return replace(checked, proofs=found, proved_before=before, proved_elsewhere=elsewhere)

    def _earlier(self, held: Held) -> Certification | None:
        try:
            checked = Certification.decode((held.folder / CERTIFICATE).read_text(), held.folder)
        except (ValueError, OSError):  # also if there was no check
            return None
        certificate = checked.certificate
        found = (certificate.digest, certificate.base_digest, certificate.checker, checked.engine)
        same = found == (held.digest, self._base_digest, self._version, self._engine_limits)
        if not same or not checked.layout.file_unchanged() or not checked.layout.is_stored():
            return None
        if certificate.template_digest and not kept_template(held.folder, certificate.template_digest):
            return None
        return self._with_slab(held, checked)

    def _with_slab(self, held: Held, checked: Certification) -> Certification:
        """The same, with the slab's name, which depends on everything that its bytes do."""
        if not self._run_layout:
            return checked
        layout = checked.layout.with_slab(held.digest, self._base_digest, self._version, SLABS_BY, self._run_layout)
        return replace(checked, layout=layout, lacks_slab=not (held.folder / layout.slab).exists())
