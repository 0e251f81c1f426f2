"""The training objective as pure functions: head readings, mixture likelihood, labels, balance and losses.

Knows nothing of models. Order of use for TaH2: `head.read_head` at every depth, `mixture.mixture_logprob`,
`evidence.collect_evidence`, `labels.continuation_labels`, `balance.class_balance`, `losses.joint_loss`.
"""
