"""Options of policies: names, types, the original's names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pytest

from shardwright.policies.known_policies import find_policy
from shardwright.policies.policy import NoOptions, Policy, read_options
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.original_names import ORIGINAL_OPTION_NAMES


@dataclass(frozen=True)
class Options:
    num_stages: int
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    recompute: tuple[str, ...] = ()
    memory_limit_gb: float | None = None
    use_bf16: bool = False
    weights: Mapping[str, int] | None = None


def refusal(options, pas_config):
    with pytest.raises(ConfigError) as caught:
        read_options(options, pas_config, policy="mine")
    return str(caught.value)


def test_values_become_the_dataclass():
    given = {"num_stages": 2, "recompute": ["a", "b"], "memory_limit_gb": 3, "weights": {"x": 1}}
    assert read_options(Options, given, policy="mine") == Options(
        2, "1f1b", ("a", "b"), 3, False, {"x": 1}
    )


def test_the_originals_names_mean_ours():
    given = {
        "pp_size": 2,
        "pipeline_scheduler": "gpipe",
        "recompute_modules": ["x"],
        "mem_constraint": 4,
        "use_bf16": True,
    }
    assert read_options(Options, given, policy="mine") == Options(2, "gpipe", ("x",), 4, True)
    assert not set(ORIGINAL_OPTION_NAMES) & set(ORIGINAL_OPTION_NAMES.values())


def test_refusals():
    assert refusal(Options, {"num_stage": 2}) == (
        "policy 'mine' has no option 'num_stage'\n  try:   did you mean 'num_stages'?"
    )
    assert refusal(Options, {"pipeline_nstage": 2}) == (
        "policy 'mine' has no option 'pipeline_nstage'\n  try:   did you mean 'pipeline_nstages'?"
    )
    assert (
        refusal(NoOptions, {"a": 2})
        == "policy 'mine' has no option 'a'\n  try:   leave pas_config empty"
    )
    assert refusal(Options, {"num_stages": 2, "pp_size": 2}) == (
        "option 'num_stages' of policy 'mine' is given twice\n"
        "  why:   'pp_size' is another name of it\n"
        "  try:   keep 'num_stages'"
    )
    assert (
        refusal(Options, {})
        == "policy 'mine' needs option 'num_stages'\n  why:   it takes a whole number"
    )


def test_options_of_the_original_that_belong_elsewhere():
    for name, value in (("use_bf16", True), ("use_fp16", False)):
        for policy in ("dp", "tp", "data", "pp", "hybrid", "autodist"):
            config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1, pas_config={name: value})
            with pytest.raises(ConfigError) as caught:
                find_policy(policy).check(config)
            dtype = {"use_bf16": "bfloat16", "use_fp16": "float16"}[name]
            assert str(caught.value) == (
                f"policy {policy!r} has no option {name!r}\n"
                "  try:   the module's dtypes are what is planned for: parallelize(..., "
                f"module_dtype=torch.{dtype}), with "
                "ComputeConfig(distributed_optimizer={}) for float32 masters; or enter "
                "autocast in forward"
                + (". Scale losses by LossScaler" if name == "use_fp16" else "")
            )
    assert refusal(NoOptions, {"update_freq": 4}) == (
        "policy 'mine' has no option 'update_freq'\n"
        "  try:   give train_step several samples, or run all backward passes but the last "
        "under optimizer.no_sync()"
    )
    find_policy("autodist").check(
        ComputeConfig(plan_ngpus=1, runtime_ngpus=1, pas_config={"update_freq": 4})
    )


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_stages", True, "a whole number"),
        ("num_stages", 1.5, "a whole number"),
        ("pipeline_scheduler", "2f2b", "one of '1f1b', 'gpipe'"),
        ("recompute", "a", "a list, each item a string"),
        ("recompute", [1], "a list, each item a string"),
        ("memory_limit_gb", "8", "a number or None"),
        ("use_bf16", 1, "True or False"),
        ("weights", {"a": "b"}, "a dict, each value a whole number or None"),
    ],
)
def test_values_of_another_type(name, value, words):
    text = refusal(Options, {"num_stages": 1, name: value})
    assert (
        text == f"option {name!r} of policy 'mine' cannot be {value!r}\n  why:   it takes {words}"
    )


def test_a_policy_without_declared_options_reads_pas_config_itself():
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1, pas_config={"anything": 1})
    Policy("mine", lambda graph, config: graph).check(config)
    with pytest.raises(ConfigError, match="policy 'mine' has no option 'anything'"):
        Policy("mine", lambda graph, config: graph, NoOptions).check(config)
