"""cupyflash: exact attention whose cost is the memory traffic it avoids.

`attention` takes CuPy, PyTorch, JAX, NumPy or any DLPack arrays, computes where they are, and gives back the caller's type.
"""

from typing import TYPE_CHECKING, Any

from cupyflash._version import __version__
from cupyflash.api import (
    AttentionResult,
    Report,
    Support,
    attention,
    attention_varlen,
    attention_with_kvcache,
    merge_states,
    supports,
    warmup,
)
from cupyflash.backward import Gradients, attention_backward, attention_vjp
from cupyflash.cache import DecodePlan, plan_decode
from cupyflash.environment import show_config
from cupyflash.errors import (
    ArgumentError,
    CompileError,
    CupyflashError,
    DeviceError,
    DtypeError,
    LaunchError,
    SetupError,
    ShapeError,
    StateError,
    UnsupportedError,
)
from cupyflash.packing import pack, unpack

if TYPE_CHECKING:
    from cupyflash import reference
    from cupyflash.explanation import explain


def __getattr__(name: str) -> Any:
    if name == "reference":  # 4 ms of an import that hardly ever needs it
        import importlib

        return importlib.import_module("cupyflash.reference")
    if name == "explain":  # not the name of its module, which an import of that would put in its place
        from cupyflash.explanation import explain

        return explain
    raise AttributeError(f"module 'cupyflash' has no attribute {name!r}")


def _in_compiled(name: str) -> Any:
    """The function of that name for torch.compile."""

    def form(*args: Any, **options: Any) -> Any:
        import cupyflash.torch  # a statement, which torch.compile can trace

        return getattr(cupyflash.torch, name)(*args, **options)

    return form


# What torch.compile traces in place of a function, by the attribute that torch's own wrappers have, so that nothing is imported to say so.
_function: Any
for _function in (attention, attention_varlen, attention_with_kvcache):
    _function._torchdynamo_inline = _in_compiled(_function.__name__)


__all__ = [
    "ArgumentError",
    "AttentionResult",
    "CompileError",
    "CupyflashError",
    "DecodePlan",
    "DeviceError",
    "DtypeError",
    "Gradients",
    "LaunchError",
    "Report",
    "SetupError",
    "ShapeError",
    "StateError",
    "Support",
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_vjp",
    "attention_with_kvcache",
    "explain",
    "merge_states",
    "pack",
    "plan_decode",
    "reference",
    "show_config",
    "supports",
    "unpack",
    "warmup",
]
