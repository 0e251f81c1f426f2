"""llama.cpp as a peer of the decode benchmark: the same fp32 weights as an F32 GGUF file, by `llama-cpp-python`."""

from __future__ import annotations

import gc
import importlib.util
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tah2.bench.decoders import Ids, Stretch
from tah2.model.loop import LoopedDecoder

_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Hugging Face's name of a layer's tensor -> llama.cpp's."""
_PAIRED_ROTARY = {"llama": True, "qwen3": False}
"""Family -> whether llama.cpp rotates neighbouring pairs of a head in it, where transformers rotates halves."""


def missing() -> str | None:
    """Why llama.cpp cannot be measured here, or None."""
    absent = [name for name in ("llama_cpp", "gguf") if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return f"llama.cpp is not measured: {' and '.join(absent)} cannot be imported; install llama-cpp-python and gguf."


class LlamaCppPeer:
    """Greedy decoding through llama.cpp's own batches; the sampled token is the largest of its logits."""

    def __init__(self, decoder: LoopedDecoder, folder: Path, sequences: int, context: int, threads: int) -> None:
        import llama_cpp

        path = folder / "peer.gguf"
        write_gguf(decoder, path)
        self.api, self.vocabulary = llama_cpp, decoder.backbone.vocab_size
        llama_cpp.llama_log_set(_silence(), None)
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        path.unlink()
        if not self.model:
            raise RuntimeError("llama.cpp could not load the weights.")
        room = llama_cpp.llama_context_default_params()
        room.n_ctx, room.n_seq_max, room.n_batch = sequences * context, sequences, max(512, sequences)
        room.n_threads = room.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, room)
        self.batch = llama_cpp.llama_batch_init(max(512, sequences), 0, 1)

    def decode(self, prompts: Ids, each: int, beside: Stretch | None = None) -> tuple[float, Ids]:
        """Seconds for `each` tokens per prompt after the first one, and all tokens; `beside` runs in turns with it."""
        gc.collect()
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        last = [self._run([(token, at, row) for at, token in enumerate(p)])[-1] for row, p in enumerate(prompts)]
        tokens, seconds = [[token] for token in last], 0.0
        for done in range(each):
            while beside is not None and not beside.done and beside.seconds < seconds:
                beside.step()
            started = time.perf_counter()
            last = self._run([(token, len(prompts[row]) + done, row) for row, token in enumerate(last)])
            seconds += time.perf_counter() - started
            for row, token in zip(tokens, last, strict=True):
                row.append(token)
        while beside is not None and not beside.done:
            beside.step()
        return seconds, tokens

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)

    def _run(self, entries: list[tuple[int, int, int]]) -> list[int]:
        """One batch of (token, position, sequence); the next token of each sequence's last entry."""
        batch, ends = self.batch, {row: at for at, (_, _, row) in enumerate(entries)}
        batch.n_tokens = len(entries)
        for at, (token, position, row) in enumerate(entries):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
            batch.seq_id[at][0], batch.logits[at] = row, ends[row] == at
        if self.api.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama.cpp could not decode a batch.")
        return [int(self._logits(at).argmax()) for at in ends.values()]

    def _logits(self, at: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        pointer = self.api.llama_get_logits_ith(self.context, at)
        return np.ctypeslib.as_array(pointer, (self.vocabulary,))


def write_gguf(decoder: LoopedDecoder, path: Path) -> None:
    """The backbone of a Llama or Qwen3 decoder as an F32 GGUF file without a tokenizer."""
    import gguf

    shape = decoder.backbone
    if shape.family not in _PAIRED_ROTARY:
        raise ValueError(f"Weights of the {shape.family} family are not written for llama.cpp.")
    writer = gguf.GGUFWriter(path, shape.family)
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(float(shape.rope["rope_theta"]))
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("none")
    for name, tensor in decoder.state_dict().items():
        target = _gguf_name(name)
        if target is not None:
            paired = _PAIRED_ROTARY[shape.family] and name.endswith(("q_proj.weight", "k_proj.weight"))
            tensor = _neighbours(tensor, shape.head_dim) if paired else tensor
            writer.add_tensor(target, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str | None:
    outer = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
    if name in (*outer, "lm_head.weight"):
        return outer.get(name, "output.weight")
    if not name.startswith("layers."):
        return None
    _, layer, inner = name.removesuffix(".weight").split(".", 2)
    return f"blk.{layer}.{_TENSORS[inner]}.weight"


def _neighbours(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of q or k reordered from rotating halves of a head to rotating neighbouring pairs."""
    heads = tensor.shape[0] // head_dim
    return tensor.reshape(heads, 2, head_dim // 2, -1).transpose(1, 2).reshape(tensor.shape)


@cache
def _silence() -> Any:
    """A log callback that says nothing; kept, because llama.cpp does not hold on to it."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda level, text, data: None)
