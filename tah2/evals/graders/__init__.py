"""Graders: `grade` one response, or `grade_many` in several sandboxed workers."""

from tah2.evals.graders.grader import Answered, Grader, Package, Response
from tah2.evals.graders.grading import GRADERS, grade, grade_many, grader_of, packages_of, register

__all__ = [
    "GRADERS",
    "Answered",
    "Grader",
    "Package",
    "Response",
    "grade",
    "grade_many",
    "grader_of",
    "packages_of",
    "register",
]
