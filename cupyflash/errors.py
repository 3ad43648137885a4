"""The exceptions cupyflash raises, each also the builtin that a NumPy user would catch.

All but CompileError, LaunchError and SetupError are raised before anything is allocated or queued, so a failed call leaves outputs
untouched. A message says which argument, what it was, what is needed, and the way out.
"""

from __future__ import annotations


class CupyflashError(Exception):
    """Base of every error that cupyflash raises on purpose."""


class ShapeError(CupyflashError, ValueError):
    """A shape, a stride or a value out of its range."""


class DtypeError(CupyflashError, TypeError):
    """A dtype that does not fit the argument."""


class ArgumentError(CupyflashError, TypeError):
    """A foreign keyword, an object that is no array, arrays of two libraries in one call, an ambiguous option."""


class DeviceError(CupyflashError, ValueError):
    """Arrays on two devices, or on one that nothing here can compute on."""


class UnsupportedError(CupyflashError, NotImplementedError):
    """Valid attention that no implementation serves; `reason` says why and `alternatives` what does work."""

    def __init__(self, reason: str, alternatives: tuple[str, ...] = ()) -> None:
        self.reason = reason
        self.alternatives = alternatives
        super().__init__("; ".join((reason, *alternatives)))


class CompileError(CupyflashError, RuntimeError):
    """NVRTC refused a kernel: the message holds the variant, the first error of the log and the path of the source."""


class LaunchError(CupyflashError, RuntimeError):
    """The driver refused a launch: the message holds its code and the plan."""


class StateError(CupyflashError, RuntimeError):
    """The call is right, but not now: a first compile inside a stream capture, a GPU call after fork, a closed plan."""


class SetupError(CupyflashError, ImportError):
    """A package that this call needs is missing or does not fit; the message is the pip line that mends it."""
