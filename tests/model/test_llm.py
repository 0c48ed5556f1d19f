import pytest

from engine import LLM, SamplingParams
from engine.core.runner import ScriptedRunner
from engine.llm import resolve_config
from tests.fixtures import FIRST_PIECE, chain_of, make_chain, oracle

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def make(model, **config):
    return LLM(model, **{"max_model_len": 128, "num_kv_blocks": 64, **config})


def test_every_form_of_prompt(tiny):
    llm = make(tiny)
    ids = llm.tokenizer.encode("One")
    assert llm.generate("One", GREEDY)[0].prompt == "One"
    forms = [llm.generate(form, GREEDY)[0].outputs[0].token_ids for form in ("One", ["One"], ids, [ids], tuple(ids))]
    assert forms == [forms[0]] * 5 and len(forms[0]) == 8
    assert llm.generate([], GREEDY) == []
    mixed = llm.generate(["One", ids], [GREEDY, SamplingParams(temperature=0, max_tokens=3)])
    assert [len(output.outputs[0].token_ids) for output in mixed] == [8, 3]
    assert mixed[0].finished and mixed[0].metrics.ttft > 0 and mixed[0].prompt_token_ids == ids


def test_tokens_equal_the_oracle_through_small_pools_and_budgets(rand, rand_dir):
    prompts = [[(7 * i + j * j) % 256 for j in range(11 + 5 * i)] for i in range(5)]
    expected = [oracle(rand_dir, prompt, 12) for prompt in prompts]
    configs = [
        {},
        {"num_kv_blocks": 7, "block_size": 8, "max_model_len": 56},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"use_kv_cache": False, "max_num_batched_tokens": 512},
        {"batching": "static", "max_num_seqs": 2},
        {"kv_layout": "contiguous", "reserve": "request"},
    ]
    for config in configs:
        llm = make(rand, **config)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
        for output, (tokens, gaps) in zip(outputs, expected, strict=True):
            assert min(gaps) > 1e-3
            assert output.outputs[0].token_ids == tokens, config
        llm.check()
        assert llm.stats().blocks_referenced == 0


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2},
        {"seed": 5, "temperature": 1.2, "top_p": 0.9, "min_tokens": 4},
        {"seed": 5, "temperature": 1.2, "top_k": 20, "min_p": 0.01, "frequency_penalty": 0.5},
        {"seed": 5, "n": 3},
        {"temperature": 0, "stop": "e"},
    ],
)
def test_scheduling_ahead_changes_no_token(tiny, params):
    texts = ["One", "One two", "A longer prompt than the others, cut into chunks", "Two"]
    chosen = [SamplingParams(max_tokens=6 + place, **params) for place in range(len(texts))]

    def run(**config):
        llm = make(tiny, max_num_batched_tokens=16, num_kv_blocks=24, block_size=8, max_num_seqs=3, **config)
        outputs = llm.generate(texts, chosen)
        llm.check()
        assert not llm.has_unfinished()
        assert llm.stats().blocks_referenced == 0
        return [sample for output in outputs for sample in output.outputs]

    for ahead, plain in zip(run(async_scheduling=True), run(), strict=True):
        assert (ahead.text, ahead.token_ids, ahead.finish_reason) == (plain.text, plain.token_ids, plain.finish_reason)
        for ours, theirs in zip(ahead.logprobs or (), plain.logprobs or (), strict=True):
            assert list(ours) == list(theirs)  # their last digits depend on what shares the batch
            assert [p.logprob for p in ours.values()] == pytest.approx([p.logprob for p in theirs.values()], abs=1e-4)


def test_a_refused_prompt_takes_its_batch_with_it(tiny):
    llm = make(tiny)
    for bad in ([400], [-1], [1] * 129, ""):
        with pytest.raises(ValueError):
            llm.generate(["fine", bad, "fine too"], GREEDY)
        assert not llm.has_unfinished() and llm.stats().waiting == 0
        llm.check()
    assert len(llm.generate("fine", GREEDY)[0].outputs[0].token_ids) == 8


@pytest.mark.parametrize("empty", ["", []])
def test_empty_prompts_are_refused(tiny, empty):
    llm = make(tiny)
    for call in (lambda: llm.add_request(empty), lambda: llm.generate([empty]), lambda: llm.chat([])):
        with pytest.raises(ValueError, match="empty"):
            call()
    assert llm.generate(" ", GREEDY)[0].finished


def test_lengths_of_parameters_must_match(tiny):
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        make(tiny).generate("x", [GREEDY, GREEDY])


def test_max_model_len_follows_the_model(tiny, rand):
    assert resolve_config(tiny, {}).max_model_len == 2048
    assert resolve_config(rand, {"max_model_len": None}).max_model_len == 512
    with pytest.raises(ValueError, match="max_model_len=600 is more than the 512 positions"):
        LLM(rand, max_model_len=600)
    with pytest.raises(ValueError, match="unknown engine setting 'max_len'"):
        LLM(rand, max_len=5)


def test_step_by_step(tiny):
    llm = make(tiny)
    first = llm.add_request("Hello", GREEDY)
    second = llm.add_request([1, 2, 3], SamplingParams(max_tokens=50))
    step = llm.step()
    assert {row.request_id for row in step.scheduled} == {first, second}
    assert llm.abort(second) and not llm.abort(second) and not llm.abort("nobody")
    while llm.has_unfinished():
        llm.step()
        llm.check()
    assert llm.request(first).finish_reason == "length" and llm.request(second).finish_reason == "abort"
    assert llm.output(first).outputs[0].text


def test_more_prompts_than_the_queue_holds(tiny):
    llm = make(tiny, max_num_queued_requests=3, max_num_seqs=2)
    outputs = llm.generate([f"prompt {i}" for i in range(12)], GREEDY)
    assert [output.prompt for output in outputs] == [f"prompt {i}" for i in range(12)]


def test_chat(tiny):
    llm = make(tiny)
    one = [{"role": "user", "content": "Hi"}]
    single, (a, b) = llm.chat(one, GREEDY), llm.chat([one, one], GREEDY)
    assert single[0].outputs[0].text == a.outputs[0].text == b.outputs[0].text
    assert single[0].prompt == "<|user|>Hi\n<|assistant|>"


def test_a_script_can_take_the_models_place(tiny):
    llm = make(tiny, runner=ScriptedRunner())
    assert llm.generate("x", GREEDY)[0].outputs[0].token_ids == list(range(8))


def test_seeded_samples_differ_from_each_other_and_repeat(rand):
    params = SamplingParams(n=4, seed=7, temperature=1.5, max_tokens=20)
    runs = [[sample.token_ids for sample in make(rand).generate([[5] * 20], params)[0].outputs] for _ in range(2)]
    assert runs[0] == runs[1] and len({tuple(tokens) for tokens in runs[0]}) > 1


def test_a_chosen_chain_streams_its_characters(tmp_path):
    tokens = [65, *"🙂".encode(), *"é".encode(), *"世".encode()]
    llm = make(make_chain(tmp_path, chain_of(tokens)))
    output = llm.generate([[65]], SamplingParams(temperature=0, max_tokens=9))[0].outputs[0]
    assert (output.text, output.token_ids) == ("🙂é世", tokens[1:])
    cut = llm.generate([[65]], SamplingParams(temperature=0, max_tokens=2))[0].outputs[0]
    assert (cut.text, cut.finish_reason) == ("\ufffd", "length")


@pytest.mark.parametrize(("end", "kept"), [(2, 3), (3, 3), (256, 3)])
def test_every_eos_ends_a_request(tmp_path, end, kept):
    path = make_chain(tmp_path, chain_of([65, 66, 67, end]), special=["<|e|>"], generation_eos=[2, 3], tokenizer_eos="<|e|>")
    output = make(path).generate([[65]], SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
    assert output.finish_reason == "stop" and len(output.token_ids) == kept and output.text.startswith("BC")
    assert FIRST_PIECE == 256
