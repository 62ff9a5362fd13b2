"""The Kunlun example in parts: the log, the models, the training loop. Start at ``examples/train_kunlun.py``."""
