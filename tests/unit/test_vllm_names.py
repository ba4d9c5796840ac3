# SPDX-License-Identifier: Apache-2.0
"""Names by which vLLM finds our classes, names by which an engine's processes find each other, and what is refused by name."""

import pickle
from types import SimpleNamespace

import pytest

from kvcached.config import INSTANCE_PATTERN, load_settings
from kvcached.core.canary import Note, Word
from kvcached.engines.vllm.chain import class_over, is_ours, name_over
from kvcached.engines.vllm.identity import Identity, instances_of, note_cores
from kvcached.engines.vllm.steps import Steps
from kvcached.engines.vllm.support import release_of, require_features, require_release, require_specs
from kvcached.errors import EngineNotSupported, SettingError

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
        "parallel_config": SimpleNamespace(world_size=1, data_parallel_size=1, data_parallel_index=0),
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


def cores(index, size=2, **changes):
    return config(parallel_config=SimpleNamespace(world_size=1, data_parallel_size=size, data_parallel_index=index), **changes)


def test_engine_cores_have_names_of_their_own_that_the_front_end_knows():
    settings = load_settings({"KVCACHED_IPC_NAME": "chat"})
    front_end = cores(0)
    note_cores(front_end)
    assert instances_of(settings, front_end) == ["chat-dp0", "chat-dp1"]
    assert [Identity.of(settings, cores(core)).instance for core in range(2)] == ["chat-dp0", "chat-dp1"]


def test_a_core_that_is_told_that_it_is_alone_keeps_its_number():
    """vLLM does so to the cores of a model without experts; what the front end noted travels with the configuration."""
    settings, front_end = load_settings({"KVCACHED_IPC_NAME": "chat"}), cores(0)
    note_cores(front_end)
    front_end.parallel_config.data_parallel_size = 1
    assert Identity.of(settings, front_end).instance == "chat-dp0"
    assert Identity.of(settings, cores(1, size=1)).instance == "chat-dp1"
    assert Identity.of(settings, cores(0, size=1)).instance == "chat"


def test_cores_share_a_made_name_whether_or_not_vllm_marks_its_id():
    settings = load_settings({})
    one, other = (Identity.of(settings, cores(1, instance_id=name)) for name in ("abc12", "abc12_dp1"))
    assert one == other
    assert one.instance in instances_of(settings, cores(0))


def test_a_name_without_room_for_the_number_of_a_core_is_refused():
    settings = load_settings({"KVCACHED_IPC_NAME": "x" * 38})
    assert Identity.of(settings, config()).instance == "x" * 38
    with pytest.raises(SettingError, match=r"KVCACHED_IPC_NAME=x+ leaves no room"):
        Identity.of(settings, cores(1))


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
        ({"parallel_config": SimpleNamespace(world_size=2, decode_context_parallel_size=2)}, "decode_context_parallel_size 2"),
        ({"parallel_config": SimpleNamespace(world_size=2, prefill_context_parallel_size=2)}, "prefill_context_parallel_size 2"),
        ({"parallel_config": SimpleNamespace(world_size=2, distributed_executor_backend="external_launcher")}, "external_launcher"),
        ({"parallel_config": SimpleNamespace(world_size=1, enable_elastic_ep=True)}, "enable_elastic_ep"),
        ({"parallel_config": SimpleNamespace(world_size=1, enable_dbo=True)}, "enable_dbo"),
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
    assert [Steps.operations_of(output) for output in outputs] == [(), (), ()]


def test_what_a_step_has_to_map_survives_the_way_to_other_processes():
    steps, output = Steps(), SimpleNamespace()
    steps.begin()
    notes = (Note(Word.TAKEN, (1, 2), 3),)
    steps.stamp(output, ((1, "map"), (2, "unmap")), notes)
    arrived = pickle.loads(pickle.dumps(output))
    assert Steps.operations_of(arrived) == ((1, "map"), (2, "unmap"))
    assert Steps.number_of(arrived) == 1
    assert Steps.operations_of(SimpleNamespace()) == ()
    assert Steps.notes_of(arrived) == notes
    assert Steps.notes_of(SimpleNamespace()) == ()
    assert steps.next_use() < steps.next_use()
