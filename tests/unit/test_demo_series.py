# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from examples.demo.series import Answer, EngineMemory, Sample, Story, bar, plain_line, rows, verdict

MIB = 1 << 20


def memory(lease: int, owned: int = 0, cached: int = 0, parked: int = 0) -> EngineMemory:
    return EngineMemory(lease * MIB, owned * MIB, cached * MIB, parked * MIB)


def good_story() -> Story:
    story = Story(names=("facts", "stories"), budget_bytes=130 * MIB)
    story.samples = [
        Sample(0.0, {}),
        Sample(1.0, {"facts": memory(100, owned=90)}),
        Sample(2.0, {"facts": memory(30, owned=20), "stories": memory(99, owned=95)}),
        Sample(3.0, {"facts": memory(10), "stories": memory(10, cached=8)}),
    ]
    story.asked = {"facts": 1, "stories": 1}
    story.answers = [Answer("facts", "why?", "because"), Answer("stories", "tell", "once upon")]
    return story


def failures(story: Story, least_samples: int = 4) -> list[str]:
    return [check.title for check in verdict(story, least_samples) if not check.passed]


def test_a_good_run_passes() -> None:
    assert failures(good_story()) == []


def test_a_missing_answer_fails() -> None:
    story = good_story()
    story.asked["stories"] = 2
    assert failures(story) == ["every request was answered"]


def test_an_error_an_empty_text_and_an_engine_that_was_not_asked_fail() -> None:
    for answers, asked in (
        ([Answer("facts", "why?", "because"), Answer("stories", "tell", "x", error="HTTP 500")], 1),
        ([Answer("facts", "why?", "because"), Answer("stories", "tell", "")], 1),
        ([Answer("facts", "why?", "because")], 0),
    ):
        story = good_story()
        story.answers, story.asked["stories"] = answers, asked
        assert failures(story) == ["every request was answered"]


def test_leases_above_the_budget_fail_even_when_each_engine_is_below_it() -> None:
    story = good_story()
    story.samples.insert(2, Sample(1.5, {"facts": memory(66), "stories": memory(65)}))
    assert failures(story) == ["leases never passed the budget"]


def test_an_unknown_engine_counts_against_the_budget() -> None:
    story = good_story()
    story.samples.insert(2, Sample(1.5, {"facts": memory(90), "stranger": memory(41)}))
    assert failures(story) == ["leases never passed the budget"]


def test_too_few_samples_prove_nothing() -> None:
    assert failures(good_story(), least_samples=5) == ["leases never passed the budget"]


def test_memory_that_stays_fails_for_that_engine_only() -> None:
    story = good_story()
    story.samples.append(Sample(4.0, {"facts": memory(34), "stories": memory(10)}))
    assert failures(story) == ["memory of facts fell back"]


def test_a_small_engine_may_keep_its_idle_pages_twice() -> None:
    story = good_story()
    story.samples[0] = Sample(0.0, {"facts": memory(20), "stories": memory(10)})
    story.samples.append(Sample(4.0, {"facts": memory(40), "stories": memory(10)}))
    assert failures(story) == []
    story.samples.append(Sample(5.0, {"facts": memory(41), "stories": memory(10)}))
    assert failures(story) == ["memory of facts fell back"]


def test_an_engine_that_stays_at_its_peak_fails_however_small_it_is() -> None:
    story = good_story()
    story.samples[0] = Sample(0.0, {"facts": memory(60)})
    story.samples.append(Sample(4.0, {"facts": memory(100), "stories": memory(10)}))
    assert failures(story) == ["memory of facts fell back"]


def test_an_engine_that_never_leased_anything_fails() -> None:
    story = good_story()
    story.samples = [Sample(sample.at_s, {"facts": sample.of("facts")}) for sample in story.samples]
    assert "memory of stories fell back" in failures(story)


def test_static_engines_that_would_fit_show_nothing() -> None:
    story = good_story()
    story.budget_bytes = 185 * MIB
    assert failures(story) == ["static engines would not fit"]


def test_static_is_the_most_that_running_requests_owned_not_the_lease() -> None:
    story = good_story()
    assert (story.static_bytes("facts"), story.static_bytes("stories")) == (90 * MIB, 95 * MIB)
    assert story.all_static_bytes() == 185 * MIB
    assert story.peak_lease_bytes("facts") == 100 * MIB
    assert story.peak_together_bytes() == 129 * MIB


def test_rows_show_the_latest_sample_and_the_sum() -> None:
    story = good_story()
    story.samples = story.samples[:3]
    story.asked["facts"] = 5
    facts, stories, card = rows(story, bar_width=13)
    assert (facts.running, facts.answered, facts.lease, facts.owned, facts.rest) == ("4", "1", "30", "20", "10")
    assert stories.bar == "#" * 10 + "..."
    assert (card.name, card.running, card.lease, card.owned, card.rest) == ("card", "4", "129", "115", "14")


def test_rows_before_the_first_sample_are_empty() -> None:
    assert [row.lease for row in rows(Story(("a", "b"), 10 * MIB))] == ["0"] * 3


def test_bar_shows_a_little_and_marks_too_much() -> None:
    assert bar(0, 100, 4) == "...."
    assert bar(1, 100, 4) == "#..."
    assert bar(100, 100, 4) == "####"
    assert bar(101, 100, 4) == "####!"


def test_the_plain_line_names_each_engine_and_the_card() -> None:
    assert plain_line(good_story()) == "   3.0 s  facts 10 MiB (0 running)   stories 10 MiB (0 running)   card 20 MiB of 130 MiB"


def test_engines_are_called_by_number_and_kind() -> None:
    for kinds, words in (
        (("vLLM", "vLLM"), "two vLLM engines"),
        (("vLLM", "vLLM", "vLLM"), "three vLLM engines"),
        (("vLLM", "SGLang"), "one vLLM and one SGLang engine"),
    ):
        assert Story(names=("a",) * len(kinds), budget_bytes=1, kinds=kinds).who == words
