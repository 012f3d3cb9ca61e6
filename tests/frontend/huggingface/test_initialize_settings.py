"""What the config of ``initialize`` may be."""

from typing import Any

import pytest

from shardwright.frontend.huggingface.initialize_settings import Settings, asks_for_steps
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError

EXAMPLE = '{"model_parallelism": {"enable": True, "tensor_parallel_size": 2}}'


def asked(**fields: Any) -> dict[str, Any]:
    return {"model_parallelism": {"enable": True, **fields}}


@pytest.mark.parametrize(
    ("config", "policy", "ranks"),
    [
        (asked(tensor_parallel_size=2), "tp", (2, 4)),
        (asked(tensor_parallel_size=1), "dp", (1, 4)),
        (asked(tensor_parallel_size=4, pipeline_parallel_size=1), "tp", (4, 4)),
        ({**asked(tensor_parallel_size=2), "plan_ngpus": 2, "pas_policy": "data"}, "data", (2, 4)),
        ({"plan_ngpus": 2, "runtime_ngpus": 4}, "tp", (2, 4)),
        ({"plan_ngpus": 4, "pas_policy": "autodist"}, "autodist", (4, 4)),
        (ComputeConfig(plan_ngpus=4, runtime_ngpus=4), "tp", (4, 4)),
    ],
)
def test_configs_that_are_read(config: Any, policy: str, ranks: tuple[int, int]) -> None:
    settings = Settings.of(config, 4)
    assert settings.policy.name == policy
    assert (settings.config.plan_ngpus, settings.config.runtime_ngpus) == ranks


def test_configs_with_stages() -> None:
    """They are read where whole steps are run."""
    steps = [
        asked(pipeline_parallel_size=2),
        asked(tensor_parallel_size=2, pipeline_parallel_size=2),
        {"plan_ngpus": 4, "pas_policy": "hybrid", "pas_config": {"tp": 2}},
        {"plan_ngpus": 2, "use_end2end": True},
    ]
    found = [Settings.of(config, 4, takes_steps=True) for config in steps]
    assert all(map(asks_for_steps, steps)) and not asks_for_steps(asked(tensor_parallel_size=2))
    assert [settings.policy.name for settings in found] == ["pp", "hybrid", "hybrid", "tp"]
    assert [settings.config.plan_ngpus for settings in found] == [2, 4, 4, 2]
    assert found[1].config.pas_config == {"num_stages": 2, "tp": 2}
    assert all(settings.config.use_end2end for settings in found)


def test_fields_of_compute_config_have_their_own_names() -> None:
    settings = Settings.of({**asked(tensor_parallel_size=2), "seed": 7, "use_zero": 3}, 4)
    assert settings.config == ComputeConfig(plan_ngpus=2, runtime_ngpus=4, seed=7, use_zero=3)
    assert not settings.names_dims
    named = {**asked(tensor_parallel_size=2), "dynamic_dims": {"input_ids": [0]}}
    assert Settings.of(named, 4).names_dims


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ([2], f"config is a dict or a ComputeConfig\n  why:   it is [2]\n  try:   {EXAMPLE}"),
        (
            {},
            "the config would do nothing\n"
            "  why:   it does not say how many ranks share a model\n"
            f"  try:   {EXAMPLE}",
        ),
        (
            {"model_parallelism": {"tensor_parallel_size": 2}},
            "the config would do nothing\n"
            "  why:   'model_parallelism' has no 'enable': True\n"
            f"  try:   {EXAMPLE}",
        ),
        (
            {"model_parallelism": {"enable": False, "tensor_parallel_size": 2}},
            f"the config would do nothing\n  why:   'enable' is False\n  try:   {EXAMPLE}",
        ),
        (
            asked(),
            "the config would do nothing\n"
            "  why:   'model_parallelism' has no 'tensor_parallel_size'\n"
            f"  try:   {EXAMPLE}",
        ),
        (
            {"model_paralelism": {}},
            "the config of initialize has no key 'model_paralelism'\n"
            "  try:   did you mean 'model_parallelism'?",
        ),
        (
            asked(tensor_paralel_size=2),
            "'model_parallelism' has no key 'tensor_paralel_size'\n"
            "  try:   did you mean 'tensor_parallel_size'?",
        ),
        (
            asked(tensor_parallel_size=2, seed=1),
            "'model_parallelism' has no key 'seed'\n"
            "  try:   'seed' stands beside 'model_parallelism', not in it",
        ),
        (
            {"tensor_parallel_size": 2},
            "'tensor_parallel_size' stands beside 'model_parallelism', and belongs into it\n"
            f"  try:   {EXAMPLE}",
        ),
        (
            asked(tensor_parallel_size=3),
            "4 ranks cannot be dealt into models of 3\n"
            "  why:   a model is shared by 3 ranks, and data-parallel ranks are what remains\n"
            "  try:   with 4 ranks, one of 1, 2, 4; or start a multiple of 3 ranks",
        ),
        (
            asked(tensor_parallel_size=2, pipeline_parallel_size=2),
            "pipeline_parallel_size=2 is not for initialize\n"
            "  why:   a pipeline runs whole steps of several microbatches, and a call of forward "
            "is not one\n"
            "  try:   shardwright.parallelize(..., 'hybrid') with use_end2end=True has train_step; "
            "ShardwrightTrainer takes pipelines, too",
        ),
        (
            {**asked(tensor_parallel_size=2), "plan_ngpus": 4},
            "plan_ngpus and tensor_parallel_size contradict each other\n"
            "  why:   they are 4 and 2\n"
            "  try:   leave out plan_ngpus",
        ),
        (
            {**asked(tensor_parallel_size=2), "runtime_ngpus": 8},
            "runtime_ngpus is 8, and 4 ranks are running\n"
            "  try:   leave it out: it is the number of ranks of the job",
        ),
        (
            {**asked(tensor_parallel_size=2), "use_zero": "auto"},
            "use_zero='auto' is not for initialize\n"
            "  why:   each program has a plan, which would choose a stage of its own, and all "
            "programs of a model share one optimizer\n"
            "  try:   use_zero=1, 2 or 3 with shardwright.build_optimizer",
        ),
        (
            {
                **asked(tensor_parallel_size=2),
                "pas_policy": "autodist",
                "pas_config": {"global_batch": 8},
                "dynamic_dims": {"input_ids": {0: "batch"}},
            },
            "option 'global_batch' is not for initialize\n"
            "  why:   a call of forward is one batch: there are no microbatches whose size could "
            "be searched\n"
            "  try:   leave it out: plans are searched for the sizes of dummy_forward_args",
        ),
        (
            asked(tensor_parallel_size=True),
            "tensor_parallel_size is a whole number of at least 1\n  why:   it is True",
        ),
    ],
)
def test_configs_that_are_refused(config: Any, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Settings.of(config, 4)
    assert str(error.value) == text


def test_without_a_job_the_config_says_how_many_ranks_there_will_be() -> None:
    with pytest.raises(ConfigError, match="the number of ranks is not known"):
        Settings.of(asked(tensor_parallel_size=2), None)
    settings = Settings.of({**asked(tensor_parallel_size=2), "runtime_ngpus": 8}, None)
    assert settings.config.num_units == 4
