"""Teacher regeneration: prompts of data sets -> responses of a teacher -> filtered training data with provenance."""
