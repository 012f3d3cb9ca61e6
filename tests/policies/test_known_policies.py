"""Policies by name."""

import pytest

from shardwright.policies import known_policies
from shardwright.policies.known_policies import find_policy, policy_names, register_policy
from shardwright.policies.policy import NoOptions
from shardwright.runtime.errors import PlanError

KNOWN = "'autodist', 'cp', 'data', 'dp', 'ep', 'hybrid', 'pp', 'saved', 'tensor', 'tp'"


def my_policy(graph, config):
    return graph


class CallablePolicy:
    def __call__(self, graph, config):
        return graph


@pytest.fixture(autouse=True)
def no_registrations(monkeypatch):
    monkeypatch.setattr(known_policies, "_registered", {})


def refusal(policy):
    with pytest.raises(PlanError) as caught:
        find_policy(policy)
    return str(caught.value)


def test_functions_and_callable_objects():
    found = find_policy(my_policy)
    assert (found.apply, found.options, found.built_in) == (my_policy, None, False)
    assert found.name.endswith("test_known_policies.my_policy")
    assert find_policy(CallablePolicy()).name.endswith("test_known_policies.CallablePolicy")


def test_registered_names():
    register_policy("mine", options=NoOptions)(my_policy)
    found = find_policy("mine")
    assert (found.name, found.apply, found.options, found.built_in) == (
        "mine",
        my_policy,
        NoOptions,
        False,
    )
    assert "mine" in policy_names()


def test_refusals():
    assert refusal("dataa") == "there is no policy 'dataa'\n  try:   did you mean 'data'?"
    assert refusal("megatron") == f"there is no policy 'megatron'\n  try:   one of {KNOWN}"
    assert refusal(3) == (
        "pas_policy is the name of a policy, or a function of the graph and the config\n"
        "  why:   it is 3\n"
        f"  try:   one of {KNOWN}"
    )

    def wrong(graph):
        return graph

    text = refusal(wrong)
    assert text.startswith("policy ") and "wrong does not take a graph and a config\n" in text
    assert text.endswith(
        "\n  why:   its parameters are (graph)\n  try:   def policy(graph: IRGraph, config: "
        "ComputeConfig) -> IRGraph"
    )
    with pytest.raises(PlanError) as caught:
        register_policy("tp")
    assert (
        str(caught.value) == "'tp' is the name of a built-in policy\n  try:   choose another name"
    )
