"""Where model-written code runs: one fresh room per run, with limits, and nothing of the machine in it."""

from tah2.evals.sandbox.client import Sandbox, sandbox_report
from tah2.evals.sandbox.limits import BUSY, Limits, Outcome, SandboxError

__all__ = ["BUSY", "Limits", "Outcome", "Sandbox", "SandboxError", "sandbox_report"]
