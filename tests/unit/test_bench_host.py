"""What measures the host time of a call."""

from __future__ import annotations

import time

import pytest

from bench import host


def test_rounds_end_with_waiting_which_is_not_counted() -> None:
    calls, waits = [], []

    def wait(made: object) -> None:
        waits.append(made)
        time.sleep(0.02)

    us = host.microseconds(lambda: calls.append(time.sleep(0.001)) or len(calls), wait, rounds=3, count=5)
    assert us == pytest.approx(1000, rel=0.5)
    assert len(calls) == 20 + 3 * 5
    assert len(waits) == 4
