"""The offline API: what vLLM's users type works, from a folder and from memory."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tah2.config.strict import ConfigError
from tah2.engine.llm import LLM
from tah2.engine.params import SamplingParams
from tah2.engine.reference import generate
from tah2.model.hf import LoopedConfig, LoopedForCausalLM
from tests.engine.tiny import EOS, byte_tokenizer, spread

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved TaH2 checkpoint with a byte tokenizer and a chat template."""
    torch.manual_seed(1)
    backbone = {
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "eos_token_id": EOS,
        "max_position_embeddings": 200,
    }
    model = LoopedForCausalLM(LoopedConfig(backbone=backbone, loop={"kind": "tah2", "max_depth": 3})).eval()
    with torch.no_grad():
        spread(model.model)
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    tokenizer.chat_template = None
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, kv_slots=3000, kernels="off", device="cpu")


PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=9)


def test_outputs_come_in_the_order_of_prompts_and_equal_the_reference(llm: LLM):
    prompts = ["a long prompt that takes its time", "b", {"prompt_token_ids": [5, 6, 7]}, {"prompt": "text"}]
    outputs = llm.generate(prompts, PARAMS)
    assert [output.prompt for output in outputs] == [prompts[0], "b", None, "text"]
    for output in outputs:
        truth = generate(llm.model.model, output.prompt_token_ids, PARAMS, [EOS])
        assert output.outputs[0].token_ids == truth.token_ids
        assert output.outputs[0].text == llm.tokenizer.decode(truth.token_ids, skip_special_tokens=True)
        assert output.finished
    assert not llm.engine.has_unfinished_requests()
    llm.engine.check()


def test_one_prompt_may_be_text_or_ids(llm: LLM):
    ids = llm.tokenizer.encode("hello")
    (a,), (b,) = llm.generate("hello", PARAMS), llm.generate(ids, PARAMS)
    assert a.outputs[0].token_ids == b.outputs[0].token_ids
    first, second = llm.generate(["hello", "hello"], [PARAMS, SamplingParams(temperature=0.0, max_tokens=2)])
    assert first.outputs[0].token_ids == a.outputs[0].token_ids
    assert len(second.outputs[0].token_ids) <= 2


def test_chat_goes_through_the_template(llm: LLM):
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, PARAMS)
    assert llm.tokenizer.decode(output.prompt_token_ids) == "[user]hi[assistant]"
    both = llm.chat([messages, [{"role": "user", "content": "ho"}]], PARAMS)
    assert both[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert llm.tokenizer.decode(both[1].prompt_token_ids) == "[user]ho[assistant]"


def test_a_stream_ends_as_generate_does_and_may_be_left(llm: LLM):
    whole = llm.generate("stream", PARAMS)[0].outputs[0]
    states = [output.outputs[0] for output in llm.stream("stream", PARAMS)]
    assert [len(state.token_ids) for state in states] == sorted({len(state.token_ids) for state in states})
    assert (states[-1].token_ids, states[-1].text) == (whole.token_ids, whole.text)
    for _ in llm.stream("stream", PARAMS):
        break
    assert not llm.engine.has_unfinished_requests()


def test_mistakes_are_refused_and_leave_nothing_behind(llm: LLM):
    with pytest.raises(ConfigError, match="shorten the prompt"):
        llm.generate(["fine", "x" * 300], PARAMS)
    with pytest.raises(ConfigError, match="one or one each"):
        llm.generate(["a", "b"], [PARAMS])
    with pytest.raises(ConfigError, match="needs 'prompt'"):
        llm.generate({"text": "a"}, PARAMS)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(llm.model, max_num_seq=3)
    assert not llm.engine.has_unfinished_requests()


def test_a_model_in_memory_is_cast_and_moved_as_asked(llm: LLM):
    model = copy.deepcopy(llm.model)
    half = LLM(model, dtype=torch.bfloat16, device="cpu", kv_slots=100)
    assert half.model.model.embed_tokens.weight.dtype == half.engine.pools.looped.keys.dtype == torch.bfloat16
    (output,) = half.generate([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4
    moved = copy.deepcopy(llm.model)
    there = LLM(moved, device="meta", kv_slots=10, kernels="off")
    assert moved.model.embed_tokens.weight.device.type == there.engine.pools.looped.keys.device.type == "meta"


def test_generation_of_the_hugging_face_class_agrees(llm: LLM):
    ids = llm.tokenizer.encode("agree?")
    theirs = llm.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=8)[0, len(ids) :].tolist()
    ours = llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0].token_ids
    assert ours == theirs
