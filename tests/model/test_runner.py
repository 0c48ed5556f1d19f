import pytest
import torch

from engine.core.config import EngineConfig
from engine.core.runner import StepBatch, Work
from engine.model import runner as runner_module
from engine.model.errors import ModelError
from engine.model.runner import ModelRunner, available_bytes, count_work
from tests.fixtures import oracle
from tests.model.kit import Sequence, make_request, run_step

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 238, 46, 264, 33, 83, 279, 50, 288, 41]


def make_runner(model, **config) -> ModelRunner:
    return ModelRunner(model.transformer, EngineConfig(**{"max_model_len": 256, "num_kv_blocks": 32, **config}))


def greedy(name="a", prompt=PROMPT, **params):
    return make_request(name, prompt, temperature=0, max_tokens=100, **params)


def generate(runner, sequences, tokens, count=None):
    while any(sequence.request.num_output_tokens < tokens for sequence in sequences):
        run_step(runner, [s for s in sequences if s.request.num_output_tokens < tokens], count)


def test_padding_is_finite_and_changes_nobody(rand, rand_dir):
    expected, _ = oracle(rand_dir, PROMPT, 8)
    runner = make_runner(rand)
    sequence = Sequence(greedy(), [4, 5])
    padding = [
        Work(None, [0] * 17, 0, [0, 0], ()),
        Work(None, [0], 40, [0, 0, 0], ()),
        Work(None, [0] * 5, 20, [0, 0], ()),
    ]
    for _ in range(8):
        work = sequence.work()
        result = runner.execute(StepBatch(0, [padding[0], work, *padding[1:]]))
        sequence.context += len(work.token_ids)
        sequence.request.token_ids += result.tokens
        assert not result.nonfinite
    assert sequence.request.output_token_ids == expected
    assert not runner.attention.pool[:, 0].any(), "the null block was written"
    assert not runner.attention.pool[:, 6:].any(), "another block was written"


def test_a_batch_of_padding_alone_runs(rand):
    result = make_runner(rand).execute(StepBatch(0, [Work(None, [0], 3, [0], ()), Work(None, [1, 2], 0, [0], ())]))
    assert result.tokens == [] and not result.nonfinite


def test_scrub_then_copies_then_forward(rand):
    runner = make_runner(rand)
    pool = runner.attention.pool
    pool[:, 3] = 1.0
    pool[:, 4] = 2.0
    runner.execute(StepBatch(0, [], copies=[(3, 7), (4, 8)], scrub=[4]))
    assert (pool[:, 7] == 1.0).all() and (pool[:, 8] == 0.0).all() and (pool[:, 3] == 1.0).all()


def test_copy_on_write_gives_a_fork_its_own_tail(rand, rand_dir):
    runner = make_runner(rand)
    parent = Sequence(greedy("p"), [1, 2])
    generate(runner, [parent], 1)
    children = [
        Sequence(greedy(str(i), [*PROMPT, token]), [1, block]) for i, (token, block) in enumerate([(7, 3), (200, 4)])
    ]
    runner.execute(StepBatch(0, [], copies=[(2, 3), (2, 4)]))
    for child in children:
        child.context = len(PROMPT)
    generate(runner, [*children], 6)
    for child, token in zip(children, (7, 200), strict=True):
        assert child.request.output_token_ids == oracle(rand_dir, [*PROMPT, token], 6)[0]


def test_forks_sample_from_their_parents_row(rand):
    runner = make_runner(rand)
    first, *others = [
        make_request(str(i), PROMPT, temperature=5.0, hash_seed=9, sample_index=i, max_tokens=9) for i in range(6)
    ]
    alone = greedy("g", PROMPT[:5])
    batch = [Work(first, PROMPT, 0, [1, 2], (first, *others)), Work(alone, PROMPT[:5], 0, [3], (alone,))]
    tokens = runner.execute(StepBatch(0, batch)).tokens
    assert len(tokens) == 7 and len(set(tokens[:6])) > 1
    again = make_runner(rand).execute(StepBatch(0, [Work(others[2], PROMPT, 0, [1, 2], (others[2],))])).tokens
    assert again == [tokens[3]]


@pytest.mark.parametrize("where", ["pool", "whole chunk"])
def test_nan_is_reported_for_its_request_alone(rand, where):
    runner = make_runner(rand)
    sick, well = Sequence(greedy("sick"), [1, 2]), Sequence(greedy("well"), [3, 4])
    run_step(runner, [sick, well], 5)
    runner.attention.pool[:, 1, 2] = float("nan")
    chunk = 3 if where == "whole chunk" else None
    result = run_step(runner, [sick, well], chunk)
    assert result.nonfinite == {"sick"}
    solo = Sequence(greedy("solo"), [5, 6])
    generate(runner, [well, solo], 4)
    assert well.request.output_token_ids == solo.request.output_token_ids


def test_blocks_of_a_broken_request_are_safe_after_scrubbing(rand, rand_dir):
    runner = make_runner(rand)
    runner.attention.pool[:, 1:] = float("nan")
    sequence = Sequence(greedy(), [9, 8])
    runner.execute(StepBatch(0, [], scrub=[8, 9]))
    generate(runner, [sequence], 8, count=5)
    assert sequence.request.output_token_ids == oracle(rand_dir, PROMPT, 8)[0]


def test_without_a_kv_cache(rand, rand_dir):
    runner = make_runner(rand, use_kv_cache=False)
    assert runner.kv_pool_bytes == 0
    requests = [greedy("a"), greedy("b", PROMPT[:1])]
    for _ in range(6):
        works = [Work(r, list(r.token_ids), 0, [], (r,)) for r in requests]
        for request, token in zip(requests, runner.execute(StepBatch(0, works)).tokens, strict=True):
            request.token_ids.append(token)
    assert requests[0].output_token_ids == oracle(rand_dir, PROMPT, 6)[0]
    assert requests[1].output_token_ids == oracle(rand_dir, PROMPT[:1], 6)[0]


def test_pool_size_is_what_the_formula_says(rand):
    runner = make_runner(rand)
    # 2 layers, K and V, 2 heads of 16 floats: 512 bytes a token; 33 blocks of 16 tokens
    assert rand.info.kv_bytes_per_token == 512
    assert runner.kv_pool_bytes == 33 * 16 * 512
    runner.close()
    assert runner.kv_pool_bytes == 0


def test_a_pool_that_cannot_fit_is_refused_with_numbers(rand, monkeypatch):
    monkeypatch.setattr(runner_module, "available_bytes", lambda device: 100 * 16 * 512)
    with pytest.raises(ModelError, match=r"num_kv_blocks=100 .* needs 827,392 bytes .* at most 99"):
        make_runner(rand, num_kv_blocks=100)
    make_runner(rand, num_kv_blocks=99)
    assert available_bytes(torch.device("cpu")) > 0


def test_counted_work(rand):
    model = rand.transformer
    request = greedy()
    batch = StepBatch(0, [Work(request, [1] * 4, 8, [1], ()), Work(request, [1], 3, [2], (request,))])
    flops, moved = count_work(model, batch, with_cache=True)
    spec, layers = model.spec, model.weights.layer_parameters
    pairs = (9 + 10 + 11 + 12) + 4
    attention = 4 * spec.num_heads * spec.head_dim * spec.num_layers * pairs
    assert flops == 2 * 5 * layers + 2 * spec.hidden_size * spec.vocab_size + attention
    weights = 4 * (layers + spec.vocab_size * spec.hidden_size + 5 * spec.hidden_size)
    assert moved == weights + 512 * ((12 + 4) + 5)


def test_times_are_measured(rand):
    result = run_step(make_runner(rand), [Sequence(greedy(), [1, 2])])
    assert result.prepare_time > 0 and result.forward_time > 0 and result.sample_time > 0


def test_longer_than_the_models_positions_is_refused(rand):
    with pytest.raises(ModelError, match=r"max_model_len=513 is more than the 512 positions"):
        make_runner(rand, max_model_len=513)
