"""Every experiment runs; at every question the right answer, worked out without the engine, passes and wrong ones fail."""

from __future__ import annotations

import pytest

from engine.core.sampling_params import SamplingParams
from engine.observe.formulas import latency_from_parts
from engine.observe.metrics import parts
from lessons.catalogue import claims, module_of
from lessons.judge import judge, right_option
from lessons.model import Check, Explain, Explore, Predict
from lessons.runs import Answer, measured, run_scripted
from tests.lessons.independent import ANSWERS


def wrong_for(block, right: Answer) -> list[Answer]:
    """Answers that must not pass."""
    if isinstance(right, str):
        return [option.id for option in block.options if option.id != right]
    if isinstance(right, list):
        return [right[::-1], [*right[1:], right[0]]]
    return [right + 1, right - 1, right * 3 + 1, 0.0] if right != 0 else [1.0]


def test_every_question_has_an_independent_answer(lesson):
    asked = {block.id for block in lesson.blocks if isinstance(block, Predict)}
    for block in lesson.blocks:
        if isinstance(block, Check):
            asked |= {f"{block.id}/{question.id}" for question in block.questions}
    assert asked == set(ANSWERS[lesson.id])


def test_the_right_prediction_passes_and_wrong_ones_fail(lesson, runs_of):
    runs, values = runs_of(lesson.id), module_of(lesson.folder).VALUES
    for block in lesson.blocks:
        if not isinstance(block, Predict):
            continue
        truth = measured(values, block.answer, runs)
        expected = ANSWERS[lesson.id][block.id]
        assert judge(block, expected, truth).right, f"{block.id}: {expected} against {truth}"
        for wrong in wrong_for(block, expected):
            if block.factor > 1 and isinstance(wrong, float | int):
                wrong = truth * block.factor * 1.1 if wrong > truth else truth / block.factor / 1.1
            assert not judge(block, wrong, truth).right, f"{block.id}: {wrong} passes, although {truth} was measured"


def test_the_right_option_of_each_check_is_the_independent_one(lesson):
    for block in lesson.blocks:
        if isinstance(block, Check):
            for question in block.questions:
                expected = ANSWERS[lesson.id][f"{block.id}/{question.id}"]
                option = next(o for o in question.options if o.id == right_option(question))
                if isinstance(expected, str):
                    assert option.id == expected
                else:
                    assert option.value == pytest.approx(expected), question.id
                    assert all(o.value != pytest.approx(expected) for o in question.options if o is not option)
                    shown = option.text.replace(",", "")
                    assert str(int(expected)) in shown or str(expected) in shown or option.id in ("four", "zero", "nine")


def test_every_value_can_be_measured(lesson, runs_of):
    for name, value in module_of(lesson.folder).VALUES.items():
        found = value(runs_of(lesson.id))
        assert isinstance(found, int | float | str | list), name


def test_a_value_of_a_run_that_is_missing_is_not_measured(lesson):
    values = module_of(lesson.folder).VALUES
    needs_runs = [name for name in values if name != "example_mib"]
    assert all(measured(values, name, {}) is None for name in needs_runs)


def test_steps_that_are_spoken_of_exist(lesson, runs_of):
    runs, values = runs_of(lesson.id), module_of(lesson.folder).VALUES
    for block in lesson.blocks:
        if isinstance(block, Explain):
            known = {step.index for step in runs[block.run].work}
            for frame in block.frames:
                step = measured(values, frame.step, runs) if isinstance(frame.step, str) else frame.step
                assert step in known, f"{block.id}: step {step}"


def test_free_runs_work_at_the_ends_of_every_knob(lesson):
    module = module_of(lesson.folder)
    for block in lesson.blocks:
        if not isinstance(block, Explore):
            continue
        for knob in block.knobs:
            for setting in knob.choices or (knob.least, knob.most):
                others = {other.name: other.default for other in block.knobs}
                run = run_scripted(module.EXPERIMENTS[block.experiment](**{**others, knob.name: setting}))
                runs = {block.experiment: run}
                assert all(measured(module.VALUES, shown.value, runs) is not None for shown in block.shows)


def test_every_run_gives_back_what_it_took(lesson, runs_of):
    for name, run in runs_of(lesson.id).items():
        last = run.steps[-1].index
        assert not run.state(last, "after").tables, name
        assert all(request.trace.finish_reason == "length" for request in run.requests)


def test_an_experiment_is_the_same_every_time(lesson, runs_of):
    for name, make in module_of(lesson.folder).EXPERIMENTS.items():
        assert run_scripted(make()).steps == runs_of(lesson.id)[name].steps


# Claims that no single value shows ----


def test_the_schedule_of_the_textbook():
    module = module_of("07_continuous_batching")
    late, queued = run_scripted(module.late()), run_scripted(module.queued())
    assert [module.rows_of(late, step) for step in range(5)] == ["A B C", "A B C", "A C", "A C D", "C D"]
    assert [module.rows_of(queued, step) for step in range(5)] == ["A B C", "A B C", "A C D", "A C D", "C"]


def test_a_joining_prompt_makes_the_step_longer(runs_of):
    steps = runs_of("continuous-batching")["late"].work
    assert steps[3].num_tokens == 8 + 1 + 1
    assert steps[3].end - steps[3].start > steps[2].end - steps[2].start


def test_the_parts_of_ttft_add_up(runs_of):
    for run in runs_of("one-request").values():
        for request in run.requests:
            split = parts(request.trace)
            assert split.tokenise + split.queue + split.prefill == pytest.approx(request.trace.ttft)


def test_latency_from_ttft_and_tpot(runs_of):
    assert latency_from_parts(1.0, 0.040, 101) == pytest.approx(5.0)
    trace = runs_of("one-request")["one"].request("A").trace
    # On the script: 10 ms and 1 ms a token, so the prompt takes 10 + its tokens, and each of 23 gaps 11 ms.
    assert trace.ttft == pytest.approx((10 + trace.prompt_tokens) / 1000)
    assert trace.e2e_latency == pytest.approx(trace.ttft + 23 * 0.011)
    assert trace.e2e_latency == pytest.approx(trace.ttft + 23 * trace.tpot)


def test_a_single_token_has_no_tpot():
    module = module_of("01_one_request")
    run = run_scripted(module.free(output_tokens=1))
    assert run.request("mine").trace.tpot is None
    assert module.VALUES["free_tpot"]({"free": run}) == "not defined"


def test_the_answer_is_the_same_with_and_without_the_cache():
    from engine import LLM

    texts = []
    for cached in (True, False):
        llm = LLM("tiny", use_kv_cache=cached, max_model_len=256, max_num_batched_tokens=256, enable_prefix_caching=False)
        output = llm.generate([[40]], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))[0]
        texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1]


def test_every_byte_of_the_pool_is_accounted_for(runs_of):
    import msgspec

    each = 2 * 2 * 2 * 16 * 4
    run = runs_of("kv-cache")["sized"]
    pool = (run.config.num_kv_blocks + 1) * run.config.block_size * each
    run = msgspec.structs.replace(run, model={"kv_bytes_per_token": each}, pool_bytes=pool)
    sizes = module_of("04_kv_cache").SIZES["sized"]({"sized": run})
    parts_of = [value for name, value in sizes.items() if not name.endswith("=")]
    assert sum(parts_of) == sizes["allocated ="] == pool
    assert sum(parts_of[:3]) == sizes["held by requests ="]
    assert sizes["formula, 2 requests"] == (50 + 49) * each


def test_tables_of_a_used_pool(runs_of):
    values, runs = module_of("09_paged_attention").VALUES, runs_of("paged-attention")
    assert values["table_a"](runs) == "7 3 9"
    assert values["table_b"](runs) == "2 5"
    letters = {request.name: request.letter for request in runs["used"].requests}
    assert (letters["A"], letters["B"], letters["guest1"]) == ("A", "B", "C")


def test_every_claim_of_a_ledger_has_its_source_and_its_proof(lesson):
    values = module_of(lesson.folder).VALUES
    sources = {source.id for source in lesson.front.sources}
    tests = globals()
    entries = claims(lesson.folder).claims
    assert len(entries) >= 6
    for entry in entries:
        assert entry.source in sources | {"formula"}, entry.claim
        kind, _, name = entry.shown.partition(":")
        assert (
            entry.shown == "cited" or (kind == "value" and name in values) or (kind == "test" and callable(tests.get(name)))
        )
        assert entry.shown != "cited" or entry.source != "formula"
