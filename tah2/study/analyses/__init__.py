"""What a trained loop does with its iterations: gains, alignment, depths and attention, on any looped checkpoint."""
