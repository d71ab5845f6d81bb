"""The comparison with DistributedDataParallel, which has to find that there is no difference."""

from __future__ import annotations

from pathlib import Path

import compare_ddp
import numpy as np
import pytest


def test_the_losses_are_those_of_ddp(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "losses.png"
    assert compare_ddp.main(["--steps", "12", "--limit", "200", "--tolerance", "1e-6", "--out", str(picture)]) == 0
    out = capfd.readouterr().out
    assert "largest relative difference of a step's loss: 0" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_difference_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = {"ddp": np.linspace(2.0, 1.0, 5), "kvmpi": np.linspace(2.0, 1.001, 5)}
    monkeypatch.setattr(compare_ddp, "run", lambda args, way, folder: {"losses": curves[way], "seconds": np.ones(5)})
    assert compare_ddp.main(["--steps", "5", "--out", str(tmp_path / "losses.png")]) == 1
    assert "1.0e-03" in capsys.readouterr().out


def test_a_job_that_fails_has_said_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--data", str(tmp_path / "nothing"), "--out", str(tmp_path / "losses.png")]
    assert compare_ddp.main(["-n", "1", *options]) == 1
    err = capfd.readouterr().err
    assert "expected 'digits', a folder" in err
    assert "Traceback" not in err
