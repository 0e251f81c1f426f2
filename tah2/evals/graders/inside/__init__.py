"""What runs in the sandbox: one module a grader, imported by a worker ahead and called in a fresh room."""
