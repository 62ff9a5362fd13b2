"""The ranking example in parts: data sources, model, training loop, reports. Start at ``examples/train_ranking.py``."""
