"""A model of the lm-evaluation-harness: `tah2 lm-eval run --model tah2 --model_args pretrained=PATH --tasks ...`.

The harness looks for models among registered classes and discovers no entry points, so it has to be started in a
process that has imported this module; `tah2 lm-eval` and `python -m tah2.evals.lm_eval` do just that and hand every
word to the harness's own command line.

Log-likelihoods are those of the mixed distribution under the model's own routes: context tokens are a prompt, the
continuation's are decoded, as when generating. Texts come from the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from tah2.config.strict import ConfigError
from tah2.engine.llm import LLM
from tah2.engine.params import SamplingParams
from tah2.model.loop import LoopSettings, Thresholded, Tokens
from tah2.model.scoring import score

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

AT_ONCE = 64
"""Requests that the engine runs at once, where nothing else is asked for."""

Request = tuple[Any, list[int], list[int]]
"""Whatever names it, context ids, continuation ids."""


@register_model("tah2")
class LoopedLM(TemplateLM):
    """`pretrained` is a looped checkpoint; `max_depth` and `exit_threshold` None mean its own.

    `batch_size` above 1 is how many requests the engine runs at once; 1, the harness's default, is no wish, because
    batching changes no result here. Scoring packs `pack_tokens` tokens into one pass, of which at most `pack_rows` (or
    one request's) are read by the LM head.
    """

    def __init__(
        self,
        pretrained: str,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        max_depth: int | None = None,
        exit_threshold: float | None = None,
        add_bos_token: bool | None = None,
        pack_tokens: int = 4096,
        pack_rows: int = 1024,
        seed: int = 1234,
        **engine: Any,
    ) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}.")
        if str(device).startswith("cuda") and not torch.cuda.is_available():
            device = "cpu"  # the harness asks for a GPU whether there is one or not
        given = int(batch_size) if str(batch_size).isdigit() else 1
        at_once = given if given > 1 else max_batch_size or AT_ONCE
        options = {"max_num_seqs": at_once, "max_model_len": max_length, **engine}
        self.llm = LLM(pretrained, dtype=DTYPES[dtype], device=device, **options)
        self.tokenizer: Any = self.llm.tokenizer
        if self.tokenizer is None:
            raise ConfigError(f"{pretrained} has no tokenizer; the harness works with texts.")
        self.name = str(pretrained)
        self.decoder = self.llm.engine.decoder
        self.max_gen_toks, self.max_depth, self.exit_threshold = max_gen_toks, max_depth, exit_threshold
        self.add_bos_token, self.pack_tokens, self.pack_rows, self.seed = add_bos_token, pack_tokens, pack_rows, seed

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> LoopedLM:
        """What stands in `--model_args` wins over the harness's own flags."""
        others = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls(**{**others, **arg_dict})

    @property
    def max_length(self) -> int:
        return int(self.llm.engine.max_model_len)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands for an empty context: BOS, or EOS where there is none."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return self.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token
            if string.startswith(self.tokenizer.decode([self.prefix_token_id])):
                add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return [int(token) for token in self.tokenizer.encode(string, **special)]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Scoring") as bar:
            for places in self._packs(requests):
                values = self._score([requests[place][1:] for place in places])
                for place, value in zip(places, values, strict=True):
                    found[place] = value
                    name = requests[place][0]
                    if name is not None:
                        self.cache_hook.add_partial("loglikelihood", name, value)
                bar.update(len(places))
        return [found[place] for place in range(len(requests))]

    def _packs(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Places of the requests that share a pass, long ones first, so that memory runs out at once or never."""
        order = sorted(range(len(requests)), key=lambda place: -len(requests[place][1]) - len(requests[place][2]))
        pack: list[int] = []
        tokens = rows = 0
        for place in order:
            _, context, continuation = requests[place]
            size = min(len(context) + len(continuation), self.max_length + 1)
            if pack and (tokens + size > self.pack_tokens or rows + len(continuation) > self.pack_rows):
                yield pack
                pack, tokens, rows = [], 0, 0
            pack.append(place)
            tokens, rows = tokens + size, rows + len(continuation)
        if pack:
            yield pack

    @torch.inference_mode()
    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Summed log-probability of each continuation, and whether it is what greedy decoding would write.

        Of an input that is too long the beginning is dropped, never the continuation.
        """
        device = self.decoder.embed_tokens.weight.device
        inputs, keep, prompt, targets = [], [], [], []
        for context, continuation in pairs:
            if len(continuation) > self.max_length:
                raise ConfigError(f"A continuation of {len(continuation)} tokens exceeds the length {self.max_length}.")
            whole = [*context, *continuation][-(self.max_length + 1) :]
            first = len(whole) - len(continuation)
            place = torch.arange(len(whole) - 1)
            inputs.append(torch.tensor(whole[:-1], device=device))
            keep.append(place >= first - 1)
            prompt.append(place < first)
            targets.append(torch.tensor(whole[first:], device=device))
        logits = self._logits(Tokens.pack(inputs), torch.cat(keep).to(device), torch.cat(prompt).to(device))
        found = []
        for rows, wanted in zip(logits.split([len(each) for each in targets]), targets, strict=True):
            logprobs = rows.log_softmax(-1).gather(-1, wanted[:, None])
            found.append((float(logprobs.double().sum()), bool((rows.argmax(-1) == wanted).all())))
        return found

    def _logits(self, tokens: Tokens, keep: Tensor, prompt: Tensor) -> Tensor:
        router = None if self.exit_threshold is None else Thresholded(self.exit_threshold)
        run_all = prompt if self.decoder.kind.prefill_runs_all else None
        return score(self.decoder, tokens, keep, LoopSettings(router, self.max_depth, run_all)).logits

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows that do not overlap, each token with what context fits."""
        owners, windows = [], list[Request]()
        for number, (text,) in enumerate(request.args for request in requests):
            pieces = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, pieces):
                owners.append(number)
                windows.append((None, context, continuation))
        sums = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            sums[owner] += value
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop string. Repeats of one request get seeds of their own."""
        texts: dict[str, str] = {}
        seen: dict[str, int] = {}
        engine = self.llm.engine
        try:
            for number, (context, given) in enumerate(request.args for request in requests):
                repeat = seen[context] = seen.get(context, -1) + 1
                ids, params = self._generation(context, given, repeat)
                engine.add_request(f"lm-eval-{number}", ids, params)
            with tqdm(total=len(requests), disable=disable_tqdm, desc="Generating") as bar:
                while len(texts) < len(requests):
                    for output in engine.step(stream=False):
                        (completion,) = output.outputs
                        if completion.error is not None:
                            raise RuntimeError(completion.error)
                        texts[output.request_id] = completion.text
                        bar.update()
        finally:
            for number in range(len(requests)):
                engine.abort(f"lm-eval-{number}")
        ordered = [texts[f"lm-eval-{number}"] for number in range(len(requests))]
        for request, text in zip(requests, ordered, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return ordered

    def _generation(self, context: str, given: dict[str, Any], repeat: int) -> tuple[list[int], SamplingParams]:
        options: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        until = handle_stop_sequences(options.pop("until", None), eos=self.tokenizer.decode([self.eot_token_id]))
        most = int(options.pop("max_gen_toks"))
        room = self.max_length - most
        if room < 1:
            raise ConfigError(f"max_gen_toks {most} leaves no room for a prompt in {self.max_length} tokens.")
        options.pop("do_sample", None)
        known = {name: options[name] for name in ("temperature", "top_p", "top_k", "min_p") if name in options}
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(f"The engine has no generation option {', '.join(unknown)}; leave it out of gen_kwargs.")
        params = SamplingParams(
            **known,
            seed=self.seed + repeat,
            max_tokens=most,
            stop=[stop for stop in until if stop],
            max_depth=self.max_depth,
            exit_threshold=self.exit_threshold,
        )
        return self.tok_encode(context)[-room:], params


def main(words: Sequence[str] | None = None) -> None:
    """The harness's command line, with this model among its models."""
    from lm_eval.__main__ import cli_evaluate

    if words is not None:
        sys.argv = ["tah2 lm-eval", *words]
    cli_evaluate()


if __name__ == "__main__":
    # Run as a script this module is called __main__; the harness must see the class registered by its real name.
    from tah2.evals.lm_eval import main as start

    start()
