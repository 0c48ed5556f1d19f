import re

import pytest

from engine.core.trace import RequestTrace, Scheduled, StepTrace
from engine.workload.check import WorkloadError
from engine.workload.claims import MEASURES, Claim, Run, count, judge
from engine.workload.datafile import DataFileError, parse, to_json, to_yaml
from engine.workload.driver import run_offline
from engine.workload.scenes import Scene, load_scenes, parse_scene
from engine.workload.spec import plan
from tests.workload.kit import encode, make, records, run

CATALOGUE = load_scenes()
WANTED = {
    "second-token", "long-prompt-whole", "long-prompt-chunked", "shared-prompt", "small-pool", "static-batching",
    "continuous-batching", "burst", "short-and-long", "four-prompts",
}  # fmt: skip


def test_every_story_is_there_and_no_file_is_broken():
    assert CATALOGUE.problems == ()
    assert {scene.id for scene in CATALOGUE.scenes} == WANTED
    assert [scene.order for scene in CATALOGUE.scenes] == sorted(scene.order for scene in CATALOGUE.scenes)


@pytest.mark.parametrize("scene", CATALOGUE.scenes, ids=lambda scene: scene.id)
def test_a_scene_shows_what_it_claims(scene):
    result = run(scene.workload, scene.engine_config())
    assert result.refused == ()
    assert scene.shows
    for claim in scene.shows:
        outcome = judge(claim, records(result))
        assert outcome.holds, outcome.text


@pytest.mark.parametrize("scene", CATALOGUE.scenes, ids=lambda scene: scene.id)
def test_a_scene_is_short_says_what_to_look_at_and_is_the_same_everywhere(scene):
    assert len(re.findall(r"[.](?: |$)", scene.look)) == 2
    assert scene.workload.arrivals.unit == "steps"
    assert plan(scene.workload)
    result = run(scene.workload, scene.engine_config())
    computed = count("computed_tokens", records(result)) + count("padding_tokens", records(result))
    steps = count("steps", records(result))
    assert computed / 400 + steps / 15 < 15, "seconds on a slow machine"
    slower = make(scene.engine_config(), cost=lambda batch: 3.0)
    again = run_offline(slower, scene.workload, encode)
    rows = [[(row.request_id, row.kind, row.num_tokens) for row in step.scheduled] for step in result.steps]
    assert rows == [[(row.request_id, row.kind, row.num_tokens) for row in step.scheduled] for step in again.steps]


@pytest.mark.parametrize("scene", CATALOGUE.scenes, ids=lambda scene: scene.id)
def test_a_scene_survives_writing_and_reading(scene):
    assert parse(to_yaml(scene), "s.yaml", Scene) == scene
    assert parse(to_json(scene), "s.json", Scene) == scene


def test_the_claims_tell_the_scenes_apart():
    static, continuous = (CATALOGUE.find(name) for name in ("static-batching", "continuous-batching"))
    assert static.workload == continuous.workload
    swapped = records(run(static.workload, continuous.engine_config()))
    assert not all(judge(claim, swapped).holds for claim in static.shows)
    whole, chunked = (CATALOGUE.find(name) for name in ("long-prompt-whole", "long-prompt-chunked"))
    assert whole.workload == chunked.workload
    swapped = records(run(whole.workload, chunked.engine_config()))
    assert not any(judge(claim, swapped).holds for claim in whole.shows)


def test_the_threshold_that_the_text_proposes_helps():
    scene = CATALOGUE.find("short-and-long")
    config = scene.engine_config().replace(long_prefill_token_threshold=48)
    assert count("wait_steps", records(run(scene.workload, config)), "short0") == 0


GOOD = """\
id: mine
title: Mine
look: First look here. Then look there.
config: {max_model_len: 128}
workload:
  arrivals: {unit: steps}
  requests:
    - {id: A, prompt_tokens: 16, output_tokens: 8}
shows:
  - {measure: steps, at_least: 8}
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("title: Mine", "tittle: Mine", 2, "no such setting"),
        ("max_model_len: 128", "max_model_len: lots", 1, "max_model_len='lots' must be a whole number"),
        ("max_model_len: 128", "max_len: 128", 1, "unknown engine setting 'max_len'"),
        ("max_model_len: 128", "max_model_len: 20", 1, "together 24, but max_model_len=20"),
        ("prompt_tokens: 16", "prompt_tokens: 0", 8, "prompt_tokens=0 must be a whole number from 1"),
        ("prompt_tokens: 16", "prompt_tokens: sixteen", 8, "must be a whole number or nothing, but is a text"),
        ("unit: steps", "unit: minutes", 6, "Invalid enum value 'minutes'"),
        ("measure: steps", "measure: speed", 10, "measure='speed' must be one of 'steps'"),
        ("at_least: 8", "request: A", 10, "has no limit"),
        ("measure: steps", "measure: chunks, request: B", 1, "no request of this id; it has A"),
        ("id: mine", "id: My Scene", 1, "id='My Scene' must be small letters"),
    ],
)
def test_a_bad_scene_names_file_line_and_what_to_change(old, new, line, words):
    assert parse_scene(GOOD, "mine.yaml").id == "mine"
    with pytest.raises(DataFileError) as caught:
        parse_scene(GOOD.replace(old, new, 1), "mine.yaml")
    assert caught.value.line == line, str(caught.value)
    assert words in str(caught.value)


def test_a_teachers_scene_joins_the_list_and_a_broken_one_is_told(tmp_path):
    (tmp_path / "mine.yaml").write_text(GOOD)
    (tmp_path / "broken.yaml").write_text("id: broken\n")
    (tmp_path / "other.yaml").write_text(GOOD)
    (tmp_path / "burst.yaml").write_text(GOOD.replace("id: mine", "id: burst"))
    (tmp_path / "notes.txt").write_text("no scene")
    catalogue = load_scenes([tmp_path, tmp_path / "none"])
    assert catalogue.find("mine").title == "Mine"
    assert len(catalogue.scenes) == len(WANTED) + 1
    assert len(catalogue.problems) == 4
    assert any("broken.yaml, line 1: the field title is missing" in problem for problem in catalogue.problems)
    assert any("other.yaml: id='mine' must be the file's name" in problem for problem in catalogue.problems)
    assert any("there is a scene 'burst' already" in problem for problem in catalogue.problems)
    assert catalogue.find("nobody") is None


# Claims -------------------------------------------------------------------------------------------------------------------


def test_measures_count_what_the_records_say():
    def step(index, *rows, **fields):
        return StepTrace(index=index, start=float(index), scheduled=rows, **fields)

    steps = (
        step(0, Scheduled("t-A", "prefill", 5, 0), Scheduled("t-B", "prefill", 3, 16, 16), num_running=2),
        step(1, Scheduled("t-A", "prefill", 2, 5), Scheduled("t-B", "decode", 1, 19), num_waiting=4),
        step(2, Scheduled("t-A", "decode", 1, 7), Scheduled("t-B", "padding", 1, 20), kv_used=9),
        step(3),
    )
    requests = (
        RequestTrace(request_id="t-A", prompt_tokens=7, token_steps=[1, 2], token_times=[1, 2], finish_reason="length"),
        RequestTrace(
            request_id="t-B", prompt_tokens=19, cached_tokens=16, token_steps=[0, 1], token_times=[1, 2], preemptions=3
        ),
    )
    made = Run(requests, steps)
    expected = {
        ("steps", ""): 3, ("steps", "B"): 2, ("computed_tokens", ""): 12, ("computed_tokens", "A"): 8,
        ("padding_rows", ""): 1,
        ("padding_rows", "A"): 0, ("chunks", "A"): 2, ("chunks", "B"): 1, ("decodes_beside_chunks", "A"): 1,
        ("largest_step", ""): 8, ("tokens_for_first", "A"): 7, ("tokens_for_second", "A"): 1, ("cached_tokens", ""): 16,
        ("cached_percent", "B"): 100 * 16 / 19, ("preemptions", "B"): 3, ("peak_running", ""): 2, ("peak_waiting", ""): 4,
        ("peak_blocks", ""): 9, ("requests_completed", ""): 1, ("output_tokens", ""): 4,
    }  # fmt: skip
    assert {key: count(key[0], made, key[1]) for key in expected} == expected


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_counts_on_a_real_run_and_on_none(name):
    scene = CATALOGUE.find("small-pool")
    needed = MEASURES[name].request == "needed"
    assert count(name, records(run(scene.workload, scene.engine_config())), "guest0" if needed else "") >= 0
    if not needed:
        assert count(name, Run((), ())) == 0


def test_claims_that_make_no_sense_are_refused():
    for fields, words in (
        ({"measure": "steps"}, "has no limit"),
        ({"measure": "chunks", "at_least": 1}, "name it with request"),
        ({"measure": "peak_running", "request": "A", "at_least": 1}, "remove request='A'"),
        ({"measure": "steps", "at_least": 2, "at_most": 1}, "no number is both"),
    ):
        with pytest.raises(WorkloadError, match=words):
            Claim(**fields)
    with pytest.raises(WorkloadError, match="no request of this name"):
        count("chunks", Run((), ()), "A")
