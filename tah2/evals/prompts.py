"""How a problem is put to a model: zero-shot, asking for reasoning before the answer.

Each maker returns the message for a chat template and the plain text for a model that has none. The plain text ends
where the model has to go on, without white space that its tokenizer would have to split from the first word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tah2.evals.task import Message

TEXT_STOP = ("\nProblem:", "\nQuestion:")
"""A model without a chat template that has answered tends to write the next problem."""
CODE_STOP = ("\nclass ", "\ndef ", "\n#", "\n@", "\nif __name__", "\nprint(", "\n```", "<|")
"""Where a function body has ended."""
FENCE_STOP = ("\n```",)

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
LETTER = (
    "Answer the following multiple choice question. Think step by step before answering. "
    "The last line of your response must have the form 'Answer: $LETTER' (without quotes), where LETTER is one of "
)
Prompt = tuple[tuple[Message, ...], str]


def user(content: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": content},)


def math_prompt(problem: str) -> Prompt:
    return user(f"{problem}\n\n{BOXED}"), f"{BOXED}\n\nProblem: {problem}\n\nSolution:"


def choice_prompt(question: str, options: Sequence[str], letters: str) -> Prompt:
    used = letters[: len(options)]
    listed = "\n".join(f"{letter}) {option}" for letter, option in zip(used, options, strict=True))
    asked = f"{LETTER}{used}."
    return user(f"{asked}\n\n{question}\n\n{listed}"), f"{asked}\n\nQuestion: {question}\n\n{listed}\n\nSolution:"


def complete_function_prompt(code: str) -> Prompt:
    """HumanEval: the code is a signature with a docstring; a model without a template continues it as it stands."""
    asked = (
        "Complete the following Python function. Think step by step, then give the whole function, with its imports, "
        f"in one ```python code block.\n\n```python\n{code.rstrip()}\n```"
    )
    return user(asked), code.rstrip() + "\n"


def write_function_prompt(text: str, example: str, name: str) -> Prompt:
    """MBPP: a sentence and one assertion that shows the signature."""
    shown = f"Your function must be named `{name}` and pass this test:\n```python\n{example.strip()}\n```"
    reason = "Think step by step, then give the whole solution in one ```python code block."
    plain = f'"""\n{text.strip()}\n{example.strip()}\n"""\n'
    return user(f"{text.strip()}\n\n{shown}\n\n{reason}"), plain


def contest_prompt(row: Mapping[str, str]) -> Prompt:
    """LiveCodeBench: a program that reads standard input, or a method of the class in the starter code."""
    form = (
        "Write a program that reads standard input and writes to standard output, whole, in one ```python code block."
    )
    if row["starter_code"]:
        form = (
            "Complete the starter code below, keeping the names of class and method, and give the whole solution in "
            f"one ```python code block.\n\n```python\n{row['starter_code'].rstrip()}\n```"
        )
    reason = "Solve this programming problem in Python. Think step by step before you write the code."
    asked = f"{reason}\n\n{row['problem']}\n\n{form}"
    return user(asked), f"{asked}\n\nSolution:\n```python\n"
