"""What an adapter of `peers` is, and the reasons that several of them have."""

from __future__ import annotations

from importlib import metadata

from .cases import Case, Inputs
from .timing import Call, Place

ONLY_PACKED = "it is for packed sequences (--varlen)"


class Peer:
    """One way to compute attention. Subclasses give `bind`, and whatever differs from these answers."""

    name = ""
    place = "gpu"  # the name of the place whose arrays it takes; "" is any
    package = ""  # the distribution that it comes from
    only_for = ""  # where the keys are, "packed" or in a "cache", if it is there for such alone
    own_queue = False  # it queues its work where no timer of a place sees it: it has the wall clock, and no ratio to the others

    def missing(self) -> str | None:
        """Why this peer cannot run at all here, or None."""
        return None

    def version(self) -> str:
        return metadata.version(self.package)

    def why_not(self, case: Case, place: Place) -> str | None:
        """Why this peer cannot run the case, or None."""
        return None

    def bind(self, case: Case, inputs: Inputs) -> Call:
        """A call without arguments that does the attention and nothing else: conversions, copies and warnings come before.

        Its result is out (B, Sq, Hq, Dv), packed (T, Hq, Dv), or a tuple that starts with it. For a case of the backward the forward comes
        before as well, and the result is a tuple that starts with dq, dk and dv.
        """
        raise NotImplementedError


def formula_cannot(case: Case, score_bytes: int, place: Place) -> str | None:
    if case.lengths:
        return "its scores are of sequences that have one length, with a batch axis"
    if case.window_size or case.softcap or case.extras:
        return "it has no window, softcap, bias or mask"
    if reason := cache_cannot(case):
        return reason
    num_bytes, free = case.num_scores * score_bytes * (2 if case.backward else 1), place.free_bytes()  # P and dS
    if free is not None and num_bytes > free // 2:
        return f"its scores take {num_bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"
    return None


def cache_cannot(case: Case, *, pages: bool = False) -> str | None:
    """Why what takes keys of q's dtype, in one array or in `pages` too, cannot take those of a cache, or None."""
    if "page_table" in case.packing and not pages:
        return "it takes no pages"
    return "its keys must have q's dtype" if "k_descale" in case.packing else None
