"""The encoder every stage shares: settings, model sources, tokenising, batching, forward pass."""
