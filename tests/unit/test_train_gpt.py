"""The example of a training, in its small configuration: it learns, it repeats itself, and its comparison can fail."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install torch")

import cupyflash.torch  # noqa: E402
from bench.examples import train_gpt  # noqa: E402
from bench.examples.train_gpt import CONFIGS, Run, train  # noqa: E402

STEPS = 25


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(attention: Any = train_gpt.flash_attention, **options: Any) -> Run:
    return train(CONFIGS["cpu"], attention, **{"steps": STEPS, **options})


def test_losses_go_as_with_torchs_own_attention(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_gpt.main(["--json", "--device", "cpu", "--steps", str(STEPS), "--attention", "cupyflash", "flash", "math", "math"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"].keys() == {"cupyflash", "flash", "math", "math 2"}
    for losses in (found["runs"][name]["losses"] for name in found["runs"]):
        assert len(losses) == STEPS
        assert losses[-1] < losses[0] - 1
    between = found["largest difference"]
    assert between["math - math 2"] == 0
    assert between["cupyflash - flash"] < 10 * between["flash - math"] + 1e-5
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    train_gpt.main(["--device", "cpu", "--steps", "2", "--attention", "cupyflash", "math", "flash"])
    first, second, _, *pairs, ours, torchs = capsys.readouterr().out.splitlines()
    assert first.startswith("cupyflash  loss 5.")
    assert second.startswith("math       loss 5.")
    assert pairs[0].startswith("largest difference of the losses, cupyflash - math ")
    assert len(pairs) == 3
    assert float(ours.split()[-1]) == max(float(pair.split()[-1]) for pair in pairs[:2])
    assert torchs == f"largest difference of two runs of torch's{'':<17}{pairs[2].split()[-1]}"


def test_a_run_repeats_itself() -> None:
    first = run(steps=5)
    assert run(steps=5).losses == first.losses
    assert run(steps=5, seed=1).losses != first.losses


def test_trainings_in_turns_are_those_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_gpt, "TURN", 3)
    attentions = {"a": train_gpt.flash_attention, "b": train_gpt.torchs_attention(train_gpt.BACKENDS["math"])}
    found = train_gpt.train_in_turns(CONFIGS["cpu"], attentions, steps=7)
    assert found["a"].losses == run(steps=7).losses
    assert found["b"].losses == run(attentions["b"], steps=7).losses
    assert all(len(one.losses) == 7 and one.step_ms > 0 for one in found.values())


def test_a_wrong_gradient_shows() -> None:
    def wrong(q: Any, k: Any, v: Any) -> Any:
        return cupyflash.torch.attention(q, k.detach(), v, causal=True)

    assert train_gpt.difference(run(wrong, steps=8), run(steps=8)) > 1e-4


def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    assert train_gpt.difference(run(compiled="default", steps=5), run(steps=5)) < 1e-5


def test_png_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train_gpt.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        train_gpt.main(["--png", "losses.png"])
    assert r"--png needs matplotlib: pip install 'cupyflash[plot]'" in capsys.readouterr().err
