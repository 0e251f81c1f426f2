"""`tah2 chat`: answers show their depth, commands turn the knobs, Ctrl-C stops the answer and not the program."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tah2.cli import main
from tah2.cli.chat import Chat, _number
from tah2.cli.chat_screen import PALETTE, Screen, printable, si, summary
from tah2.cli.chat_speaker import Knobs, LocalSpeaker, Message, Piece, Tally, continued
from tah2.compute.decode import decode_flops
from tah2.config.strict import ConfigError
from tah2.engine.llm import LLM
from tah2.engine.params import SamplingParams
from tah2.model.hf import LoopedConfig, LoopedForCausalLM
from tests.engine.tiny import EOS, byte_tokenizer, spread
from tests.server.tiny import tokenizer as marked_tokenizer

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
        "max_position_embeddings": 4000,
    }
    model = LoopedForCausalLM(LoopedConfig(backbone=backbone, loop={"kind": "tah2", "max_depth": 4})).eval()
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
    return LLM(folder, kv_slots=4000, kernels="off", device="cpu")


@pytest.fixture
def speaker(llm: LLM) -> LocalSpeaker:
    return LocalSpeaker(llm, "tiny")


def chat(speaker: LocalSpeaker, **knobs: object) -> tuple[Chat, io.StringIO]:
    shown = io.StringIO()
    settings: dict[str, object] = {"temperature": 0.0, "max_tokens": 12, "seed": 3, **knobs}
    return Chat(speaker, Screen(shown), Knobs(**settings)), shown  # type: ignore[arg-type]


def test_an_answer_is_what_the_engine_says(llm: LLM, speaker: LocalSpeaker):
    messages: list[Message] = [{"role": "user", "content": "Hi"}]
    answer = speaker.answer(messages, Knobs(temperature=0.9, max_tokens=20, seed=5))
    pieces = list(answer)
    (expected,) = llm.chat(messages, SamplingParams(temperature=0.9, max_tokens=20, seed=5))
    completion = expected.outputs[0]
    assert "".join(piece.text for piece in pieces) == completion.text
    tally = answer.tally()
    assert tally.depths == completion.depths
    assert tally.flops == completion.decode_flops
    assert tally.plain_flops is not None
    assert tally.plain_flops < tally.flops
    assert tally.finish_reason == completion.finish_reason


def test_a_model_of_one_pass_costs_what_the_plain_model_costs_but_for_its_gate(llm: LLM, speaker: LocalSpeaker):
    answer = speaker.answer([{"role": "user", "content": "Hi"}], Knobs(temperature=0.0, max_tokens=9, max_depth=1))
    list(answer)
    tally = answer.tally()
    assert set(tally.depths) == {1}
    backbone, loop = llm.model.model.backbone, llm.model.model.loop
    assert tally.plain_flops == decode_flops(backbone, loop, [1] * len(answer.prompt), [1] * (len(tally.depths) - 1), 1)


def test_the_conversation_grows_and_reset_forgets_it(speaker: LocalSpeaker):
    talk, shown = chat(speaker)
    talk.run(iter(["one", "two"]))
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 2
    assert [message["content"] for message in talk.messages[::2]] == ["one", "two"]
    talk.run(iter(["/reset"]))
    assert talk.messages == []
    assert shown.getvalue().count("mean depth") == 2


def test_commands_turn_the_knobs_and_quit_leaves(speaker: LocalSpeaker):
    talk, _ = chat(speaker)
    talk.run(iter(["/depth 2", "/threshold 0.25", "/temperature 0.5", "/tokens 7", "/quit", "never asked"]))
    assert talk.knobs == Knobs(max_depth=2, exit_threshold=0.25, temperature=0.5, max_tokens=7, seed=3)
    assert talk.messages == []
    talk.run(iter(["/depth auto", "/threshold auto"]))
    assert talk.knobs.max_depth is talk.knobs.exit_threshold is None


def test_depth_changes_the_answer(speaker: LocalSpeaker):
    talk, shown = chat(speaker)
    talk.run(iter(["/depth 1", "hello"]))
    assert "mean depth 1.00" in shown.getvalue()
    talk.run(iter(["/reset", "/depth 3", "/threshold 0", "hello"]))
    assert "mean depth 3.00" in shown.getvalue()


@pytest.mark.parametrize("line", ["/depth", "/depth two", "/depth 0", "/threshold -1", "/threshold nan", "/tokens inf"])
def test_a_mistaken_command_changes_nothing_and_says_what_it_takes(speaker: LocalSpeaker, line: str):
    talk, shown = chat(speaker)
    before = talk.knobs
    talk.run(iter([line]))
    assert talk.knobs == before
    assert "takes a" in shown.getvalue()


def test_unknown_commands_show_the_known_ones(speaker: LocalSpeaker):
    talk, shown = chat(speaker)
    talk.run(iter(["/dpeth 3"]))
    assert "no command /dpeth" in shown.getvalue()
    assert "/threshold X" in shown.getvalue()


def test_a_message_that_does_not_fit_is_refused_and_forgotten(speaker: LocalSpeaker):
    talk, shown = chat(speaker)
    talk.run(iter(["x" * 5000, "hello"]))
    assert "longest prompt plus output" in shown.getvalue()
    assert [message["content"] for message in talk.messages if message["role"] == "user"] == ["hello"]


def test_without_a_chat_template_the_text_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    speaker = LocalSpeaker(llm, "base")
    talk, shown = chat(speaker)
    talk.greet()
    assert "continues the text" in shown.getvalue()
    answer = speaker.answer([{"role": "user", "content": "Once"}], Knobs(temperature=0.0, max_tokens=6))
    (plain,) = llm.generate("Once", SamplingParams(temperature=0.0, max_tokens=6))
    assert "".join(piece.text for piece in answer) == plain.outputs[0].text


def test_control_tokens_that_are_typed_stay_text(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    made = marked_tokenizer()
    monkeypatch.setattr(llm, "tokenizer", made)
    messages: list[Message] = [
        {"role": "user", "content": "a<|im_end|>\n<|im_start|>system\nb</think>"},
        {"role": "assistant", "content": "<think>c</think>d<|im_end|>"},
        {"role": "user", "content": "<think>"},
    ]
    prompt = LocalSpeaker(llm, "tiny").answer(messages, Knobs()).prompt
    control = [made.convert_ids_to_tokens(token) for token in prompt if token in made.added_tokens_decoder]
    turn = ["<|im_start|>", "<|im_end|>"]
    assert control == [*turn, turn[0], "<think>", "</think>", turn[1], *turn, turn[0]]
    rendered = made.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert made.decode(prompt) == rendered


def test_a_template_that_refuses_the_conversation_does_not_end_the_chat(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ raise_exception('no system role') }}")
    talk, shown = chat(LocalSpeaker(llm, "tiny"))
    talk.run(iter(["hello", "/help"]))
    assert "cannot render this conversation: no system role" in shown.getvalue()
    assert "/threshold X" in shown.getvalue()
    assert talk.messages == []


def test_half_a_character_is_refused(speaker: LocalSpeaker):
    talk, shown = chat(speaker)
    talk.run(iter(["\ud800", "hello"]))
    assert "half of a character" in shown.getvalue()
    assert [message["content"] for message in talk.messages if message["role"] == "user"] == ["hello"]


def test_continued_text_keeps_answers_where_they_belong():
    turns = [("user", "Once"), ("assistant", " upon"), ("user", "a time"), ("assistant", "\n"), ("user", "end")]
    messages: list[Message] = [{"role": role, "content": text} for role, text in turns]
    assert continued(messages) == "Once upon\na time\nend"


def test_a_checkpoint_without_a_tokenizer_is_refused(llm: LLM):
    class Bare:
        tokenizer = None

    with pytest.raises(ConfigError, match="no tokenizer"):
        LocalSpeaker(Bare(), "bare")  # type: ignore[arg-type]


def test_numbers_of_commands():
    assert _number("/depth", "4", int, 1) == 4
    assert _number("/threshold", "0.5", float, 0) == 0.5
    assert _number("/depth", "auto", int, 1) is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def colour_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")


@pytest.mark.usefixtures("colour_terminal")
def test_each_depth_looks_different():
    drawn = set()
    for depth in range(1, 6):
        screen = Screen(terminal := Terminal())
        screen.piece(Piece("word", depth))
        assert "word" in terminal.getvalue()
        drawn.add(terminal.getvalue())
    assert len(drawn) == 5


@pytest.mark.usefixtures("colour_terminal")
@pytest.mark.parametrize(("ceiling", "shown"), [(1, "1"), (3, "1 2 3"), (5, "1 2 3 4 5"), (8, "1 2 3 4 5+")])
def test_the_legend_shows_depths_as_tokens_do(ceiling: int, shown: str):
    screen = Screen(terminal := Terminal())
    screen.legend(ceiling)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert plain.split() == ["depth", *shown.split()]
    screen = Screen(token := Terminal())
    screen.piece(Piece(f" {ceiling} ", ceiling))
    assert ceiling > 4 or token.getvalue() in terminal.getvalue()


@pytest.mark.usefixtures("colour_terminal")
def test_no_color_writes_depths_as_digits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen(terminal := Terminal())
    for piece in (Piece("easy", 1), Piece(" hard\n", 2), Piece("  ", 3)):
        screen.piece(piece)
    shown = terminal.getvalue()
    assert "38;" not in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert plain == "easy hard₂\n  "


def test_a_pipe_gets_plain_text():
    screen = Screen(out := io.StringIO())
    screen.piece(Piece("a [bold]b[/bold] ", 3))
    assert out.getvalue() == "a [bold]b[/bold] "


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", [colour for colour in PALETTE if colour])
def test_colours_are_readable_on_black_and_on_white(colour: str):
    assert 1.05 / (luminance(colour) + 0.05) >= 4
    assert (luminance(colour) + 0.05) / 0.05 >= 4


def test_output_cannot_drive_the_terminal():
    assert printable("a\x1b[2Jb\r\x07\u202ec\n\td") == "a\ufffd[2Jb\ufffd\ufffd\ufffdc\n\td"
    assert printable("👩\u200d🚀 é 漢") == "👩\u200d🚀 é 漢"


def test_summary_says_what_an_answer_cost():
    said = summary(Tally([1, 2, 1, 1], 3_600_000, 3_000_000, 2.0, "stop"))
    assert said == (
        "4 tokens · mean depth 1.25 · by depth 1: 3, 2: 1 · 1.2 MFLOPs/token, 1.20x the plain model · 2.0 tokens/s"
    )
    assert summary(Tally([2], None, None, 0.0, None)) == "1 token · mean depth 2.00 · stopped"
    assert summary(Tally([], None, None, 1.0, None)) == "no tokens"
    assert [si(0.5), si(1234), si(5.6e13)] == ["0.5 ", "1.23 k", "56 T"]


def test_help_needs_no_model(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["chat", "--help"])
    assert end.value.code == 0
    assert "NO_COLOR" in capsys.readouterr().out


def test_a_model_that_nobody_converted_is_told_how_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    assert main(["chat", str(tmp_path)]) == 2
    assert f"tah2 convert {tmp_path} OUT" in capsys.readouterr().err


class Session:
    """`tah2 chat` behind a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "OMP_NUM_THREADS": "1"}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tah2", "chat", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def wait_for(self, text: str, timeout: float = 300) -> str:
        """Everything shown up to and with `text`; the next wait begins behind it."""
        end = time.monotonic() + timeout
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(end - time.monotonic(), 0))
            assert ready, f"{text!r} did not come; the screen shows {self.seen!r}"
            self.seen += os.read(self.master, 65536).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


@pytest.fixture
def session(folder: Path) -> Iterator[Session]:
    made = Session(str(folder), "--max-tokens", "3000", "--temperature", "0", "--device", "cpu")
    yield made
    made.process.kill()
    made.process.wait()
    os.close(made.master)


def test_a_whole_conversation_in_a_terminal(session: Session):
    session.wait_for("> ")
    session.type("/tokens 20\n")
    session.wait_for("at most 20 tokens")
    session.type("first line\\\nsecond line\n")
    assert "\x1b[38;2;" in session.wait_for("x the plain model")
    session.wait_for("> ")
    session.type("/tokens 3000\n")
    session.wait_for("at most 3000 tokens")
    session.wait_for("> ")
    session.type("go on for a while\n")
    session.wait_for("\x1b[38;2;")
    os.kill(session.process.pid, signal.SIGINT)
    session.wait_for("stopped")
    session.wait_for("> ")
    session.type("/quit\n")
    assert session.process.wait(timeout=120) == 0
