"""``search_plan``: called like ``parallelize``, with a module or a class."""

import inspect

import pytest
from api_jobs import Net, X

import shardwright

CONFIG = {"plan_ngpus": 2, "runtime_ngpus": 2, "pas_config": {"hardware": "cpu"}}


def test_arguments_are_named_alike():
    search = inspect.signature(shardwright.search_plan).parameters
    compile_ = inspect.signature(shardwright.parallelize).parameters
    verify = inspect.signature(shardwright.verify).parameters
    for name, parameter in search.items():
        assert (parameter.annotation, parameter.default, parameter.kind) == (
            compile_[name].annotation,
            compile_[name].default,
            compile_[name].kind,
        )
    assert list(verify)[1:4] == list(compile_)[1:4]


@pytest.mark.parametrize("given", [Net(), Net], ids=["module", "class"])
def test_a_module_or_a_class(given):
    found = shardwright.search_plan(given, {"x": X}, CONFIG)
    assert found.plan.policy == "autodist" and found.dummy_forward_args.keys() == {"x"}
