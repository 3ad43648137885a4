"""What the driver's management library (NVML, installed with every driver) says of a GPU: its clock while it works, and its limits.

Through ctypes, as `machine` reads libcuda: five functions are no reason for a dependency.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_SM = 1  # NVML_CLOCK_SM
# Of nvmlClocksEventReasons, those that say that something is wrong. The limit of power (4) is not among them: a chip whose tensor cores are
# busy is always at it, and its numbers are what anybody gets.
_SLOWED = {0x08: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "the power supply"}


class Sensor:
    """One GPU, by its PCI bus id or else by its number; OSError where there is no NVML or it does not know the GPU."""

    def __init__(self, bus_id: str | None = None, number: int = 0) -> None:
        self._lib = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._ask("nvmlInit_v2")
        if bus_id is not None:
            self._ask("nvmlDeviceGetHandleByPciBusId_v2", bus_id.encode(), ctypes.byref(self._device))
        else:
            self._ask("nvmlDeviceGetHandleByIndex_v2", number, ctypes.byref(self._device))

    def _ask(self, function: str, *arguments: Any) -> None:
        try:
            code = getattr(self._lib, function)(*arguments)
        except AttributeError:
            raise OSError(f"this NVML has no {function}") from None
        if code:
            raise OSError(f"{function} returned {code}")

    def _number(self, function: str, *arguments: int) -> int | None:
        """None where the GPU does not say: virtual ones and old ones keep some of it to themselves."""
        value = ctypes.c_uint()
        try:
            self._ask(function, self._device, *arguments, ctypes.byref(value))
        except OSError:
            return None
        return value.value

    def clock_mhz(self) -> int | None:
        """The clock of the SMs at this moment."""
        return self._number("nvmlDeviceGetClockInfo", _SM)

    def slowed(self) -> set[str]:
        """What holds the clock down at this moment beside the limit of power."""
        reasons = ctypes.c_ulonglong()
        for name in ("Event", "Throttle"):  # the second is what drivers before 535 call it
            try:
                self._ask(f"nvmlDeviceGetCurrentClocks{name}Reasons", self._device, ctypes.byref(reasons))
            except OSError:
                continue
            return {what for bit, what in _SLOWED.items() if reasons.value & bit}
        return set()

    def facts(self) -> dict[str, Any]:
        """What a number depends on besides the kind of GPU: the driver's release, the clock's and the power's limit."""
        release = ctypes.create_string_buffer(96)
        self._ask("nvmlSystemGetDriverVersion", release, len(release))
        limit_mw, power_mw = (self._number(f"nvmlDeviceGet{name}") for name in ("EnforcedPowerLimit", "PowerUsage"))
        return {
            "driver_release": release.value.decode(),
            "clock_mhz": self.clock_mhz(),
            "max_clock_mhz": self._number("nvmlDeviceGetMaxClockInfo", _SM),
            "power_limit_w": limit_mw and limit_mw / 1e3,
            "power_w": power_mw and power_mw / 1e3,
        }
