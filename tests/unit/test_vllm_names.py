# SPDX-License-Identifier: Apache-2.0
"""Names by which vLLM finds our classes, names by which an engine's processes find each other, and what is refused by name."""

from types import SimpleNamespace

import pytest

from kvcached.config import INSTANCE_PATTERN, load_settings
from kvcached.engines.vllm.chain import class_over, is_ours, name_over
from kvcached.engines.vllm.identity import Identity
from kvcached.engines.vllm.steps import Steps
from kvcached.engines.vllm.support import release_of, require_features, require_release, require_specs
from kvcached.errors import EngineNotSupported

HERE = "kvcached.engines.vllm.worker"


class Mixin:
    """Ours."""

    def greet(self):
        return f"elastic {super().greet()}"


class Stock:
    def greet(self):
        return "stock"


def test_a_name_carries_the_class_that_it_extends():
    name = name_over(HERE, f"{__name__}.Stock")
    module, _, attribute = name.rpartition(".")
    assert module == HERE
    made = class_over(Mixin, attribute)
    assert made().greet() == "elastic stock"
    assert made.__name__ == "ElasticStock"
    assert made is class_over(Mixin, attribute)
    assert is_ours(name, HERE)


@pytest.mark.parametrize("name", [None, "vllm.v1.worker.gpu_worker.Worker", HERE, f"{HERE}.Other", "kvcached.engines.vllm.scheduler.a:B"])
def test_other_names_are_not_ours(name):
    assert not is_ours(name, HERE)


def test_an_attribute_that_spells_no_class_is_no_attribute():
    with pytest.raises(AttributeError, match="has no attribute 'Worker'"):
        class_over(Mixin, "Worker")


def config(**changes):
    values = {
        "instance_id": "abc12",
        "model_config": SimpleNamespace(model="/models/Some Model", served_model_name=None, enable_sleep_mode=False),
        "parallel_config": SimpleNamespace(world_size=1),
        "cache_config": SimpleNamespace(cache_dtype="auto", kv_offloading_size=None),
        "kv_transfer_config": None,
        "attention_config": SimpleNamespace(hisparse_config=None),
    }
    return SimpleNamespace(**{**values, **changes})


def test_processes_of_one_engine_agree_and_engines_differ():
    settings = load_settings({})
    one, again, other = (Identity.of(settings, config(instance_id=name)) for name in ("1", "1", "2"))
    assert one == again
    assert one.instance != other.instance
    assert one.name == "Some Model"
    assert INSTANCE_PATTERN.fullmatch(one.instance)
    assert one.instance.startswith("Some-Model-")


@pytest.mark.parametrize("name", ["", "...", "ä", "x" * 300, ["served", "second"]])
def test_any_model_name_makes_an_instance_name(name):
    model = SimpleNamespace(model="/m/fallback", served_model_name=name)
    assert INSTANCE_PATTERN.fullmatch(Identity.of(load_settings({}), config(model_config=model)).instance)


def test_given_names_are_kept():
    settings = load_settings({"KVCACHED_IPC_NAME": "chat", "KVCACHED_NAME": "Our model"})
    assert Identity.of(settings, config()) == ("chat", "Our model")


@pytest.mark.parametrize(("version", "release"), [("0.32.0+cpu", (0, 32)), ("0.24.1", (0, 24)), ("1.0.0rc1", (1, 0))])
def test_versions_are_read(version, release):
    assert release_of(version) == release


@pytest.mark.parametrize("version", ["0.24.0", "0.33.9+cu130"])
def test_the_ends_of_the_range_are_in_it(version):
    require_release(version)


@pytest.mark.parametrize("version", ["0.23.9", "0.34.0", "1.0.0", "dev"])
def test_other_releases_are_refused_by_name(version):
    with pytest.raises(EngineNotSupported, match=version.replace(".", r"\.")):
        require_release(version)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parallel_config": SimpleNamespace(world_size=2)}, "2 worker processes"),
        ({"kv_transfer_config": SimpleNamespace(kv_connector="NixlConnector")}, "NixlConnector"),
        ({"cache_config": SimpleNamespace(cache_dtype="auto", kv_offloading_size=4.0)}, "KV offloading"),
        ({"attention_config": SimpleNamespace(hisparse_config=object())}, "HiSparse"),
        (
            {
                "cache_config": SimpleNamespace(cache_dtype="fp8_e4m3", kv_offloading_size=None),
                "model_config": SimpleNamespace(enable_sleep_mode=True),
            },
            "sleep mode",
        ),
    ],
)
def test_what_cannot_be_elastic_is_refused_by_name_with_a_way_out(changes, says):
    with pytest.raises(EngineNotSupported, match=says) as refusal:
        require_features(config(**changes))
    assert "unset ENABLE_KVCACHED" in str(refusal.value)
    require_features(config())


def test_cache_kinds_that_bypass_the_pool_are_refused():
    def group(kind):
        return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=type(kind, (), {})())])

    require_specs(group("FullAttentionSpec"))
    with pytest.raises(EngineNotSupported, match="SinkFullAttentionSpec"):
        require_specs(group("SinkFullAttentionSpec"))


def test_a_step_is_known_again_by_the_number_on_its_output():
    steps, outputs = Steps(), [SimpleNamespace() for _ in range(3)]
    for output in outputs:
        steps.begin()
        steps.stamp(output)
    assert [Steps.number_of(output) for output in outputs] == [1, 2, 3]
    assert Steps.number_of(SimpleNamespace()) == 0
    assert steps.scheduled == 3
    assert steps.next_use() < steps.next_use()
