"""ComputeConfig: what is accepted, what is refused and in which words, JSON and digest."""

import copy
import dataclasses
import json
import pickle
import subprocess
import sys

import pytest
import torch

from shardwright.runtime.config import BroadcastGenFilesStrategy, ComputeConfig, ReuseType
from shardwright.runtime.distributed_config import DistributedOptimizerConfig
from shardwright.runtime.errors import ConfigError


def refusal(**fields):
    with pytest.raises(ConfigError) as caught:
        ComputeConfig(**{"plan_ngpus": 2, "runtime_ngpus": 4, **fields})
    return str(caught.value)


def test_defaults_and_units():
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=6)
    assert config.num_units == 3
    assert (config.outputs, config.grad_reduction, config.rng, config.seed) == (
        "auto",
        "sum",
        "fast",
        0,
    )
    assert config == ComputeConfig(plan_ngpus=2, runtime_ngpus=6)
    assert hash(config) == hash(ComputeConfig(plan_ngpus=2, runtime_ngpus=6))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


def test_modes_are_called_as_users_know_them():
    assert [mode.value for mode in ReuseType] == ["match", "override", "moo", "graph"]
    assert [mode.value for mode in BroadcastGenFilesStrategy] == [
        "none",
        "all",
        "no_weights",
        "code",
    ]


REFUSALS = {
    "runtime not a multiple": (
        {"runtime_ngpus": 3},
        "runtime_ngpus is not a multiple of plan_ngpus\n"
        "  why:   3 ranks cannot be dealt into units of 2\n"
        "  try:   runtime_ngpus=2 gives 1 unit(s)",
    ),
    "runtime below plan": (
        {"runtime_ngpus": 1},
        "runtime_ngpus is not a multiple of plan_ngpus\n"
        "  why:   1 ranks cannot be dealt into units of 2\n"
        "  try:   runtime_ngpus=2 gives 1 unit(s)",
    ),
    "no ranks": ({"plan_ngpus": 0}, "plan_ngpus is a whole number of at least 1\n  why:   it is 0"),
    "a bool for a count": (
        {"plan_ngpus": True},
        "plan_ngpus is a whole number of at least 1\n  why:   it is True",
    ),
    "negative seed": ({"seed": -1}, "seed is a whole number of at least 0\n  why:   it is -1"),
    "flag": (
        {"use_async_reducer": "yes"},
        "use_async_reducer is True or False\n  why:   it is 'yes'",
    ),
    "reduction": (
        {"grad_reduction": "means"},
        "grad_reduction cannot be 'means'\n  try:   did you mean 'mean'?",
    ),
    "rng": ({"rng": "x"}, "rng cannot be 'x'\n  try:   one of 'fast', 'plan_independent'"),
    "bucket": (
        {"reducer_bucket_cap_mb": 0},
        "reducer_bucket_cap_mb is a size in MiB above 0, or None\n  why:   it is 0",
    ),
    "reducer without gradients": (
        {"inference_only": True, "use_async_reducer": True},
        "use_async_reducer has no meaning with inference_only\n"
        "  why:   without a backward there are no gradients to reduce\n"
        "  try:   leave out use_async_reducer, or inference_only",
    ),
    "zero stage": (
        {"use_zero": 4},
        "use_zero is False, True (stage 1), a stage from 0 to 3, or 'auto' to leave it to "
        "the plan\n  why:   it is 4",
    ),
    "zero groups without zero": (
        {"zero_ngroups": 2},
        "zero_ngroups=2 has no meaning without use_zero\n"
        "  why:   it says how ZeRO splits the optimizer state\n"
        "  try:   set use_zero=True, or leave out zero_ngroups",
    ),
    "zero scatter without zero": (
        {"zero_use_reduce_scatter": True},
        "zero_use_reduce_scatter=True has no meaning without use_zero\n"
        "  why:   it says how ZeRO splits the optimizer state\n"
        "  try:   set use_zero=True, or leave out zero_use_reduce_scatter",
    ),
    "zero groups and units": (
        {"use_zero": True, "zero_ngroups": 3},
        "zero_ngroups does not divide the number of units\n"
        "  why:   4 ranks in units of 2 are 2 unit(s), and they cannot be dealt into 3 groups",
    ),
    "zero without optimizer": (
        {"use_zero": True, "inference_only": True},
        "use_zero has no meaning with inference_only\n"
        "  why:   ZeRO splits optimizer state, and there is none\n"
        "  try:   leave out use_zero, or inference_only",
    ),
    "parameters that nobody gathers, as each rank has all": (
        {"use_zero": 0, "distributed_optimizer": {"overlap_param_sync": True}},
        "overlap_param_sync has no meaning with use_zero=0\n"
        "  why:   after a step no parameters are gathered: each rank updates all that it holds\n"
        "  try:   leave out overlap_param_sync, or use stage 1 or 2",
    ),
    "parameters that nobody gathers, as forward does": (
        {"use_zero": 3, "distributed_optimizer": {"overlap_param_sync": True}},
        "overlap_param_sync has no meaning with use_zero=3\n"
        "  why:   after a step no parameters are gathered: forward gathers each one when it "
        "is used, one ahead already\n"
        "  try:   leave out overlap_param_sync, or use stage 1 or 2",
    ),
    "gradients of pieces, which backward reduces": (
        {"use_zero": 3, "distributed_optimizer": {"contiguous_grad_buffer": False}},
        "contiguous_grad_buffer=False is not possible with use_zero=3\n"
        "  why:   gradients would accumulate in the dtype of the parameters, and backward "
        "reduces them in the same dtype\n"
        "  try:   leave it out; grad_sync_dtype says in which dtype gradients are reduced "
        "and accumulated",
    ),
    "an unknown option of the distributed optimizer": (
        {"distributed_optimizer": {"bucket_cap": 1}},
        "distributed_optimizer has no option 'bucket_cap'\n  try:   did you mean 'bucket_cap_mb'?",
    ),
    "dtype of the distributed optimizer": (
        {"distributed_optimizer": {"dtype": "int8"}},
        "dtype of distributed_optimizer is float32, float16 or bfloat16\n  why:   it is 'int8'",
    ),
    "float64 for the distributed optimizer": (
        {"distributed_optimizer": {"dtype": torch.float64}},
        "dtype of distributed_optimizer is float32, float16 or bfloat16\n"
        "  why:   it is torch.float64\n"
        "  try:   float64 parameters keep their dtype with float32",
    ),
    "flag of the distributed optimizer": (
        {"distributed_optimizer": {"overlap_param_sync": 1}},
        "overlap_param_sync of distributed_optimizer is True or False\n  why:   it is 1",
    ),
    "bucket of the distributed optimizer": (
        {"distributed_optimizer": {"bucket_cap_mb": 0}},
        "bucket_cap_mb of distributed_optimizer is a size in MiB above 0\n  why:   it is 0",
    ),
    "no table": (
        {"distributed_optimizer": True},
        "distributed_optimizer is a DistributedOptimizerConfig, or a dict of its fields\n  "
        "why:   it is a bool",
    ),
    "overlap against overlap": (
        {"distributed_optimizer": {"overlap_grad_sync": False}, "use_async_reducer": True},
        "use_async_reducer and distributed_optimizer contradict each other\n"
        "  why:   use_async_reducer=True and overlap_grad_sync=False say the opposite of "
        "when gradients are reduced\n"
        "  try:   leave out use_async_reducer",
    ),
    "bucket against bucket": (
        {"distributed_optimizer": {}, "reducer_bucket_cap_mb": 25},
        "reducer_bucket_cap_mb and distributed_optimizer contradict each other\n"
        "  why:   reducer_bucket_cap_mb=25, but bucket_cap_mb=100\n"
        "  try:   set distributed_optimizer.bucket_cap_mb=25 in the place of "
        "reducer_bucket_cap_mb",
    ),
    "distributed optimizer without optimizer": (
        {"distributed_optimizer": {}, "inference_only": True},
        "distributed_optimizer has no meaning with inference_only\n"
        "  why:   it is about optimizer state and gradients, and there are none\n"
        "  try:   leave out distributed_optimizer, or inference_only",
    ),
    "order": (
        {"rank_order": "dp-dp"},
        "rank_order is the names of the mesh axes, major to minor, joined by '-'\n"
        "  why:   it is 'dp-dp'\n"
        "  try:   for example 'dp-tp': neighbouring ranks differ along tp",
    ),
    "pas_config value": (
        {"pas_config": {"a": [1, object]}},
        "pas_config['a'][1] is not a JSON value\n"
        "  why:   it is <class 'object'>, a type; the config is stored beside the generated code\n"
        "  try:   use numbers, strings, lists and dicts",
    ),
    "user_config key": (
        {"user_config": {1: 2}},
        "the keys of user_config are strings\n  why:   1 is a int",
    ),
    "user_config": ({"user_config": 3}, "user_config is a dict\n  why:   it is 3"),
    "outputs": (
        {"outputs": "none"},
        "outputs is 'auto', 'all', 'loss', or a dict from output path to 'whole', 'eval', "
        "'sharded' or 'drop'\n"
        "  why:   it is 'none'",
    ),
    "output mode": (
        {"outputs": {"logits": "dropped"}},
        "outputs['logits'] cannot be 'dropped'\n  try:   did you mean 'drop'?",
    ),
    "dynamic dims": (
        {"dynamic_dims": {"ids": "batch"}},
        "dynamic_dims maps inputs to their dims that may vary\n"
        "  why:   it has 'ids': 'batch'\n"
        "  try:   for example {'input_ids': {0: 'batch', 1: 'seq'}}, or {'input_ids': [0, 1]}",
    ),
    "dynamic dim": (
        {"dynamic_dims": {"ids": [-1]}},
        "dynamic_dims['ids']: dims are numbers from 0\n"
        "  why:   -1 is not one\n"
        "  try:   for example {'input_ids': {0: 'batch', 1: 'seq'}}, or {'input_ids': [0, 1]}",
    ),
    "dynamic dim name": (
        {"dynamic_dims": {"ids": {0: "the batch"}}},
        "dynamic_dims['ids']: the name of a size is a Python identifier\n"
        "  why:   'the batch' is not one\n"
        "  try:   for example {'input_ids': {0: 'batch', 1: 'seq'}}, or {'input_ids': [0, 1]}",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case):
    fields, text = REFUSALS[case]
    assert refusal(**fields) == text


def test_fields_are_known_by_name():
    with pytest.raises(ConfigError) as caught:
        ComputeConfig(plan_ngpu=2, runtime_ngpus=2)
    assert (
        str(caught.value)
        == "ComputeConfig has no field 'plan_ngpu'\n  try:   did you mean 'plan_ngpus'?"
    )
    with pytest.raises(ConfigError) as caught:
        ComputeConfig(plan_ngpus=2)
    assert str(caught.value) == (
        "ComputeConfig lacks runtime_ngpus\n  why:   there is no default for it\n  try:   "
        "ComputeConfig(runtime_ngpus=...)"
    )
    with pytest.raises(ConfigError) as caught:
        ComputeConfig(2, 4)
    assert str(caught.value) == (
        "the fields of ComputeConfig are given by name\n  why:   2 are given without one\n"
        "  try:   ComputeConfig(plan_ngpus=..., runtime_ngpus=...)"
    )
    with pytest.raises(ConfigError) as caught:
        DistributedOptimizerConfig(bucket_cap=1)
    assert str(caught.value) == (
        "DistributedOptimizerConfig has no field 'bucket_cap'\n  try:   did you mean "
        "'bucket_cap_mb'?"
    )
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_of_a_dict():
    assert ComputeConfig.of({"plan_ngpus": 1, "runtime_ngpus": 2}) == ComputeConfig(
        plan_ngpus=1, runtime_ngpus=2
    )
    with pytest.raises(ConfigError) as caught:
        ComputeConfig.of({"plan_ngpus": 1, "runtime_ngpu": 2})
    assert (
        str(caught.value)
        == "ComputeConfig has no field 'runtime_ngpu'\n  try:   did you mean 'runtime_ngpus'?"
    )
    with pytest.raises(ConfigError) as caught:
        ComputeConfig.of({"plan_ngpus": 1})
    assert (
        str(caught.value)
        == "compute_config lacks runtime_ngpus\n  try:   add 'runtime_ngpus': the number of ranks"
    )
    with pytest.raises(ConfigError) as caught:
        ComputeConfig.of(4)
    assert (
        str(caught.value)
        == "compute_config is a ComputeConfig, or a dict of its fields\n  why:   it is a int"
    )


def test_dynamic_dims_in_both_forms():
    config = ComputeConfig(
        plan_ngpus=1, runtime_ngpus=1, dynamic_dims={"ids": {1: "s", 0: "b"}, "cache.k": [2]}
    )
    assert config.dim_symbols() == {"cache.k": {2: "cache_k_2"}, "ids": {0: "b", 1: "s"}}


def test_json_both_ways():
    config = ComputeConfig(
        plan_ngpus=2,
        runtime_ngpus=4,
        pas_config={"a": (1, {"b": None})},
        dynamic_dims={"ids": {0: "b", 1: "s"}},
        outputs={"logits": "drop"},
        rank_order="dp-tp",
        reducer_bucket_cap_mb=1.5,
    )
    assert ComputeConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_later_changes_to_the_users_dict_do_not_reach_the_config():
    options = {"a": [1]}
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1, pas_config=options)
    options["a"].append(2)
    assert config.pas_config == {"a": [1]}


def test_digest_tells_configs_apart_and_ignores_the_order_of_keys():
    def digest(**fields):
        return ComputeConfig(**{"plan_ngpus": 1, "runtime_ngpus": 2, **fields}).digest()

    assert digest(pas_config={"a": 1, "b": 2}) == digest(pas_config={"b": 2, "a": 1})
    variants = [
        {},
        {"runtime_ngpus": 4},
        {"pas_config": {"a": 1}},
        {"user_config": {"a": 1}},
        {"seed": 1},
        {"outputs": "loss"},
        {"dynamic_dims": {"x": [0]}},
        {"grad_reduction": "mean"},
        {"rng": "plan_independent"},
        {"rank_order": "dp-tp"},
        {"inference_only": True},
        {"use_async_reducer": True},
    ]
    assert len({digest(**fields) for fields in variants}) == len(variants)


def test_digest_is_the_same_in_another_process():
    code = (
        "from shardwright.runtime.config import ComputeConfig as C;"
        "print(C(plan_ngpus=1, runtime_ngpus=1, pas_config={'b': 1, 'a': 2}).digest())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        other.stdout.strip()
        == ComputeConfig(plan_ngpus=1, runtime_ngpus=1, pas_config={"a": 2, "b": 1}).digest()
    )


def test_the_config_needs_neither_torch_nor_the_compiler():
    code = (
        "import sys, shardwright.runtime.config;"
        "print([m for m in sys.modules if m == 'torch' or m.startswith('shardwright.compiler')])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"


def test_the_option_table_of_the_distributed_optimizer():
    assert DistributedOptimizerConfig().to_json() == {
        "dtype": "float32",
        "grad_sync_dtype": None,
        "overlap_grad_sync": True,
        "overlap_param_sync": False,
        "bucket_cap_mb": 100,
        "contiguous_param_buffer": False,
        "contiguous_grad_buffer": True,
        "store_param_remainders": False,
    }
    for spelled in ("bf16", "bfloat16", torch.bfloat16):
        assert (
            DistributedOptimizerConfig(dtype=spelled, grad_sync_dtype=spelled).to_json()["dtype"]
            == "bfloat16"
        )
    config = ComputeConfig(
        plan_ngpus=1, runtime_ngpus=2, distributed_optimizer={"dtype": "bf16"}, zero_ngroups=2
    )
    assert (
        config.distributed_optimizer == DistributedOptimizerConfig(dtype=torch.bfloat16)
        and config.zero_stage == 1
    )
    assert ComputeConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert hash(config) == hash(
        dataclasses.replace(config, distributed_optimizer=DistributedOptimizerConfig(dtype="bf16"))
    )
    assert dataclasses.replace(config, use_zero=2).zero_stage == 2
    left = dataclasses.replace(config, use_zero="auto")
    assert left.leaves_zero_to_plan and ComputeConfig.from_json(left.to_json()) == left
    assert left.with_zero(3) == dataclasses.replace(config, use_zero=3)
    assert left.with_zero(0) == dataclasses.replace(config, use_zero=0, zero_ngroups=1)
    for stage in range(4):
        config = ComputeConfig(
            plan_ngpus=1, runtime_ngpus=2, distributed_optimizer={}, use_zero=stage
        )
        assert config.zero_stage == stage and ComputeConfig.from_json(config.to_json()) == config
