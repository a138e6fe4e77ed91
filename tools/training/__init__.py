"""Corpus, losses, recipes and training loop of ``train_reference.py``."""
