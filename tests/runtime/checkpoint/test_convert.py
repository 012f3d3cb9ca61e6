"""Forms of checkpoints: what is converted there and back is what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints as c
import pytest
import torch

import shardwright
from shardwright.__main__ import main
from shardwright.runtime.checkpoint.convert import convert_checkpoint
from shardwright.runtime.errors import CheckpointError, ConfigError

TP = ("tp", 2, 2)


def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of transformers goes into a parallel module and out again, by commands."""
    model: Any = type(c.model_of("llama-tied"))(c.model_of("llama-tied").config).double()
    base = tmp_path / "base"
    model.save_pretrained(base)
    start, back = tmp_path / "start", tmp_path / "back"
    given = ["convert", str(base), str(start), "--to", "shardwright", "--max-file-size", "20KB"]
    assert main(given) == 0
    assert len(list(start.glob("model-*.safetensors"))) > 1

    def load() -> Any:
        trainer = c.trainer("llama-tied", TP)
        shardwright.load_checkpoint(start, trainer.module)
        shardwright.save_checkpoint(tmp_path / "run", trainer.module)
        return trainer.module.state_dict()

    merged, _ = shardwright.merge_state_dicts(c.on("llama-tied", TP, load))
    c.assert_same(dict(merged), model.state_dict())
    given = ["convert", str(tmp_path / "run"), str(back), "--to", "huggingface"]
    assert main([*given, "--config", str(base)]) == 0
    loaded, info = type(model).from_pretrained(back, output_loading_info=True, dtype=torch.float64)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    c.assert_same(loaded.state_dict(), model.state_dict())
    assert main([*given[:2], str(tmp_path / "whole"), "--to", "full"]) == 0
    whole = shardwright.read_checkpoint(tmp_path / "whole").module
    c.assert_same(dict(whole), model.state_dict())


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    dcp, base, out = tmp_path / "dcp", tmp_path / "base", tmp_path / "out"
    dcp.mkdir()
    (dcp / ".metadata").write_bytes(b"")
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"")
    for source, form, kind, text in (
        (dcp, "full", CheckpointError, "cannot be read"),
        (tmp_path, "full", CheckpointError, "is no checkpoint"),
        (base, "huggingface", ConfigError, "needs a config"),
        (base, "shardwright", CheckpointError, "cannot be read"),
    ):
        with pytest.raises(kind, match=text):
            convert_checkpoint(source, out, form)
        assert not out.exists()
    with pytest.raises(ConfigError, match="has the form huggingface already"):
        convert_checkpoint(base, out, "huggingface", config=base)
    with pytest.raises(ConfigError, match="has no use for a config"):
        convert_checkpoint(base, out, "full", config=base)
