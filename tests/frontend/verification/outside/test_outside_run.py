"""Files of right plans are accepted by ``spmd_types``, and changed ones refused."""

import warnings
from typing import Any

import pytest
from verified import verify_zoo

from shardwright.frontend.verification import verify as verification
from shardwright.frontend.verification.outside.outside_run import OutsideReport
from shardwright.runtime.errors import ConfigError

TWO = {"plan_ngpus": 2, "runtime_ngpus": 2}
ZERO_3 = {"plan_ngpus": 1, "runtime_ngpus": 2, "use_zero": 3, "use_end2end": True}


def certificate(name: str, policy: str, config: dict[str, Any]) -> OutsideReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = verify_zoo(name, policy, config, steps=1, outside=True)
    assert report.ok and report.outside is not None
    return report.outside


@pytest.mark.parametrize(
    ("name", "policy", "config"),
    [
        ("mlp", "tp", TWO),
        ("gpt2", "tp", {"plan_ngpus": 2, "runtime_ngpus": 4}),
        pytest.param("llama", "tp", TWO, marks=pytest.mark.slow),
        pytest.param("llama", "dp", ZERO_3, marks=pytest.mark.slow),
    ],
)
def test_right_files_are_accepted(name: str, policy: str, config: dict[str, Any]) -> None:
    report = certificate(name, policy, config)
    assert report.ok and "accepts gencode0.py" in str(report)
    assert set(report.ranks[0].told) <= {"split", "view"}


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"(?s)spmd_types is not installed.*shardwright\[outside\]"
    ):
        verify_zoo("mlp", "tp", TWO, outside=True)
